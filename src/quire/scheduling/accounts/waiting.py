"""Every accepted request that does not run: in the queue, or where something else must happen first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from quire.errors import QuireError
from quire.grammar.manager import GrammarManager
from quire.request import Request
from quire.scheduling.accounts.ready_queue import ReadyQueue
from quire.scheduling.accounts.remote_loads import RemoteLoads
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.scheduling.policies.order import QueueOrder
from quire.status import RequestStatus

DRAIN_WINDOW = 10.0  # seconds after which an observation is weighted by 1 / e
MIN_WAIT = 1.0  # seconds
MAX_WAIT = 60.0  # seconds


class WaitingRequests:
    """The queue, and beside it the requests whose grammar, shared prompt or KV is not there yet.

    Args:
        order: of the queue.
        grammars: compiles what structured requests need.
        loads: KV that is on its way; its requests wait for it.
        running: has the requests whose prompts others may share.
        read_clock: returns seconds, to measure how fast the queue drains.
    """

    def __init__(
        self,
        order: QueueOrder,
        grammars: GrammarManager,
        loads: RemoteLoads,
        running: RunningSlots,
        *,
        read_clock: Callable[[], float],
    ) -> None:
        self.queue = ReadyQueue(order, self._take_place)
        self._read_clock = read_clock
        self._numbers = itertools.count()
        self.drain_rate = DrainRate(read_clock)
        self._grammars = grammars
        self._loads = loads
        self._running = running
        self._compiling: dict[str, Request] = {}
        self._followers: dict[str, dict[str, Request]] = {}  # by the request whose prompt they share
        self._leader_of: dict[str, str] = {}
        self._num_tokens_beside = 0  # of requests that compile or follow

    def __len__(self) -> int:
        return len(self.queue) + len(self._compiling) + len(self._leader_of) + self._loads.num_loading

    def __iter__(self) -> Iterator[Request]:
        followers = itertools.chain.from_iterable(group.values() for group in self._followers.values())
        loading = (load.request for load in self._loads.loading())
        return itertools.chain(self.queue, self._compiling.values(), followers, loading)

    def __contains__(self, request_id: str) -> bool:
        return self.get(request_id) is not None

    @property
    def num_awaiting(self) -> int:
        """Number of requests whose grammar is being compiled, or whose KV is on its way."""
        return len(self._compiling) + self._loads.num_loading

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all waiting requests, except those whose KV is being loaded."""
        return self.queue.num_tokens + self._num_tokens_beside

    def get(self, request_id: str) -> Request | None:
        """Return the waiting request with this id, or None."""
        request = self.queue.get(request_id) or self._compiling.get(request_id)
        if request is None and request_id in self._leader_of:
            request = self._followers[self._leader_of[request_id]][request_id]
        if request is None and (load := self._loads.get(request_id)) is not None:
            request = load.request
        return request

    def number(self, request: Request) -> float:
        """Number and date an arriving request, and return the time; a resumed one keeps its place."""
        request.arrival = next(self._numbers)
        now = self._read_clock()
        request.arrival_time = min(now, request.arrival_time)
        if request.output_token_ids:
            request.queued_time, request.has_had_place = request.arrival_time, True
        return now

    def _take_place(self, request: Request) -> None:
        """Give a request that now takes a place in the queue a new number and time."""
        request.arrival = next(self._numbers)
        request.queued_time = self._read_clock()

    def enter(self, request: Request) -> None:
        """Add a new request.

        Raises:
            InvalidRequestError: it has a grammar, and the engine cannot compile any.
        """
        if request.sampling_params.structured_outputs is None:
            self._line_up(request)
        else:
            self._grammars.start(request)
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self._compiling[request.request_id] = request
            self._num_tokens_beside += request.num_tokens

    def take_compiled(self) -> list[tuple[Request, QuireError]]:
        """Queue the requests whose grammar is ready; return those that have none, and the error."""
        faulty = []
        for request_id, error in self._grammars.take_compiled():
            request = self._compiling.pop(request_id)
            self._num_tokens_beside -= request.num_tokens
            if error is None:
                request.status = RequestStatus.WAITING
                self._line_up(request)
            else:
                faulty.append((request, error))
        return faulty

    def admit(self, request: Request) -> None:
        """Take a request out of the queue because it gets a slot."""
        self.queue.remove(request.request_id)
        if request.status is not RequestStatus.PREEMPTED:
            self.drain_rate.note(request.num_tokens, 1, queue_is_empty=not len(self.queue))

    def begin_load(self, request: Request) -> None:
        """Take a request out of the queue because it waits for its KV."""
        self.queue.remove(request.request_id)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._pause_if_queue_is_empty()

    def release_followers(self, leader_id: str) -> None:
        """Queue the requests that waited for a prompt: it is computed, or never will be."""
        for request in self._followers.pop(leader_id, {}).values():
            del self._leader_of[request.request_id]
            self._num_tokens_beside -= request.num_tokens
            self.queue.push(request)

    def remove(self, request_id: str) -> None:
        """Forget a request that waits anywhere; ending its load, if it has one, is left to the caller."""
        if request_id in self.queue:
            self.queue.remove(request_id)
        compiling = self._compiling.pop(request_id, None)
        if compiling is not None:
            self._num_tokens_beside -= compiling.num_tokens
        leader_id = self._leader_of.pop(request_id, None)
        if leader_id is not None:
            group = self._followers[leader_id]
            self._num_tokens_beside -= group.pop(request_id).num_tokens
            if not group:
                del self._followers[leader_id]
        self._pause_if_queue_is_empty()

    def leader_of(self, request_id: str) -> str | None:
        """Return the request for whose prompt this one waits, if it does."""
        return self._leader_of.get(request_id)

    def _line_up(self, request: Request) -> None:
        leader_id = request.shares_prompt_with
        if leader_id is None or not self._is_computing_prompt(leader_id):
            self.queue.push(request)
            return
        self._followers.setdefault(leader_id, {})[request.request_id] = request
        self._leader_of[request.request_id] = leader_id
        self._num_tokens_beside += request.num_tokens

    def _pause_if_queue_is_empty(self) -> None:
        if not len(self.queue):
            self.drain_rate.pause()

    def _is_computing_prompt(self, request_id: str) -> bool:
        """Whether a request is live whose prompt is still to be computed."""
        slot = self._running.slot_of(request_id)
        if slot is None:
            leader = self.get(request_id)
            return leader is not None and not leader.output_token_ids
        return bool(self._running.awaits_first_token[slot])


