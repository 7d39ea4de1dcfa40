"""The engine's side of one HTTP call: its outputs merged into one stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Self

from quire.engine.messages import ErrorInfo
from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.wire.access_log import CLIENT_LEFT
from quire.server.wire.answers import EndReason, PromptTokensDetails, TokenUsage
from quire.server.wire.errors import SERVER_ERROR, UNAVAILABLE, ApiError
from quire.status import FinishReason

PREPARED_AT_ONCE = 4
"""Prompts of a call prepared concurrently, and thus at most per turn of the event loop: a call with many
prompts must not block others, nor fill the tokenization queue."""

_FAILURES = (FinishReason.ERROR, FinishReason.ABORT)

OutputStream = AsyncGenerator[RequestOutput, None]
OutputHook = Callable[[int, RequestOutput], None]
"""Called with an output and the index of its prompt."""


class CallOutputs:
    """The outputs of a call: `(prompt index, cumulative output)` until every prompt's request has finished.

    Use as an asynchronous context manager around the iteration: at its end, every stream is closed, which
    aborts requests still running in the engine. The output of a failed request is yielded before the failure
    is raised, however late the reader is.

    Iteration raises:
        ApiError: 503 when the engine aborted a request; 499 when a client did; 500 when a request failed.
        QuireError: the engine refused or failed the request.

    Args:
        streams: one for each prompt.
        fields: returns, for each prompt, the body's names of the engine's parameters, for error messages.
        observers: called with each output of the engine.
        hooks: called, after that, with each output that is yielded.
        preparing: semaphore that bounds concurrent preparation of several streams.
        places: semaphore that bounds how many of several streams are in the engine.
        was_aborted: whether a client has aborted the call over /v1/requests.
    """

    def __init__(
        self,
        streams: Sequence[OutputStream],
        *,
        fields: Callable[[], Sequence[Mapping[str, str]]],
        observers: Sequence[OutputHook],
        hooks: Sequence[OutputHook],
        preparing: asyncio.Semaphore,
        places: asyncio.Semaphore,
        was_aborted: Callable[[], bool],
    ) -> None:
        self._fields = fields
        self._observers = observers
        self._hooks = hooks
        self._was_aborted = was_aborted
        self._unfinished = set(range(len(streams)))
        self._failure: Exception | None = None
        self._single = streams[0] if len(streams) == 1 else None
        self._several = None if self._single else self._merged(streams, preparing, places)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        source = self._single or self._several
        assert source is not None
        await source.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        """Return the next output and the index of its prompt."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._several is not None:
                index, output = await anext(self._several)
            else:
                assert self._single is not None
                index, output = 0, await anext(self._single)
        except StopAsyncIteration:
            if self._unfinished:
                message = "the engine ended the request without an answer"
                raise ApiError(500, message, kind=SERVER_ERROR) from None
            raise
        except InvalidRequestError as error:
            if self._several is not None:
                raise
            raise self._in_words_of_body(0, error) from None
        for observer in self._observers:
            observer(index, output)
        for completion in output.outputs:
            if completion.finish_reason in _FAILURES:
                output = self._without_failure(index, output, completion)
                break
        if output.finished:
            self._unfinished.discard(index)
        for hook in self._hooks:
            hook(index, output)
        return index, output

    def _without_failure(
        self, prompt_index: int, output: RequestOutput, failed: CompletionOutput
    ) -> RequestOutput:
        """Keep a failure for the next iteration; return the output as if the completion were still running.

        Raises:
            ApiError, QuireError: the failure, if the output has no tokens.
        """
        self._failure = self._failure_of(prompt_index, failed)
        if not any(one.token_ids for one in output.outputs):
            raise self._failure
        running = [
            dataclasses.replace(one, finish_reason=None) if one.finish_reason in _FAILURES else one
            for one in output.outputs
        ]
        return dataclasses.replace(output, outputs=running, finished=False)

    def _failure_of(self, prompt_index: int, completion: CompletionOutput) -> Exception:
        """Return the call's error for a failed completion."""
        if self._was_aborted():
            return ApiError(CLIENT_LEFT, "the request was aborted over /v1/requests", code="aborted")
        if completion.finish_reason is FinishReason.ABORT:
            message = "the request was aborted before its answer was complete"
            return ApiError(503, message, kind=UNAVAILABLE, code="aborted")
        message = completion.error or "the request failed in the engine"
        if completion.error_type is None:
            return ApiError(500, message, kind=SERVER_ERROR, code="generation_failed")
        error = ErrorInfo(completion.error_type, message, completion.error_param).to_exception()
        return self._in_words_of_body(prompt_index, error)

    def _in_words_of_body(self, prompt_index: int, error: Exception) -> Exception:
        """Return the error with the body's name of the parameter at fault."""
        if not isinstance(error, InvalidRequestError):
            return error
        field = self._fields()[prompt_index].get(error.param or "")
        return error if field is None else type(error)(f"{field}: {error}", param=field)

    async def _merged(
        self, streams: Sequence[OutputStream], preparing: asyncio.Semaphore, places: asyncio.Semaphore
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield the outputs of all streams as they arrive; a slow reader only gets the latest of each."""
        latest: dict[int, RequestOutput] = {}
        changed = asyncio.Event()

        async def pump(index: int, stream: OutputStream) -> None:
            async with contextlib.aclosing(stream) as outputs:
                try:
                    async for output in outputs:
                        latest[index] = output
                        changed.set()
                except InvalidRequestError as error:
                    raise self._in_words_of_body(index, error) from None

        tasks: list[asyncio.Task[None]] = []
        ended: list[asyncio.Task[None]] = []

        def note_end(task: asyncio.Task[None]) -> None:
            ended.append(task)
            places.release()
            changed.set()

        async def start() -> None:
            for index, stream in enumerate(streams):
                await preparing.acquire()
                task = asyncio.create_task(pump(index, stream))
                task.add_done_callback(note_end)
                tasks.append(task)

        starting = asyncio.create_task(start())
        try:
            async for item in _drained(ended, len(streams), latest, changed):
                yield item
        finally:
            starting.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(starting, *tasks, return_exceptions=True)


async def without_output(stream: OutputStream) -> OutputStream:
    """Yield the outputs of `stream` without generated tokens, as the engine samples at least one."""
    async with contextlib.aclosing(stream) as outputs:
        async for output in outputs:
            yield dataclasses.replace(output, outputs=[_emptied(one) for one in output.outputs])


def _emptied(completion: CompletionOutput) -> CompletionOutput:
    is_stop = completion.finish_reason is FinishReason.STOP
    return dataclasses.replace(
        completion,
        text="",
        token_ids=[],
        logprobs=None if completion.logprobs is None else [],
        finish_reason=FinishReason.LENGTH if is_stop else completion.finish_reason,
        stop_reason=None,
    )


async def _drained(
    ended: list[asyncio.Task[None]],
    num_streams: int,
    latest: dict[int, RequestOutput],
    changed: asyncio.Event,
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield the outputs that the pumps leave in `latest` until all have ended; raise the first error."""
    num_ended = 0
    while num_ended < num_streams:
        await changed.wait()
        changed.clear()
        tasks = ended.copy()
        ended.clear()
        while latest:
            yield latest.popitem()
        for task in tasks:
            task.result()
        num_ended += len(tasks)


class SequenceProgress:
    """How much of a sequence's text and tokens has been sent to the client."""

    __slots__ = ("begun", "ended", "num_chars", "num_tokens")

    def __init__(self) -> None:
        self.begun = False
        self.num_chars = 0
        self.num_tokens = 0
        self.ended = False

    def advance(self, completion: CompletionOutput) -> tuple[str, int]:
        """Return the new text and where the new tokens start; then count both as sent."""
        self.begun = True
        text = completion.text[self.num_chars :]
        start = self.num_tokens
        self.num_chars = len(completion.text)
        self.num_tokens = len(completion.token_ids)
        self.ended = completion.finish_reason is not None
        return text, start


def end_reason(completion: CompletionOutput) -> EndReason | None:
    """Return OpenAI's finish reason of the sequence; None while it runs."""
    match completion.finish_reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return "length"
        case _:
            return "stop"


def is_cut_off(completion: CompletionOutput) -> bool:
    """Whether a limit or a stop string, rather than the model, has ended the sequence."""
    return completion.finish_reason is FinishReason.LENGTH or isinstance(completion.stop_reason, str)


def usage_of(outputs: Sequence[RequestOutput]) -> TokenUsage:
    """Return the tokens of all outputs; each prompt counts once, whatever its number of sequences."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return TokenUsage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
