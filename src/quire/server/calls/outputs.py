"""The engine's side of one HTTP call: its requests, their outputs merged, and what counts as an answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

from quire.engine.messages import ErrorInfo
from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.live_calls import LiveCalls
from quire.server.metrics.registry import Metrics
from quire.server.metrics.request_timer import RequestTimer
from quire.server.tenancy.metrics import TenantFigures
from quire.server.wire.access_log import CLIENT_LEFT, AccessRecord
from quire.server.wire.answers import EndReason, PromptTokensDetails, TokenUsage
from quire.server.wire.errors import SERVER_ERROR, UNAVAILABLE, ApiError
from quire.status import FinishReason

PREPARED_AT_ONCE = 4
"""Prompts of a call that are prepared at once, and so at most in one turn of the event loop: a call of many
prompts leaves others their turns, and their places among the texts that wait to be tokenized."""

OutputStream = AsyncGenerator[RequestOutput, None]
CallOutputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Outputs of a call, each with the index of its prompt."""


async def generate(
    streams: Sequence[OutputStream],
    *,
    preparing: asyncio.Semaphore,
    places: asyncio.Semaphore,
    call_id: str,
    request_ids: Sequence[str],
    num_sequences: int,
    calls: LiveCalls,
    metrics: Metrics,
    tenant: TenantFigures,
    access_record: AccessRecord | None = None,
) -> CallOutputs:
    """Yield `(prompt index, cumulative output)` until every prompt's request has finished.

    Closing the generator closes every stream, which aborts what still runs in the engine. What a request that
    fails has generated is yielded before the failure is raised, however late the reader is.

    Args:
        streams: one for each prompt.
        preparing: of which a stream takes a place to start, given back by whoever sees that it is prepared.
        places: of which a prepared stream takes one before it goes to the engine, given back here at its end.
        call_id: as no other tenant's call has it (`Tenant.engine_id`).
        request_ids: the engine's, one for each prompt.
        num_sequences: completions of each prompt.
        calls, metrics: of the server.
        tenant: figures of the one whose call it is.
        access_record: takes note of each output; None: none is kept.

    Raises:
        ApiError: 503 while draining or when the engine aborted a request; 499 when a client did; 500 when a
            request failed.
        QuireError: what the engine refused the request with, or ended it with.
    """
    unfinished = set(range(len(streams)))
    with calls.serving(call_id, request_ids), contextlib.ExitStack() as stack:
        timers = [stack.enter_context(RequestTimer(metrics, tenant, num_sequences)) for _ in streams]
        async with contextlib.aclosing(_merged(streams, preparing, places)) as outputs:
            async for index, output in outputs:
                timers[index].observe(output)
                if access_record is not None:
                    access_record.observe(index, output)
                failures = [error for one in output.outputs if (error := _failure_of(one)) is not None]
                if failures:
                    if any(completion.token_ids for completion in output.outputs):
                        yield index, _without_failures(output)  # they may have come together with the failure
                    raise _aborted_by_client() if calls.was_aborted(call_id) else failures[0]
                if output.finished:
                    unfinished.discard(index)
                yield index, output
        if unfinished:
            raise ApiError(500, "the engine ended the request without an answer", kind=SERVER_ERROR)


@contextlib.asynccontextmanager
async def reading(outputs: CallOutputs) -> AsyncIterator[CallOutputs]:
    """Close `outputs` when the block ends, having raised there what it ends with, if that is an exception.

    So requests whose outputs cannot be passed on count as failed, and not as given up by the client.
    """
    async with contextlib.aclosing(outputs):
        try:
            yield outputs
        except Exception as error:
            with contextlib.suppress(StopAsyncIteration):  # it may have ended with this error itself
                await outputs.athrow(error)
            raise


async def without_output(stream: OutputStream) -> OutputStream:
    """Pass on `stream` without what has been generated: the token that the engine samples at least."""
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


async def naming_fields(fields: Mapping[str, str], stream: OutputStream) -> OutputStream:
    """Pass on `stream`; where the engine finds fault with a parameter, name the request's field for it.

    Args:
        fields: the body's name of each parameter that is called otherwise there.
        stream: of one prompt.
    """
    async with contextlib.aclosing(stream) as outputs:
        try:
            async for output in outputs:
                names_param = any(one.error_param is not None for one in output.outputs)
                yield _naming_fields(fields, output) if names_param else output
        except InvalidRequestError as error:
            field = fields.get(error.param or "")
            if field is None:
                raise
            raise type(error)(f"{field}: {error}", param=field) from None


def _naming_fields(fields: Mapping[str, str], output: RequestOutput) -> RequestOutput:
    """Return `output` with the errors of its completions in the request's words."""
    completions = [
        dataclasses.replace(one, error=f"{field}: {one.error}", error_param=field)
        if (field := fields.get(one.error_param or "")) is not None
        else one
        for one in output.outputs
    ]
    return dataclasses.replace(output, outputs=completions)


def _failure_of(completion: CompletionOutput) -> Exception | None:
    """Return what a completion that ended without being complete means for its call; None if it did not."""
    if completion.finish_reason is FinishReason.ERROR:
        message = completion.error or "the request failed in the engine"
        if completion.error_type is not None:
            return ErrorInfo(completion.error_type, message, completion.error_param).to_exception()
        return ApiError(500, message, kind=SERVER_ERROR, code="generation_failed")
    if completion.finish_reason is FinishReason.ABORT:
        message = "the request was aborted before its answer was complete"
        return ApiError(503, message, kind=UNAVAILABLE, code="aborted")
    return None


def _aborted_by_client() -> ApiError:
    return ApiError(CLIENT_LEFT, "the request was aborted over /v1/requests", code="aborted")


def _without_failures(output: RequestOutput) -> RequestOutput:
    """Return `output` as if the completions that failed were still running."""
    completions = [
        completion if _failure_of(completion) is None else dataclasses.replace(completion, finish_reason=None)
        for completion in output.outputs
    ]
    return dataclasses.replace(output, outputs=completions, finished=False)


async def _merged(
    streams: Sequence[OutputStream], preparing: asyncio.Semaphore, places: asyncio.Semaphore
) -> CallOutputs:
    """Yield the outputs of all streams as they come; a slow reader sees only the latest of each."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    latest: dict[int, RequestOutput] = {}
    changed = asyncio.Event()

    async def pump(index: int, stream: OutputStream) -> None:
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                latest[index] = output
                changed.set()

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


async def _drained(
    ended: list[asyncio.Task[None]],
    num_streams: int,
    latest: dict[int, RequestOutput],
    changed: asyncio.Event,
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield what the pumps leave in `latest` until all have come to `ended`; raise the first error of any."""
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
    """How much of one sequence's cumulative text and tokens the client has been sent."""

    __slots__ = ("ended", "num_chars", "num_tokens")

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_tokens = 0
        self.ended = False

    def advance(self, completion: CompletionOutput) -> tuple[str, int]:
        """Return the new text and where the new tokens start; then count both as sent."""
        text = completion.text[self.num_chars :]
        start = self.num_tokens
        self.num_chars = len(completion.text)
        self.num_tokens = len(completion.token_ids)
        self.ended = completion.finish_reason is not None
        return text, start


def end_reason(completion: CompletionOutput) -> EndReason | None:
    """Return OpenAI's word for why the sequence ended, None while it runs."""
    match completion.finish_reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return "length"
        case _:
            return "stop"


def is_cut_off(completion: CompletionOutput) -> bool:
    """Whether a limit or a stop string has ended the sequence, and not the model."""
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
