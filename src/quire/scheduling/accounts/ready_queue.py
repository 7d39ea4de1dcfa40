"""The requests that are ready and wait for a slot, in the order of a `QueueOrder`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from quire.request import Request
from quire.scheduling.policies.order import OrderKey, QueueOrder


def _line_of(request: Request) -> tuple[Hashable, ...]:
    """Return the key of a request's line: requests of one line have one flow and one priority."""
    return request.flow, request.priority, request.tenant


def _came_first(request: Request) -> None:
    """Give the first request of a flow its place, dated by its arrival."""
    request.queued_time, request.has_had_place = request.arrival_time, True


class _Place(NamedTuple):
    """Where a request waits; places in one lane are compared by their first two fields."""

    key: OrderKey
    serial: int
    request: Request
    lane: Hashable
    num_tokens: int


class _Line:
    """The requests of a flow that wait for a place, behind the one that was last to take one."""

    def __init__(self, first: str) -> None:
        self.first = first  # id of that one
        self._heap: list[tuple[int, Request]] = []
        self._waiting: dict[str, Request] = {}  # what left is in the heap until it comes to the head

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (request.arrival, request))

    def remove(self, request_id: str) -> None:
        del self._waiting[request_id]

    def pop(self) -> Request:
        """Remove and return the first request of the line, which must not be empty."""
        while True:
            _, request = heapq.heappop(self._heap)
            if self._waiting.get(request.request_id) is request:
                return self._waiting.pop(request.request_id)


