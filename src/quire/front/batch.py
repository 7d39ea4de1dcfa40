"""Running a batch of requests to completion, without overfilling the engine's queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from quire.errors import QueueFullError
from quire.front.interrupt import deferred_interrupt
from quire.front.live_requests import LiveRequests
from quire.front.text.input_processor import ProcessedRequest
from quire.front.text.output_processor import RequestState
from quire.request_output import PoolingRequestOutput, RequestOutput

Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)


class Batch(Generic[Output]):
    """Runs any number of requests through an engine.

    Args:
        live_requests: those of the engine, which must be ready.
        requests: prepared by `live_requests`.
        max_live_sequences: maximum number of sequences in the engine at a time, as its queue is bounded.
        snapshot: returns the output of a request that has ended.
    """

    def __init__(
        self,
        live_requests: LiveRequests,
        requests: list[ProcessedRequest],
        max_live_sequences: int,
        snapshot: Callable[[RequestState], Output],
    ) -> None:
        self.results: dict[int, Output] = {}
        self._snapshot: Callable[[RequestState], Output] = snapshot
        self.num_generated_tokens = 0
        self._live_requests = live_requests
        self._size = len(requests)
        self._pending = deque(enumerate(requests))
        self._live: dict[int, RequestState] = {}
        self._num_live = 0  # sequences
        self._max_live_sequences = max_live_sequences
        self._must_wait = False  # the queue was full; wait until something ends

    @property
    def live(self) -> Mapping[int, RequestState]:
        """Requests in the engine, by index; some may have finished in the last step."""
        return self._live

    def run(self, receive_outputs: Callable[[], None]) -> list[Output]:
        """Call `receive_outputs` until all requests are done; return their outputs in order.

        Raises:
            QuireError: the engine rejects a request, or ends; the others are aborted.
            BaseException: raised by `receive_outputs`, including KeyboardInterrupt; all are aborted.
        """
        try:
            with deferred_interrupt() as deferral:  # a request that is not in `_live` would not be discarded
                while self._pending or self._live:
                    self._submit()
                    receive_outputs()
                    self._collect()
                    deferral.deliver()
        finally:
            for state in self._live.values():
                self._live_requests.discard(state)
        return [self.results[index] for index in range(self._size)]

    def _submit(self) -> None:
        """Submit as many pending requests as the limit allows."""
        while self._pending and not self._must_wait and self._num_live < self._max_live_sequences:
            index, processed = self._pending.popleft()
            state = self._live[index] = self._live_requests.submit(processed)
            self._num_live += len(state.completions)

    def _collect(self) -> None:
        """Collect finished requests, and put those rejected by the full queue back in front."""
        for index, state in reversed(list(self._live.items())):
            if state.failure is None and not state.finished:
                continue
            del self._live[index]
            self._num_live -= len(state.completions)
            if state.failure is None:
                self.results[index] = self._snapshot(state)
                self.num_generated_tokens += sum(len(one.token_ids) for one in state.completions)
                self._must_wait = False
            elif isinstance(state.failure, QueueFullError) and self._live:
                self._pending.appendleft((index, state.processed))
                self._must_wait = True
            else:
                raise state.failure
