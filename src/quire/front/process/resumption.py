"""Live requests after an engine crash: they resume on the next engine, suspected causes last."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable

from quire.config import EngineConfig
from quire.engine.messages import EngineCoreRequest, ErrorInfo
from quire.errors import RequestQuarantinedError
from quire.front.deadlines import deadline_of, failed_outputs
from quire.front.text.output_processor import OutputProcessor, RequestState

logger = logging.getLogger(__name__)

MAX_CRASHES = 10
"""Crashes after which a request is quarantined even if it had output from each engine."""

MIN_TIMEOUT = 1e-3
"""Timeout (seconds) of a request whose time is up, so that the engine ends it; 0 means no limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryStats:
    """Counters of engine restarts and resumed requests since the front started."""

    num_restarts: int = 0
    """Engines started to replace others."""
    num_hangs: int = 0
    """Engines killed because they did not finish a step."""
    num_resumed_requests: int = 0
    """Requests continued on another engine, counted once per engine."""
    num_quarantined_requests: int = 0
    """Requests ended because they seem to crash engines."""


class Resumption:
    """Sends the live requests to each new engine, and quarantines those that crash engines.

    A request is a suspect if an engine died before producing any output of it. Suspects are sent last and one
    at a time, each when the one before has had output or has ended, so that the next crash has one cause.

    Args:
        outputs: the live requests.
        config: configuration of the engine.
        send: sends a request to the engine.

    Attributes:
        num_resumed: requests sent to another engine, counted once per engine.
        num_quarantined: requests ended because they seem to crash engines.
    """

    def __init__(
        self, outputs: OutputProcessor, config: EngineConfig, send: Callable[[EngineCoreRequest], None]
    ) -> None:
        self.num_resumed = 0
        self.num_quarantined = 0
        self._outputs = outputs
        self._config = config
        self._send = send
        self._awaited: list[RequestState] = []  # sent to the new engine, without output from it so far
        self._suspects: deque[RequestState] = deque()  # still to be sent

    def note_crash(self, reason: str) -> None:
        """Count the crash for each request that the engine had; end those with too many."""
        self._awaited.clear()
        self._suspects.clear()
        for state in self._outputs.live_requests():
            if not state.is_sent:
                continue
            state.is_sent = False
            state.num_crashes += 1
            state.num_crashes_without_output = (
                0 if state.has_new_output else state.num_crashes_without_output + 1
            )
            limit = self._config.supervision.max_request_crashes
            if state.num_crashes_without_output >= limit or state.num_crashes >= MAX_CRASHES:
                self._quarantine(state, reason)

    def note_suspension(self) -> None:
        """Note that the engine was ended on purpose, which counts against no request."""
        self._awaited.clear()
        self._suspects.clear()
        for state in self._outputs.live_requests():
            state.is_sent = False

    def begin(self, *, sends_new: bool = True) -> None:
        """Send the engine the live requests that it does not have: all at once, except suspects.

        Args:
            sends_new: whether to send those that no engine has had yet, too.
        """
        for state in self._outputs.live_requests():
            if state.is_sent or state.is_repeating or state in self._suspects:
                continue
            if not (sends_new or state.was_sent):
                continue
            if state.num_crashes_without_output:
                self._suspects.append(state)
            else:
                self._resume(state)
        self.advance()

    def advance(self) -> None:
        """Send the next suspect if every request sent before it has had output or has ended."""
        while self._awaited or self._suspects:
            self._awaited = [
                state for state in self._awaited if not state.has_new_output and self._outputs.has(state)
            ]
            if self._awaited or not self._suspects:
                return
            suspect = self._suspects.popleft()
            if self._outputs.has(suspect):
                self._resume(suspect)

    def _resume(self, state: RequestState) -> None:
        state.is_sent, state.has_new_output = True, False
        try:
            self._send_again(state)
        except Exception as error:  # the other requests must still be sent
            logger.exception("request %r cannot be sent to the engine; it ends", state.request_id)
            message = f"this request cannot be sent to the engine: {ErrorInfo.of(error).message}"
            self._outputs.apply(failed_outputs(state, message, ""))

    def _send_again(self, state: RequestState) -> None:
        if not state.was_sent:  # it arrived while there was no engine
            message = self.first_message(state)
            state.was_sent = True
            self._send(message)
            return
        self._send(self._continuation(state))
        self._awaited.append(state)
        self.num_resumed += 1
        if state.prompt_logprobs is not None:
            state.num_repeated_prompt_logprobs = len(state.prompt_logprobs) - 1

    def first_message(self, state: RequestState) -> EngineCoreRequest:
        """Return a request that no engine has had, or what is left of it if another server has begun it."""
        has_begun = any(completion.token_ids for completion in state.completions)
        return self._continuation(state) if has_begun else state.processed.core_request

    def _continuation(self, state: RequestState) -> EngineCoreRequest:
        return continuation(state, self._config.scheduler.request_timeout, time.monotonic())

    def _quarantine(self, state: RequestState, reason: str) -> None:
        limit = self._config.supervision.max_request_crashes
        error = (
            f"{state.num_crashes} engines have died while they had this request; the limit is "
            f"max_request_crashes {limit} in a row without output of it, or {MAX_CRASHES} in total; the last "
            f"reason: {reason}"
        )
        logger.error("request %r is quarantined: %s", state.request_id, error)
        self.num_quarantined += 1
        self._outputs.apply(failed_outputs(state, error, RequestQuarantinedError.__name__))


def continuation(state: RequestState, default_timeout: float, now: float) -> EngineCoreRequest:
    """Return the rest of a request: its live sequences with the tokens that they have so far.

    A beam search starts over. Prompt log-probabilities are requested if any are still missing.

    Args:
        state: state of the request.
        default_timeout: seconds, for requests without one; 0: none.
        now: seconds on the clock of `RequestState.submit_time`.
    """
    request = state.processed.core_request
    live = {completion.sequence_id: completion.token_ids for completion in state.live_completions}
    seeds = dict(zip(request.sequence_ids, request.seeds, strict=True))
    params = request.sampling_params
    if params.prompt_logprobs is not None and state.has_all_prompt_logprobs:
        params = dataclasses.replace(params, prompt_logprobs=None)
    return EngineCoreRequest(
        sequence_ids=list(live),
        seeds=[seeds[name] for name in live],
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=params,
        eos_token_ids=request.eos_token_ids,
        options=dataclasses.replace(
            request.options,
            timeout=_time_left(deadline_of(state, default_timeout), now),
            queue_timeout=_queue_time_left(state, now),
        ),
        resumed_outputs=list(live.values()),
        arrival_time=request.arrival_time,
        flow=request.flow,
        pooling_params=request.pooling_params,
        was_accepted=state.was_sent,
    )


def _time_left(deadline: float, now: float) -> float:
    return 0.0 if deadline == math.inf else max(deadline - now, MIN_TIMEOUT)


def _queue_time_left(state: RequestState, now: float) -> float | None:
    """Return what is left of `queue_timeout`: None if the request has begun, or sets none."""
    timeout = state.processed.core_request.options.queue_timeout
    if state.first_token_time is not None:
        return 0.0
    return _time_left(state.submit_time + timeout, now) if timeout else timeout