class ReadyQueue:
    """One heap for each lane of the order.

    Of the requests of one flow that have not had a place yet, only one takes a place in a lane: the others
    line up behind it. When it leaves the queue, the next one takes a place as if it came only then. So a flow
    gives way to requests that have come meanwhile, and each of its requests waits for finitely many others: a
    round robin over the flows (Nagle 1987, "On Packet Switches with Infinite Storage"). Flows of one request
    each are served as they come.

    Pushing and removing cost O(log n). A place that was left stays in its heap until it comes to the head of
    its lane, or until more than half of the heap is such places. The first requests of the lanes are in
    another heap. Asking for the head computes the keys of those that are new or whose lane has changed by
    `QueueOrder.changed_lanes`; of all, if the order does not say which.

    Args:
        order: of the queue.
        take_place: dates a request that takes its place behind others of its flow, and renumbers it.
    """

    def __init__(self, order: QueueOrder, take_place: Callable[[Request], None] = _came_first) -> None:
        self._order = order
        self._take_place = take_place
        self._lines: dict[tuple[Hashable, ...], _Line] = {}
        self._in_line: dict[str, Request] = {}
        self._places: dict[str, _Place] = {}
        self._lanes: dict[Hashable, list[_Place]] = {}  # the first of each heap is never one that was left
        self._lane_sizes: dict[Hashable, int] = {}
        self._firsts: list[
            tuple[OrderKey, int, Hashable]
        ] = []  # key, serial number, lane; may be out of date
        self._first_keys: dict[Hashable, OrderKey] = {}  # of the first request of each lane in `_firsts`
        self._lanes_to_file: set[Hashable] = set()
        self._passed_over: list[_Place] = []
        self._serials = itertools.count()
        self._is_resorted = False
        self.num_tokens = 0  # prompt and output tokens of all that wait

    def __len__(self) -> int:
        return len(self._places) + len(self._in_line)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, not in order of service."""
        return itertools.chain((place.request for place in self._places.values()), self._in_line.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places or request_id in self._in_line

    def get(self, request_id: str) -> Request | None:
        """Return the waiting request with this id, or None."""
        place = self._places.get(request_id)
        return self._in_line.get(request_id) if place is None else place.request

    def push(self, request: Request) -> None:
        """Add a request that is not in the queue; one that has had a place before gets it back at once."""
        if request.has_had_place:
            self._queue(request)
            return
        name = _line_of(request)
        line = self._lines.get(name)
        if line is None:
            self._lines[name] = _Line(request.request_id)
            _came_first(request)
            self._queue(request)
        else:
            line.push(request)
            self._in_line[request.request_id] = request
            self.num_tokens += request.num_tokens

    def is_in_line(self, request_id: str) -> bool:
        """Whether a request waits for its place behind others of its flow."""
        return request_id in self._in_line

    def num_in_line(self, request: Request) -> int:
        """Return how many requests of a request's flow, and of its priority, have no place yet."""
        line = self._lines.get(_line_of(request))
        return 0 if line is None else len(line)

    def _queue(self, request: Request) -> None:
        self._order.queued(request)
        self._put(self._new_place(request))

    def head(self) -> Request | None:
        """Return the request to serve next, or None."""
        head = self._find_head()
        if self._order.is_replaced and not self._is_resorted:
            self._resort()
            head = self._find_head()
        return head

    def _find_head(self) -> Request | None:
        lanes, changed = self._lanes, self._order.changed_lanes()
        if changed is not None:
            self._lanes_to_file.update(changed)
        if not lanes:
            return None
        if len(lanes) == 1:
            [only] = lanes.values()
            return only[0].request
        if changed is None:
            return min([heap[0].request for heap in lanes.values()], key=self._order.key)
        self._file_lanes()
        return lanes[self._firsts[0][2]][0].request

    def num_before(self, request: Request) -> int:
        """Return how many requests would be served before a waiting one at present.

        Whole lanes count by their first request.
        """
        self.head()
        place, key = self._places[request.request_id], self._order.key(request)
        own_lane = self._lanes[place.lane]
        count = sum(self._is_current(other) and other[:2] < place[:2] for other in own_lane)
        for lane, heap in self._lanes.items():
            if lane != place.lane:
                first_key = self._first_keys.get(lane) or self._order.key(heap[0].request)
                count += self._lane_sizes[lane] if first_key < key else 0
        return count

    def remove(self, request_id: str) -> None:
        """Take out a request that waits.

        Raises:
            KeyError: it does not.
        """
        in_line = self._in_line.pop(request_id, None)
        if in_line is not None:
            self.num_tokens -= in_line.num_tokens
            self._lines[_line_of(in_line)].remove(request_id)
            return
        self.let_next_up(self._places[request_id].request)
        self._order.unqueued(self._take(request_id).request)

    def let_next_up(self, request: Request) -> None:
        """Give the next of its line a place if a request, the first of it, leaves or cannot start yet."""
        name = _line_of(request)
        line = self._lines.get(name)
        if line is None or line.first != request.request_id:
            return
        if not len(line):
            del self._lines[name]
            return
        following = line.pop()
        line.first = following.request_id
        del self._in_line[following.request_id]
        self.num_tokens -= following.num_tokens
        following.has_had_place = True
        self._take_place(following)
        self._queue(following)

    def pass_over(self, request_id: str) -> None:
        """Put a request that waits aside until `restore`; for the order, it has not left the queue."""
        self._passed_over.append(self._take(request_id))

    def restore(self) -> None:
        """Put the requests that were passed over back to their places."""
        for place in self._passed_over:
            self._put(place)
        self._passed_over.clear()

    def _resort(self) -> None:
        """Give every request a new place: the order has been replaced."""
        self._is_resorted = True
        waiting = [place.request for place in self._places.values()]
        for held in (self._places, self._lanes, self._lane_sizes, self._first_keys):
            held.clear()
        self._firsts.clear()
        self._lanes_to_file.clear()
        self.num_tokens = sum(request.num_tokens for request in self._in_line.values())
        for request in waiting:
            self._put(self._new_place(request))
        self._passed_over = [self._new_place(place.request) for place in self._passed_over]

    def _new_place(self, request: Request) -> _Place:
        order = self._order
        lane = order.lane(request)
        return _Place(order.lane_key(request), next(self._serials), request, lane, request.num_tokens)

    def _put(self, place: _Place) -> None:
        lane = place.lane
        self._places[place.request.request_id] = place
        heapq.heappush(self._lanes.setdefault(lane, []), place)
        self._lane_sizes[lane] = self._lane_sizes.get(lane, 0) + 1
        self._lanes_to_file.add(lane)
        self.num_tokens += place.num_tokens

    def _take(self, request_id: str) -> _Place:
        place = self._places.pop(request_id)
        lane = place.lane
        self.num_tokens -= place.num_tokens
        size = self._lane_sizes[lane] - 1
        if size:
            self._lane_sizes[lane] = size
            self._lanes_to_file.add(lane)
            self._clear_places(lane, size)
        else:
            del self._lanes[lane], self._lane_sizes[lane]
            self._lanes_to_file.discard(lane)
            self._first_keys.pop(lane, None)
        return place

    def _file_lanes(self) -> None:
        """Bring `_firsts` up to date."""
        for lane in self._lanes_to_file:
            if lane in self._lanes:
                key = self._order.key(self._lanes[lane][0].request)
                if self._first_keys.get(lane) != key:
                    self._first_keys[lane] = key
                    heapq.heappush(self._firsts, (key, next(self._serials), lane))
        self._lanes_to_file.clear()
        firsts, keys = self._firsts, self._first_keys
        while keys.get(firsts[0][2]) is not firsts[0][0]:
            heapq.heappop(firsts)
        if len(firsts) > 2 * len(keys) + 16:
            firsts[:] = [entry for entry in firsts if keys.get(entry[2]) is entry[0]]
            heapq.heapify(firsts)

    def _is_current(self, place: _Place) -> bool:
        return self._places.get(place.request.request_id) is place

    def _clear_places(self, lane: Hashable, size: int) -> None:
        """Drop places that were left from the head of a lane, and all of them if they are too many."""
        heap = self._lanes[lane]
        while not self._is_current(heap[0]):
            heapq.heappop(heap)
        if len(heap) > 2 * size + 16:
            heap[:] = filter(self._is_current, heap)
            heapq.heapify(heap)
