"""In which order waiting requests are served: one method to write, `QueueOrder.key`."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable

from typing_extensions import override

from quire.config import SchedulerConfig
from quire.request import Request
from quire.scheduling.policies.fair_share import VirtualTokenCounters
from quire.status import RequestStatus

OrderKey = tuple[float, ...]
"""What requests are sorted by: lower goes first. It ends with the arrival number, so no two are equal."""


class QueueOrder(ABC):
    """Sorts the waiting requests.

    Requests wait in *lanes*. In a lane they are sorted by `lane_key`, computed once, when they are queued. Of
    the requests at the heads of the lanes, the one with the lowest `key` is served next; these keys are
    computed again each time. An order whose keys never change needs one lane and only `key`. One whose keys
    change with what has been served puts requests whose keys change together into one lane.

    Args:
        config: of the scheduler.
        find_cached: returns how many tokens at the start of a request's prompt are in the prefix cache now.
    """

    reads_priority: bool = True
    """Whether keys depend on `Request.priority`; a request is refused a priority that no policy reads."""

    def __init__(self, *, config: SchedulerConfig, find_cached: Callable[[Request], int]) -> None:
        self.config = config
        self.find_cached = find_cached

    @property
    def is_replaced(self) -> bool:
        """Whether another order has taken the place of this one, so that all keys have changed."""
        return False

    @abstractmethod
    def key(self, request: Request) -> OrderKey:
        """Return the present key of a waiting request; the lowest is served first.

        `request.queued_time`, in seconds on the scheduler's clock, is when the request came: to this engine,
        or before that to a router or to an engine that has died. `request.arrival` is its number in the order
        in which this scheduler got them, with which a key ends. For one that has waited behind others of its
        flow, both are as if it had come when the one before it left the queue.
        """

    def lane(self, request: Request) -> Hashable:
        """Return the lane that a request is put into when it is queued."""
        return ""

    def lane_key(self, request: Request) -> OrderKey:
        """Return the key of a request within its lane."""
        return self.key(request)

    def running_key(self, request: Request) -> OrderKey:
        """Return the key of a request while it runs, computed once, when it is admitted.

        The running requests are served in this order, and the last of them is the usual victim.
        """
        return self.key(request)

    def changed_lanes(self) -> Collection[Hashable] | None:
        """Return the lanes whose requests may have other keys than at the last call; None: all of them.

        With None, the key of the first request of every lane is computed whenever the head is asked for.
        """
        return None

    def queued(self, request: Request) -> None:  # noqa: B027, few orders need it
        """Called when a request is about to be queued; its keys are asked for next."""

    def unqueued(self, request: Request) -> None:  # noqa: B027, few orders need it
        """Called when a request has left the queue: admitted, or ended while it waited."""

    def admitted(self, request: Request) -> None:  # noqa: B027, few orders need it
        """Called when a request enters its slot; its status is still that of a waiting one."""

    def left(self, request: Request) -> None:  # noqa: B027, few orders need it
        """Called when a request has left its slot: its status says why, its output is up to date."""


class FirstComeFirstServed(QueueOrder):
    """By the time of arrival."""

    reads_priority = False

    @override
    def key(self, request: Request) -> OrderKey:
        return _turn(request)


class Priority(QueueOrder):
    """Lower priority value first; `SchedulerConfig.priority_ageing` seconds of waiting make up for one level.

    All requests age at the same speed, so their order never changes: priority minus waited levels compares
    like the time when it was queued plus priority in seconds.
    """

    @override
    def key(self, request: Request) -> OrderKey:
        ageing = self.config.priority_ageing
        if ageing > 0:
            return (request.queued_time + request.priority * ageing, request.arrival)
        return (request.priority, *_turn(request))


class FairShare(QueueOrder):
    """The tenant that has been served least first; within a tenant, by arrival.

    See `VirtualTokenCounters` for what counts as service. Preempted requests go first: their tenant has paid
    for them, and what they had computed may still be cached.
    """

    reads_priority = False

    def __init__(self, *, config: SchedulerConfig, find_cached: Callable[[Request], int]) -> None:
        super().__init__(config=config, find_cached=find_cached)
        self._counters = VirtualTokenCounters()

    @override
    def key(self, request: Request) -> OrderKey:
        return (_arrives_again(request), self._counters.of(request.tenant), *_turn(request))

    @override
    def lane(self, request: Request) -> Hashable:
        return request.tenant

    @override
    def lane_key(self, request: Request) -> OrderKey:
        return (_arrives_again(request), *_turn(request))

    @override
    def running_key(self, request: Request) -> OrderKey:
        return _turn(request)

    @override
    def changed_lanes(self) -> Collection[Hashable]:
        return self._counters.take_changed()

    @override
    def queued(self, request: Request) -> None:
        self._counters.queued(request.tenant)

    @override
    def unqueued(self, request: Request) -> None:
        self._counters.unqueued(request.tenant)

    @override
    def admitted(self, request: Request) -> None:
        self._counters.charge(request)

    @override
    def left(self, request: Request) -> None:
        self._counters.settle(request)


class LongestPrefix(QueueOrder):
    """The request with the most cached prompt tokens first, among those that arrived at about the same time.

    That computes least and keeps a prefix in the cache while it is in use (RadixAttention's order, Zheng et
    al. 2024, "SGLang: Efficient Execution of Structured Language Model Programs"). By itself it could let a
    request with nothing cached wait for ever, so arrivals are cut into windows of `WINDOW`, and no request is
    overtaken by a request of a later window.

    Requests with the same first block share a lane. Within it, what was cached when they were queued counts;
    between lanes, what is cached now.
    """

    reads_priority = False
    WINDOW = 1024
    # More lanes would cost time each time the head is asked for: the lookup is made for every lane's head.
    MAX_LANES = 128

    @override
    def key(self, request: Request) -> OrderKey:
        if request.status is RequestStatus.PREEMPTED:
            return (0, 0, 0, *_turn(request))
        return (1, request.arrival // self.WINDOW, -self.find_cached(request), *_turn(request))

    @override
    def lane(self, request: Request) -> Hashable:
        # Not `hash`, which differs from process to process: a recorded run must replay the same.
        first_block = request.prompt_array[: self.config.block_size].tobytes()
        return zlib.crc32(first_block, zlib.crc32(request.cache_salt.encode())) % self.MAX_LANES

    @override
    def running_key(self, request: Request) -> OrderKey:
        return _turn(request)


def _arrives_again(request: Request) -> bool:
    return request.status is not RequestStatus.PREEMPTED


def _turn(request: Request) -> OrderKey:
    """Return the key that breaks ties: the time of arrival, and the order of arrival here."""
    return (request.queued_time, request.arrival)
