"""This process's unfinished requests in an engine, and the messages to and from the engine."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.engine.messages import (
    AbortRequests,
    EngineInfo,
    FromEngine,
    LoadProgress,
    Ready,
    Reply,
    RequestRefused,
    StartupFailed,
    StepOutputs,
    StopRequests,
    ToEngine,
)
from quire.errors import EngineDeadError, QuireError
from quire.front.input_processor import InputProcessor, ProcessedRequest
from quire.front.output_processor import OutputProcessor, RequestState
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer


class EngineClient(Protocol):
    """Sends messages to an engine and receives its messages."""

    def send(self, message: ToEngine) -> None:
        """Send `message`; replies are received with `receive`."""

    def receive(self, timeout: float | None) -> list[FromEngine]:
        """Return the engine's messages, waiting at most `timeout` seconds (None: indefinitely) for the first.

        Raises:
            EngineDeadError: the engine has ended.
        """

    def close(self) -> None:
        """Shut the engine down."""


class LiveRequests:
    """The unfinished requests of one engine: submits them, and processes their outputs.

    Args:
        client: connects to the engine.
        tokenizer: of the engine's model.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.outputs = OutputProcessor(tokenizer)
        self.failure: QuireError | None = None
        self.last_step_time = time.monotonic()
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self._info: EngineInfo | None = None
        self._inputs: InputProcessor | None = None
        self._call_ids = itertools.count()
        self._calls: dict[int, Callable[[Reply], None]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests."""
        return self._info is not None

    @property
    def info(self) -> EngineInfo:
        """Information about the engine; available once it is ready."""
        self.raise_failure()
        assert self._info is not None, "the engine is not ready"
        return self._info

    def raise_failure(self) -> None:
        """If the engine has ended, raise the reason."""
        if self.failure is not None:
            raise copy.copy(self.failure)

    def prepare(
        self, prompt: str | Sequence[int], params: SamplingParams, **options: Any
    ) -> ProcessedRequest:
        """Validate and tokenize a request; see `InputProcessor.process` for `options` and errors."""
        self.raise_failure()
        assert self._inputs is not None, "the engine is not ready"
        return self._inputs.process(prompt, params, **options)

    def prepare_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, **options: Any
    ) -> ProcessedRequest:
        """Like `prepare`, for a conversation, which the chat template turns into a prompt."""
        self.raise_failure()
        assert self._inputs is not None, "the engine is not ready"
        return self._inputs.process_chat(messages, params, **options)

    def submit(
        self, processed: ProcessedRequest, on_update: Callable[[], None] = lambda: None
    ) -> RequestState:
        """Register a request and send it to the engine.

        Raises:
            DuplicateRequestError: its id is in use.
            EngineDeadError: the engine has ended.
        """
        self.raise_failure()
        if not self.outputs:
            self.last_step_time = time.monotonic()  # the engine was idle until now
        state = self.outputs.add(processed, on_update)
        try:
            self.client.send(processed.core_request)
        except BaseException:  # includes Ctrl-C: the caller gets no state to discard
            self.discard(state)
            raise
        return state

    def discard(self, state: RequestState) -> None:
        """Abort a request that has no caller any more; has no effect if it has ended."""
        live = self.outputs.remove(state)
        if live:
            self.client.send(AbortRequests(live))

    def abort(self, request_id: str | None) -> None:
        """Abort a request, or all if None; each ends with finish reason "abort"."""
        live = self.outputs.live_sequence_ids(request_id)
        if live:
            self.client.send(AbortRequests(live))

    def queued_sequence_ids(self, request_id: str) -> list[str]:
        """Return the ids of a request's sequences in the scheduler; none if it has ended."""
        state = self.outputs.get(request_id)
        if state is None:
            return []
        queued = state.processed.core_request.queued_sequence_ids
        live = state.live_sequence_ids
        return [sequence_id for sequence_id in queued if sequence_id in live]

    def call(self, make: Callable[[int], ToEngine], on_reply: Callable[[Reply], None]) -> None:
        """Send the message that `make` returns for a call id; `on_reply` is called with the reply."""
        self.raise_failure()
        call_id = next(self._call_ids)
        self._calls[call_id] = on_reply
        self.client.send(make(call_id))

    def receive(self, timeout: float | None) -> None:
        """Process the engine's messages, waiting at most `timeout` seconds (None: indefinitely).

        If the engine has ended, every live request fails and `failure` is set.
        """
        try:
            messages = self.client.receive(timeout)
        except EngineDeadError as error:
            self.fail(error)
            return
        for message in messages:
            self._dispatch(message)

    def close(self) -> None:
        """Shut the engine down; live requests fail with `EngineDeadError`."""
        self.client.close()
        self.failure = None
        self.fail(EngineDeadError("the engine has been shut down"))

    def fail(self, failure: QuireError) -> None:
        """Record why the engine has ended (the first reason counts), and fail every live request."""
        if self.failure is None:
            self.failure = failure
        self._calls.clear()
        self.outputs.fail_all(self.failure)

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(outputs, stats):
                if stats is not None:
                    self.last_step_time = time.monotonic()
                to_stop = self.outputs.apply(outputs)
                if to_stop:
                    self.client.send(StopRequests(to_stop))
            case RequestRefused(sequence_ids, error):
                self.outputs.refuse(sequence_ids, error.to_exception())
            case Reply(call_id):
                self._calls.pop(call_id)(message)
            case LoadProgress(done, total):
                self.on_progress(done, total)
            case Ready(info):
                self._info = info
                self._inputs = InputProcessor(self.tokenizer, info)
            case StartupFailed(error):
                self.fail(error.to_exception())
