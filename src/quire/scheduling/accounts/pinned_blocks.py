"""How many KV blocks pins hold, and whose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class PinnedBlocks:
    """Counts pinned blocks, each once however many pins hold it, and bounds them.

    Args:
        most: blocks that all pins may hold.
        most_of_tenant: blocks that the pins of one tenant may hold.
    """

    def __init__(self, most: int, most_of_tenant: int) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._all: Counter[int] = Counter()  # pins by block
        self._by_tenant: dict[str, Counter[int]] = {}  # of those that have pins
        self._owners: dict[str, str] = {}  # tenants by pin

    def has_room(self, tenant: str, block_ids: Sequence[int]) -> bool:
        """Whether a pin of these blocks would be within the bounds."""
        own = self._by_tenant.get(tenant, Counter())
        return _num_held(self._all, block_ids) <= self._most and (
            _num_held(own, block_ids) <= self._most_of_tenant
        )

    def add(self, pin_id: str, tenant: str, block_ids: Sequence[int]) -> None:
        """Count a pin that is not counted yet."""
        self._owners[pin_id] = tenant
        for held in (self._all, self._by_tenant.setdefault(tenant, Counter())):
            held.update(block_ids)

    def remove(self, pin_id: str, block_ids: Sequence[int]) -> None:
        """Count a pin no more."""
        tenant = self._owners.pop(pin_id)
        for held in (self._all, self._by_tenant[tenant]):
            held.subtract(block_ids)
            for block_id in block_ids:
                if not held[block_id]:
                    del held[block_id]
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


def _num_held(held: Counter[int], block_ids: Sequence[int]) -> int:
    return len(held) + sum(block_id not in held for block_id in block_ids)
