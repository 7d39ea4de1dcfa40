"""Which slots belong to which beam search.

Every beam has a slot from admission to the end of the search, whether the beam is alive or not.
"""

from __future__ import annotations

import dataclasses

from quire.request import Request
from quire.scheduling.beam_search import BeamCandidates, BeamSearch, BeamStep


@dataclasses.dataclass(slots=True)
class BeamGroup:
    """One running search; beam number p is in slot `slots[p]`, and the request itself is in `slots[0]`."""

    request: Request
    search: BeamSearch
    slots: list[int]
    candidates: dict[int, BeamCandidates] = dataclasses.field(default_factory=dict)  # by place
    step: BeamStep | None = None  # decided, and not yet planned


class BeamGroups(dict[str, BeamGroup]):
    """The running searches by request, and by slot."""

    def __init__(self) -> None:
        super().__init__()
        self._by_slot: dict[int, BeamGroup] = {}

    @property
    def num_more_slots(self) -> int:
        """How many more slots than requests the searches have."""
        return len(self._by_slot) - len(self)

    def at(self, slot: int) -> BeamGroup | None:
        """Return the search that a slot belongs to, or None."""
        return self._by_slot.get(slot)

    def add(self, group: BeamGroup) -> None:
        """Add a search that has its slots."""
        self[group.request.request_id] = group
        self._by_slot.update(dict.fromkeys(group.slots, group))

    def take(self, request_id: str) -> BeamGroup | None:
        """Forget a request's search and return it, if it has one that runs."""
        group = self.pop(request_id, None)
        if group is not None:
            for slot in group.slots:
                del self._by_slot[slot]
        return group