class DrainRate:
    """Requests and tokens that leave the queue per second, weighted towards the last `DRAIN_WINDOW` seconds.

    Only time in which something waited counts: an engine with nothing to do is not a slow one.

    Args:
        clock: seconds; read only when a method is called.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Something has waited since then; the time before it has been counted.
        self._busy_since: float | None = None
        self._seconds = 0.0
        self._num_requests = 0.0
        self._num_tokens = 0.0

    def note(self, num_tokens: int, num_requests: int, *, queue_is_empty: bool) -> None:
        """Count what has left the queue; `queue_is_empty` says whether nothing is left in it."""
        if self._count_time():
            self._num_requests += num_requests
            self._num_tokens += num_tokens
        if queue_is_empty:
            self.pause()

    def pause(self) -> None:
        """Stop the clock: nothing is left in the queue."""
        self._busy_since = None

    def retry_after(self, excess_requests: int, excess_tokens: int) -> float:
        """Return the seconds until the given numbers of requests and tokens will have left the queue.

        From `MIN_WAIT` to `MAX_WAIT`. As long as nothing has left yet, it is the time for which
        something has waited.
        """
        self._count_time()
        shares = 1.0  # of what has left in `_seconds`
        if self._num_requests:
            shares = max(excess_requests / self._num_requests, excess_tokens / max(self._num_tokens, 1.0))
        return min(max(self._seconds * shares, MIN_WAIT), MAX_WAIT)

    def _count_time(self) -> bool:
        """Count the time since the last call, if something waited; return whether it did."""
        now, since = self._clock(), self._busy_since
        self._busy_since = now
        if since is None:
            return False
        weight = math.exp((since - now) / DRAIN_WINDOW)
        self._seconds = self._seconds * weight + (now - since)
        self._num_requests *= weight
        self._num_tokens *= weight
        return True
