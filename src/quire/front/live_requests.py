"""This process's unfinished requests, and the messages to and from their engine."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from quire.config import EngineConfig
from quire.engine.messages import (
    AbortRequests,
    EngineInfo,
    ErrorInfo,
    FromEngine,
    LoadProgress,
    Ready,
    ReleaseKV,
    Reply,
    RequestRefused,
    SetPauseState,
    StartupFailed,
    StepOutputs,
    StopRequests,
    ToEngine,
)
from quire.errors import EngineAsleepError, EngineDeadError, QuireError
from quire.front.deadlines import Deadlines
from quire.front.held_requests import HeldRequests
from quire.front.process.message_backlog import OUTPUTS_AT_ONCE, MessageBacklog, Turn
from quire.front.process.resumption import Resumption
from quire.front.process.supervision import EngineCrashed, EngineSuspended
from quire.front.text.input_processor import InputProcessor, ProcessedRequest
from quire.front.text.output_processor import OutputProcessor, RequestState
from quire.scheduling.interface import PauseState
from quire.scheduling.outputs import EngineCoreOutput, SchedulerStats
from quire.status import FinishReason

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer


ASLEEP = "the engine is asleep and accepts no requests; wake it with POST /wake_up or AsyncLLM.wake_up()"

CLOSED = "the engine has been shut down"


class EngineClient(Protocol):
    """Sends messages to an engine and receives its messages."""

    @property
    def next_due(self) -> float | None:
        """When, on the monotonic clock, `receive` is to be called even if nothing has come; None: never."""

    def send(self, message: ToEngine) -> None:
        """Send `message`; replies are received with `receive`."""

    def receive(self, timeout: float | None) -> Sequence[FromEngine | EngineCrashed | EngineSuspended]:
        """Return the engine's messages, waiting at most `timeout` seconds (None: indefinitely) for the first.

        `EngineCrashed` reports an engine that has died and is replaced, after which `Ready` follows again;
        so does `EngineSuspended`, once the engine is resumed.

        Raises:
            EngineDeadError: the engine has ended.
        """

    def close(self) -> None:
        """Shut the engine down."""


class PendingCalls(dict[int, Callable[[Reply], None]]):
    """The callbacks of calls that the engine has not answered yet, by call id."""

    def __init__(self) -> None:
        super().__init__()
        self._ids = itertools.count()

    def send(
        self, client: EngineClient, make: Callable[[int], ToEngine], on_reply: Callable[[Reply], None]
    ) -> None:
        """Send the message that `make` returns for a call id; `on_reply` is called with the reply."""
        call_id = next(self._ids)
        client.send(make(call_id))
        self[call_id] = on_reply  # only once sent: the engine must answer no other

    def note(self, reply: Reply) -> None:
        """Pass a reply to its callback; there is none if the caller was interrupted right after sending."""
        if (on_reply := self.pop(reply.call_id, None)) is not None:
            on_reply(reply)

    def fail(self, error: ErrorInfo) -> None:
        """Answer all calls with an error."""
        calls = self.copy()
        self.clear()
        for call_id, on_reply in calls.items():
            on_reply(Reply(call_id, done=False, error=error))


class LiveRequests:
    """Submits requests to one engine, and processes their outputs.

    Live requests are kept while the engine is replaced, and continue on the next one.

    Args:
        client: connects to the engine.
        tokenizer: tokenizer of the engine's model.
        config: configuration of the engine.

    Attributes:
        is_asleep: whether new requests are refused because `sleep` ends the engine.
        pause_state: which requests may run; it also applies to the next engine.
        held: requests that wait in the front for an engine, or for the end of a pause.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.outputs = OutputProcessor(tokenizer)
        self.resumption = Resumption(self.outputs, config, client.send)
        self.is_ready = False
        self.is_asleep = False
        self.pause_state = PauseState.UNPAUSED
        self.failure: QuireError | None = None
        self.last_step_time = time.monotonic()
        self.latest_stats: SchedulerStats | None = None
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self._info: EngineInfo | None = None
        self._inputs: InputProcessor | None = None
        self.held = HeldRequests(self.outputs, config.scheduler)
        self._calls = PendingCalls()
        self._deadlines = Deadlines(self.outputs, config.scheduler.request_timeout, client.send)
        self._backlog = MessageBacklog()

    @classmethod
    def of(cls, client: EngineClient, config: EngineConfig, model_path: Path) -> Self:
        """Build this for an engine that has just been started; if that fails, close the engine.

        Args:
            client: connects to the engine.
            config: configuration of the engine.
            model_path: directory of the model that `config.model` names.

        Raises:
            ModelError: the tokenizer cannot be read.
        """
        try:
            # slow: meanwhile, an engine process imports torch
            from quire.models.checkpoints.tokenizers.engine_tokenizer import engine_tokenizer

            tokenizer = engine_tokenizer(config, model_path)
        except BaseException:  # the traceback would keep the engine alive
            client.close()
            raise
        return cls(client, tokenizer, config)

    @property
    def has_started(self) -> bool:
        """Whether requests can be made: an engine has been ready."""
        return self._info is not None

    @property
    def waiting_since(self) -> float | None:
        """Since when, on the monotonic clock, a step is due; None: none is."""
        return self.last_step_time if self.outputs or self._calls else None

    @property
    def info(self) -> EngineInfo:
        """Information about the engine; available once it is ready."""
        if self.failure is not None:
            raise copy.copy(self.failure)
        assert self._info is not None, "the engine is not ready"
        return self._info

    @property
    def inputs(self) -> InputProcessor:
        """The input processor; available once the engine is ready."""
        if self.failure is not None:
            raise copy.copy(self.failure)
        assert self._inputs is not None, "the engine is not ready"
        return self._inputs

    def raise_failure(self) -> None:
        """If the engine has ended, raise the reason."""
        if self.failure is not None:
            raise copy.copy(self.failure)

    def submit(
        self,
        processed: ProcessedRequest,
        on_update: Callable[[], None] = lambda: None,
        *,
        is_repeating: bool = False,
    ) -> RequestState:
        """Register a request and send it to the engine; without room in the front, it fails at once.

        Args:
            processed: the request.
            on_update: called whenever it has changed.
            is_repeating: whether `send` sends it later, when its outputs so far have been repeated.

        Raises:
            DuplicateRequestError: its id is in use.
            EngineDeadError: the engine has ended, or is asleep.
        """
        if self.failure is not None:
            raise copy.copy(self.failure)
        if self.is_asleep:
            raise EngineAsleepError(ASLEEP)
        refusal = self.held.refusal(processed, has_engine=self._is_open)
        now = self._note_work()
        state = self.outputs.add(processed, on_update)
        state.submit_time = now
        if refusal is not None:
            self.outputs.refuse(state.live_sequence_ids[:1], refusal)
            return state
        self._deadlines.note(state)
        state.is_repeating = is_repeating
        if not is_repeating:
            self.send(state)
        return state

    def send(self, state: RequestState) -> None:
        """Send a registered request to the engine; without one, it is held."""
        state.is_repeating = False
        try:
            if self._is_open:
                message = self.resumption.first_message(state)
                state.is_sent = state.was_sent = True
                self.client.send(message)
            else:
                self.held.hold(state.processed)
        except BaseException:  # includes Ctrl-C: the caller gets no state to discard
            self.discard(state)
            raise

    @property
    def _is_open(self) -> bool:
        """Whether an engine takes new requests."""
        return self.is_ready and not self.held.is_paused

    def discard(self, state: RequestState) -> None:
        """Abort a request without a caller; has no effect if it has ended."""
        live = self.outputs.remove(state)
        self.held.forget(state.processed)
        if live and state.is_sent:
            self.client.send(AbortRequests(live))

    def abort(self, request_id: str | None) -> None:
        """Abort a request, or all if None; each ends with finish reason "abort"."""
        sent: list[str] = []
        for state in self.outputs.live_requests(request_id):
            if state.is_sent:
                sent += state.live_sequence_ids
            else:
                self.outputs.apply(
                    EngineCoreOutput(sequence_id, [], finish_reason=FinishReason.ABORT)
                    for sequence_id in state.live_sequence_ids
                )
        if sent:
            self.client.send(AbortRequests(sent))

    def release_kv(self, transfer_id: str) -> None:
        """Tell the engine that no peer will read a loan. If the engine has died, its loans are gone."""
        if self.is_ready:
            self.client.send(ReleaseKV(transfer_id))

    def queued_sequence_ids(self, request_id: str) -> list[str]:
        """Return the ids of a request's sequences in the scheduler; none if it has ended or is held."""
        state = self.outputs.get(request_id)
        if state is None or not state.is_sent:
            return []
        queued = state.processed.core_request.queued_sequence_ids
        live = state.live_sequence_ids
        return [sequence_id for sequence_id in queued if sequence_id in live]

    def reasons_to_wait(self, request_id: str) -> list[str]:
        """Return a sentence about why a request has not been sent; empty if it has been."""
        state = self.outputs.get(request_id)
        if state is None or state.is_sent:
            return []
        if state.num_crashes:
            return ["waiting: it may have crashed engines, so it is retried after the others"]
        return ["waiting: the engine is paused and starts no new requests"]

    def call(self, make: Callable[[int], ToEngine], on_reply: Callable[[Reply], None]) -> None:
        """Send the message that `make` returns for a call id; `on_reply` is called with the reply.

        Raises:
            EngineDeadError: the engine has ended, or is asleep, or another is being started.
        """
        self.raise_failure()
        if not self.is_ready and self.is_asleep:
            raise EngineAsleepError(ASLEEP)
        if not self.is_ready:
            raise EngineDeadError("the engine is being restarted; try again later")
        self._note_work()
        self._calls.send(self.client, make, on_reply)

    @property
    def next_due(self) -> float | None:
        """When, on the monotonic clock, `receive` is to be called even if nothing has come; None: never."""
        due, deadline = self.client.next_due, self._deadlines.next
        if deadline == math.inf:
            return due
        return deadline if due is None else min(due, deadline)

    def receive(self, timeout: float | None) -> None:
        """Process the engine's messages, waiting at most `timeout` seconds (None: indefinitely) for them.

        Returns at `next_due` at the latest, and does what is due then. If the engine has ended, every live
        request fails and `failure` is set.
        """
        due = self.next_due
        if due is not None and timeout != 0:
            wait = max(0.0, due - time.monotonic())
            timeout = wait if timeout is None else min(wait, timeout)
        self._fetch(0 if self._backlog else timeout)
        while self._backlog:
            self._dispatch(self._backlog.take())
        self._end_turn()

    def receive_some(self) -> bool:
        """Process arrived messages for one turn of the event loop; return whether any are left.

        Otherwise like `receive(0)`.
        """
        if not self._backlog:
            self._fetch(0)
        turn = Turn()
        while self._backlog and not turn.is_over:
            message = self._backlog.take(OUTPUTS_AT_ONCE)
            turn.note(message)
            self._dispatch(message)
        self._end_turn()
        return bool(self._backlog)

    def close(self) -> None:
        """Shut the engine down; live requests fail with `EngineDeadError`."""
        self.client.close()
        self.tokenizer.close()
        self.failure = None
        self.fail(EngineDeadError(CLOSED))

    def fail(self, failure: QuireError) -> None:
        """Record why the engine has ended (the first reason counts), and fail every live request."""
        if self.failure is None:
            self.failure = failure
        self.is_ready = False
        self._calls.clear()
        self._backlog.clear()
        self.outputs.fail_all(self.failure)

    def _fetch(self, timeout: float | None) -> None:
        try:
            self._backlog.extend(self.client.receive(timeout))
        except EngineDeadError as error:
            self.fail(error)

    def _end_turn(self) -> None:
        if self.failure is None:
            self.resumption.advance()
            self._deadlines.enforce()

    def _note_work(self) -> float:
        """Return the time (`time.monotonic()`); call this before giving the engine work."""
        now = time.monotonic()
        if not (self.outputs or self._calls):
            self.last_step_time = now
        return now

    @property
    def has_accepted(self) -> bool:
        """Whether any live request has been sent to an engine."""
        return any(state.was_sent for state in self.outputs.live_requests())

    def send_held(self) -> None:
        """Send the held requests, if there is an engine for them."""
        if not self.is_ready:
            return
        if not self.held.is_paused:
            self.held.release()
        self.resumption.begin(sends_new=not self.held.is_paused)

    def set_pause_state(self, pause_state: PauseState, on_reply: Callable[[Reply], None]) -> None:
        """Set which requests may run; without an engine, this is the first message to the next one."""
        self.pause_state = pause_state
        if self.is_ready:
            self.call(functools.partial(SetPauseState, pause_state=pause_state), on_reply)
        else:
            self.raise_failure()
            on_reply(Reply(-1))

    def _note_end(self, error: EngineDeadError) -> None:
        """Note that there is currently no engine."""
        self.is_ready = False
        self.latest_stats = SchedulerStats()  # the dead engine holds nothing
        self._calls.fail(ErrorInfo.of(error))

    def _note_ready(self, info: EngineInfo) -> None:
        self._info = info
        if self._inputs is None:
            self._inputs = InputProcessor(self.tokenizer, info)
        else:
            self._inputs.info = info
        self.is_ready = True
        self.last_step_time = time.monotonic()
        if self.pause_state is not PauseState.UNPAUSED:
            self.set_pause_state(self.pause_state, lambda reply: None)
        self.send_held()

    def _dispatch(self, message: FromEngine | EngineCrashed | EngineSuspended) -> None:
        match message:
            case StepOutputs(outputs, stats):
                if stats is not None:
                    self.last_step_time = time.monotonic()
                    self.latest_stats = stats
                to_stop = self.outputs.apply(outputs)
                if to_stop:
                    self.client.send(StopRequests(to_stop))
            case RequestRefused(sequence_ids, error):
                self.outputs.refuse(sequence_ids, error.to_exception())
            case Reply(stats=stats):
                if not self.outputs:
                    self.last_step_time = time.monotonic()
                if stats is not None:
                    self.latest_stats = stats
                self._calls.note(message)
            case LoadProgress(done, total):
                self.on_progress(done, total)
            case Ready(info):
                self._note_ready(info)
            case EngineCrashed(reason):
                self._note_end(EngineDeadError(reason))
                self.resumption.note_crash(reason)
            case EngineSuspended():
                self._note_end(EngineAsleepError(ASLEEP))
                self.resumption.note_suspension()
            case StartupFailed(error):
                self.fail(error.to_exception())
