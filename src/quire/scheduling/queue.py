"""The requests that wait, in order of service."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from quire.request import Request

OrderKey = tuple[int, int]
"""What requests are sorted by: (priority as the policy sees it, number of arrival); lower goes first."""


def fcfs_order(request: Request, arrival: int) -> OrderKey:
    """First come, first served."""
    return (0, arrival)


def priority_order(request: Request, arrival: int) -> OrderKey:
    """Lower priority value first; ties by arrival."""
    return (request.priority, arrival)


ORDERS: dict[str, Callable[[Request, int], OrderKey]] = {"fcfs": fcfs_order, "priority": priority_order}


class WaitingQueue:
    """A priority queue with removal by id; pushing, popping and removing cost O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[OrderKey, Request]] = []
        self._requests: dict[str, Request] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> Request | None:
        """Return the waiting request with this id, or None."""
        return self._requests.get(request_id)

    def push(self, key: OrderKey, request: Request) -> None:
        """Add a request; keys are unique."""
        heapq.heappush(self._heap, (key, request))
        self._requests[request.request_id] = request
        self.num_tokens += request.num_tokens

    def head(self) -> Request | None:
        """Return the request to serve next, or None."""
        while self._heap and self._requests.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, request_id: str) -> None:
        """Take out a request that waits; its place in the heap is cleared when it comes to the head."""
        self.num_tokens -= self._requests.pop(request_id).num_tokens
        if len(self._heap) > 2 * len(self._requests) + 16:
            self._compact()

    def _compact(self) -> None:
        self._heap = [item for item in self._heap if self._requests.get(item[1].request_id) is item[1]]
        heapq.heapify(self._heap)
