"""Request deadlines, enforced here if the engine does not end a request in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.engine.messages import AbortRequests
from quire.errors import RequestTimeoutError
from quire.front.text.output_processor import OutputProcessor, RequestState
from quire.scheduling.outputs import EngineCoreOutput
from quire.status import FinishReason

DEADLINE_GRACE = 1.0
"""Seconds for the engine to end a request that has timed out, before the front ends it."""


class Deadlines:
    """Ends timed-out requests that the engine should have ended.

    Args:
        outputs: the live requests.
        default_timeout: seconds, for requests without a timeout of their own; 0: none.
        send: sends a message to the engine.

    Attributes:
        next: when `enforce` is due, on the monotonic clock; infinite: never.
    """

    def __init__(
        self, outputs: OutputProcessor, default_timeout: float, send: Callable[[AbortRequests], None]
    ) -> None:
        self.next = math.inf
        self._outputs = outputs
        self._default_timeout = default_timeout
        self._send = send

    def note(self, state: RequestState) -> None:
        """Enforce the deadline of one more request."""
        self.next = min(self.next, deadline_of(state, self._default_timeout) + DEADLINE_GRACE)

    def enforce(self) -> None:
        """End the requests whose deadlines have passed."""
        now = time.monotonic()
        if now < self.next:
            return
        self.next = math.inf
        for state in self._outputs.live_requests():
            deadline = deadline_of(state, self._default_timeout) + DEADLINE_GRACE
            if now < deadline:
                self.next = min(self.next, deadline)
            else:
                self._end(state, now)

    def _end(self, state: RequestState, now: float) -> None:
        error = (
            f"the request had not ended after {now - state.submit_time:.1f} s; raise its timeout "
            "if it has one of its own, or SchedulerConfig.request_timeout"
        )
        sequence_ids = state.live_sequence_ids
        self._outputs.apply(failed_outputs(state, error, RequestTimeoutError.__name__))
        self._send(AbortRequests(sequence_ids))


def deadline_of(state: RequestState, default_timeout: float) -> float:
    """Return when a request times out, on the clock of `RequestState.submit_time`; infinite: never."""
    timeout = state.processed.core_request.options.timeout
    timeout = default_timeout if timeout is None else timeout
    return state.submit_time + timeout if timeout else math.inf


def failed_outputs(state: RequestState, error: str, error_type: str) -> list[EngineCoreOutput]:
    """Return the terminal outputs that the engine would send if all sequences of a request failed."""
    return [
        EngineCoreOutput(
            sequence_id, [], finish_reason=FinishReason.ERROR, error=error, error_type=error_type
        )
        for sequence_id in state.live_sequence_ids
    ]
