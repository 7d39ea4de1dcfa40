"""Blocks held without a running request: pinned prefixes, and KV that a peer still reads.

This only records who holds what until when. The block pool alone changes reference counts: the caller that
grants a lease takes one reference on each of its blocks, the caller that releases it drops them. Times are
seconds on any one clock, and are passed in.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
from collections.abc import Iterator

from quire.step import IntArray


class LeaseKind(enum.StrEnum):
    """What a lease is for: a pin is a wish, broken under memory pressure; a transfer is a promise."""

    PIN = "pin"
    TRANSFER = "transfer"


@dataclasses.dataclass(slots=True)
class Lease:
    """Blocks held until a deadline (seconds)."""

    lease_id: str
    kind: LeaseKind
    block_ids: IntArray  # [G, blocks], each once
    deadline: float


@dataclasses.dataclass(slots=True, frozen=True)
class LeaseSummary:
    """All leases of one kind: their distinct blocks, and when the first and the last one end (seconds)."""

    kind: LeaseKind
    num_leases: int
    num_blocks: int
    last_deadline: float


class LeaseTable:
    """All leases, by id and by deadline. Every operation is O(log leases), besides copying block ids."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        # One entry per lease or more; the first for a lease is never later than its deadline.
        self._by_deadline: list[tuple[float, str]] = []
        self._num_blocks = dict.fromkeys(LeaseKind, 0)

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def kind(self, lease_id: str) -> LeaseKind | None:
        """Return what a lease is for; None if it is not held."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.kind

    def grant(self, lease_id: str, kind: LeaseKind, block_ids: IntArray, deadline: float) -> None:
        """Hold `block_ids` [G, blocks] until `deadline`.

        Raises:
            ValueError: a lease with this id is held already.
        """
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id!r} is held already; release it before it is granted again")
        self._leases[lease_id] = Lease(lease_id, kind, block_ids, deadline)
        self._num_blocks[kind] += block_ids.shape[1]
        self._note_deadline(deadline, lease_id)

    def renew(self, lease_id: str, deadline: float) -> bool:
        """Extend a lease; False if it is not held, because it expired or was released.

        An earlier deadline than the present one changes nothing.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.deadline = max(lease.deadline, deadline)
        return True

    def release(self, lease_id: str) -> Lease | None:
        """End a lease and return it.

        None if it is not held: a transfer may be reported after its lease has expired.
        """
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._num_blocks[lease.kind] -= lease.block_ids.shape[1]
        return lease

    def expired(self, now: float) -> list[str]:
        """Return the leases whose deadline is not after `now`, first due first; they stay until released."""
        heap = self._by_deadline
        if not heap or heap[0][0] > now:
            return []
        due: dict[str, float] = {}
        while heap and heap[0][0] <= now:
            _, lease_id = heapq.heappop(heap)
            lease = self._leases.get(lease_id)
            if lease is None or lease_id in due:
                continue
            if lease.deadline > now:
                heapq.heappush(heap, (lease.deadline, lease_id))
            else:
                due[lease_id] = lease.deadline
        for lease_id, deadline in due.items():
            heapq.heappush(heap, (deadline, lease_id))
        return sorted(due, key=due.__getitem__)

    def next_deadline(self) -> float | None:
        """Return when the first of them ends that is not renewed; None: there are none. O(leases)."""
        return min((lease.deadline for lease in self._leases.values()), default=None)

    def break_pins(self) -> list[Lease]:
        """End all pins, because memory is short, and return them, oldest first; transfers stay."""
        if not self._num_blocks[LeaseKind.PIN]:
            return []
        pins = [lease for lease in self._leases.values() if lease.kind is LeaseKind.PIN]
        for lease in pins:
            self.release(lease.lease_id)
        return pins

    def held(self) -> Iterator[IntArray]:
        """Yield the blocks [G, blocks] of each lease: what invariant 2 counts."""
        for lease in self._leases.values():
            yield lease.block_ids

    def num_blocks(self, kind: LeaseKind) -> int:
        """Return the blocks held by leases of `kind`, each counted once for every lease that holds it."""
        return self._num_blocks[kind]

    def describe(self) -> list[LeaseSummary]:
        """Return, for each kind that is held, how many blocks and until when."""
        summaries = []
        for kind in LeaseKind:
            leases = [lease for lease in self._leases.values() if lease.kind is kind]
            if leases:
                blocks = {block_id for lease in leases for block_id in lease.block_ids[0].tolist()}
                deadlines = [lease.deadline for lease in leases]
                summaries.append(LeaseSummary(kind, len(leases), len(blocks), max(deadlines)))
        return summaries

    def _note_deadline(self, deadline: float, lease_id: str) -> None:
        """Enter a deadline; once most entries are of leases that are gone, those are removed."""
        heapq.heappush(self._by_deadline, (deadline, lease_id))
        if len(self._by_deadline) > 2 * len(self._leases) + 16:
            self._by_deadline = [(lease.deadline, lease.lease_id) for lease in self._leases.values()]
            heapq.heapify(self._by_deadline)
