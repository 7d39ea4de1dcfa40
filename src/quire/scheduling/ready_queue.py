"""The requests that are ready and wait for a slot, in the order of a `QueueOrder`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from quire.request import Request
from quire.scheduling.policies.order import OrderKey, QueueOrder


class _Place(NamedTuple):
    """Where a request waits; places in one lane are compared by their first two fields."""

    key: OrderKey
    serial: int
    request: Request
    lane: Hashable
    num_tokens: int


class ReadyQueue:
    """One heap for each lane of the order.

    Pushing and removing cost O(log n). A place that was left stays in its heap until it comes to the head of
    its lane, or until more than half of the heap is such places. Asking for the head costs one key for each
    lane if there are several, and next to nothing if there is one.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._places: dict[str, _Place] = {}
        self._lanes: dict[Hashable, list[_Place]] = {}  # the first of each heap is never one that was left
        self._lane_sizes: dict[Hashable, int] = {}
        self._serials = itertools.count()
        self.num_tokens = 0  # prompt and output tokens of all that wait

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests as they were pushed, not in order of service."""
        return (place.request for place in self._places.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    def get(self, request_id: str) -> Request | None:
        """Return the waiting request with this id, or None."""
        place = self._places.get(request_id)
        return None if place is None else place.request

    def push(self, request: Request) -> None:
        """Add a request that is not in the queue."""
        order = self._order
        order.queued(request)
        lane = order.lane(request)
        place = _Place(order.lane_key(request), next(self._serials), request, lane, request.num_tokens)
        self._places[request.request_id] = place
        heapq.heappush(self._lanes.setdefault(lane, []), place)
        self._lane_sizes[lane] = self._lane_sizes.get(lane, 0) + 1
        self.num_tokens += place.num_tokens

    def head(self) -> Request | None:
        """Return the request to serve next, or None."""
        lanes = self._lanes.values()
        if len(lanes) > 1:
            return min([heap[0].request for heap in lanes], key=self._order.key)
        for heap in lanes:
            return heap[0].request
        return None

    def remove(self, request_id: str) -> None:
        """Take out a request that waits.

        Raises:
            KeyError: it does not.
        """
        place = self._places.pop(request_id)
        self.num_tokens -= place.num_tokens
        size = self._lane_sizes[place.lane] - 1
        if size:
            self._lane_sizes[place.lane] = size
            self._clear_places(place.lane, size)
        else:
            del self._lanes[place.lane], self._lane_sizes[place.lane]
        self._order.unqueued(place.request)

    def _clear_places(self, lane: Hashable, size: int) -> None:
        """Drop places that were left from the head of a lane, and all of them if they are too many."""
        heap, places = self._lanes[lane], self._places
        while places.get(heap[0].request.request_id) is not heap[0]:
            heapq.heappop(heap)
        if len(heap) > 2 * size + 16:
            heap[:] = [place for place in heap if places.get(place.request.request_id) is place]
            heapq.heapify(heap)
