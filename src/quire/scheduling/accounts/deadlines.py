"""When requests time out: a heap of deadlines, on whatever clock the caller reads."""

from __future__ import annotations

import heapq
from typing import Literal

DeadlineKind = Literal["queue", "total"]
"""Until a request first runs, or until it ends."""


class Deadlines:
    """The deadlines of all live requests, at most one of each kind for each.

    A deadline that was forgotten stays in the heap until it comes to the top, or until more than half of the
    heap is such deadlines. Every operation is O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, DeadlineKind]] = []
        self._live: dict[DeadlineKind, dict[str, float]] = {"queue": {}, "total": {}}

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    def add(self, request_id: str, kind: DeadlineKind, at: float) -> None:
        """Set a request's deadline to `at` (seconds), replacing one of the same kind."""
        self._live[kind][request_id] = at
        heapq.heappush(self._heap, (at, request_id, kind))
        self._compact()

    def expired(self, now: float) -> list[tuple[str, DeadlineKind]]:
        """Remove the deadlines that have passed and return them, earliest first."""
        heap = self._heap
        if not heap or heap[0][0] > now:
            return []
        passed: list[tuple[str, DeadlineKind]] = []
        while heap and heap[0][0] <= now:
            at, request_id, kind = heapq.heappop(heap)
            if self._live[kind].get(request_id) == at:
                del self._live[kind][request_id]
                passed.append((request_id, kind))
        return passed

    def forget_queue(self, request_id: str) -> None:
        """Drop a request's queue deadline, if it has one: it runs."""
        self._live["queue"].pop(request_id, None)
        self._compact()

    def forget(self, request_id: str) -> None:
        """Drop a request's deadlines, if it has any: it has ended."""
        self._live["total"].pop(request_id, None)
        self.forget_queue(request_id)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self) + 16:
            live = self._live
            self._heap = [(at, name, kind) for kind, of_kind in live.items() for name, at in of_kind.items()]
            heapq.heapify(self._heap)
