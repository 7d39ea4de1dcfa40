"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.request_output import CompletionOutput, RequestOutput
from quire.server.context import ServerContext, context_of, request_id_of
from quire.server.generation import SequenceProgress, end_reason, generate, naming_fields, usage_of
from quire.server.logprobs import chat_logprobs
from quire.server.protocol import ChatCompletionRequest
from quire.server.responses import (
    SSE_DONE,
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    encode,
    sse_event,
)
from quire.server.streaming import event_stream, unless_disconnected
from quire.server.validation import read_model


async def create_chat_completion(request: Request) -> Response:
    """Answer a chat request, whole or as a stream."""
    context = context_of(request)
    body = await read_model(request, ChatCompletionRequest, max_body_bytes=context.config.max_body_bytes)
    context.require_model(body.model)
    call = _ChatCall(context, body, request_id_of(request))
    if body.stream:
        return await event_stream(request.receive, call.events(), request_id=request_id_of(request))
    completion = await unless_disconnected(request.receive, call.completion())
    return Response(encode(completion), media_type="application/json")


class _ChatCall:
    """One call: its parameters, and the building of its answer."""

    def __init__(self, context: ServerContext, body: ChatCompletionRequest, request_id: str) -> None:
        self._context = context
        self._body = body
        self._id = f"chatcmpl-{request_id}"
        self._params = body.sampling_params()
        self._num_top_logprobs = body.top_logprobs or 0
        self._include_usage = body.include_usage
        self._created = int(time.time())

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        body = self._body
        stream = self._context.llm.chat(
            [message.for_template() for message in body.messages],
            self._params,
            request_id=self._id,
            **body.request_options(),
        )
        fields = {"prompt": "messages"}
        if body.response_format is not None and body.structured_outputs is None:
            fields["structured_outputs"] = "response_format"
        return generate(
            [naming_fields(fields, stream)],
            call_id=self._id,
            request_ids=[self._id],
            num_sequences=self._params.n,
            lifecycle=self._context.lifecycle,
            metrics=self._context.metrics,
        )

    async def completion(self) -> ChatCompletion:
        """Return the whole answer."""
        final: RequestOutput | None = None
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                final = output
        assert final is not None  # generate() raises rather than end without an output
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._context.model_name,
            system_fingerprint=self._context.system_fingerprint,
            choices=[
                self._choice(completion)
                for completion in sorted(final.outputs, key=lambda completion: completion.index)
            ],
            usage=usage_of([final]),
        )

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=AssistantMessage(content=completion.text),
            logprobs=chat_logprobs(completion, 0, self._num_top_logprobs),
            finish_reason=end_reason(completion),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer."""
        progress: dict[int, SequenceProgress] = {}
        latest: RequestOutput | None = None
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for _, output in outputs:
                latest = output
                events = b"".join(
                    sse_event(self._chunk([piece]))
                    for completion in output.outputs
                    for piece in self._pieces(progress, completion)
                )
                if events:
                    yield events
        if self._include_usage and latest is not None:
            last = self._chunk([])
            last.usage = usage_of([latest])
            yield sse_event(last)
        yield SSE_DONE

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._context.model_name,
            system_fingerprint=self._context.system_fingerprint,
            choices=choices,
            usage=None if self._include_usage else UNSET,
        )

    def _pieces(
        self, progress: dict[int, SequenceProgress], completion: CompletionOutput
    ) -> list[ChatChunkChoice]:
        """Return what is new in one message, as choices of streamed events."""
        index = completion.index
        pieces: list[ChatChunkChoice] = []
        sent = progress.get(index)
        if sent is None:
            sent = progress[index] = SequenceProgress()
            pieces.append(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))
        if sent.ended:
            return pieces
        text, start = sent.advance(completion)
        logprobs = chat_logprobs(completion, start, self._num_top_logprobs)
        if text or (logprobs and logprobs.content):
            pieces.append(ChatChunkChoice(index=index, delta=ChatDelta(content=text), logprobs=logprobs))
        if sent.ended:
            reason = end_reason(completion)
            pieces.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason))
        return pieces
