"""Finds the request that makes steps fail, by computing those of a failed step in smaller groups."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

PROBE_ID = "\0probe"  # NUL: no client's request has such an id
"""Id of the request that the engine makes after a failed step, to see whether it can compute at all."""


class Suspects:
    """The requests of steps that failed, until they are known to be innocent or at fault.

    After a failed step nothing runs but the probe, if there is one, then half of the suspects. Those of a
    step that is computed are cleared and go on; if it fails, half of its suspects are tried next. One that
    was in a step that failed and then fails alone is at fault. Requests that fail only together take turns.
    """

    def __init__(self) -> None:
        self._suspects: dict[str, None] = {}  # in the order in which they are tried
        self._cleared: set[str] = set()
        self._group_size = 0

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._suspects

    def cause_of_failure(self, request_ids: Sequence[str]) -> str | None:
        """Record a failed step with these requests; return the one at fault, if that is known."""
        if PROBE_ID in request_ids:
            return PROBE_ID
        if len(request_ids) == 1 and request_ids[0] in self._suspects:
            del self._suspects[request_ids[0]]
            self._halve(len(self._suspects))
            return request_ids[0]
        unproven = [request_id for request_id in request_ids if request_id not in self._cleared]
        self._suspects = dict.fromkeys(unproven) | self._suspects
        if len(unproven) <= 1:  # in other company, or longer than before, any may be the cause
            self._suspects |= dict.fromkeys(request_ids)
            self._cleared.clear()
        self._halve(len(unproven))
        return None

    def clear(self, request_ids: Sequence[str]) -> None:
        """Record a successful step with these requests."""
        innocent = [request_id for request_id in request_ids if request_id in self._suspects]
        for request_id in innocent:
            del self._suspects[request_id]
        self._cleared.update(innocent)
        if innocent:
            self._halve(len(self._suspects))

    def may_start(self, is_live: Callable[[str], bool]) -> Container[str] | None:
        """Return the ids of the requests that may start in this step; None: any."""
        for request_id in [name for name in self._suspects if not is_live(name)]:
            del self._suspects[request_id]
        if not self._suspects:
            self._cleared.clear()
            return None
        if is_live(PROBE_ID):
            return {PROBE_ID}
        return self._cleared.union(list(self._suspects)[: self._group_size])

    def _halve(self, num_suspects: int) -> None:
        self._group_size = max(1, num_suspects // 2)
