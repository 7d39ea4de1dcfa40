"""POST /api/chat and /api/generate, and the endpoints of Ollama's API."""

from __future__ import annotations

import abc
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.calls.blocks import AnswerReader, Block, BlockDelta, BlockEnd, BlockKind
from quire.server.calls.call import ConversationCall
from quire.server.calls.outputs import OutputHook, OutputStream, SequenceProgress, end_reason
from quire.server.ollama.answers import (
    OLLAMA_ERRORS,
    CalledTool,
    LocalModelList,
    OllamaAnswerMessage,
    OllamaChat,
    OllamaGeneration,
    OllamaToolCall,
    OllamaVersion,
    RunningModelList,
    ShownModel,
    error_text,
    json_line,
    timestamp,
)
from quire.server.ollama.body import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from quire.server.ollama.embeddings import (
    OllamaEmbedded,
    OllamaEmbedding,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    embed,
    embeddings,
)
from quire.server.ollama.models import (
    ShowRequest,
    list_local_models,
    list_running_models,
    ollama_version,
    show_model,
)
from quire.server.wire.answers import json_response
from quire.server.wire.errors import ApiError
from quire.server.wire.openapi import GENERATION_ERRORS, PROMPT_ERRORS, Endpoint
from quire.server.wire.streaming import JSON_LINES

BodyT = TypeVar("BodyT", bound=OllamaRequest)


async def chat(request: Request, body: OllamaChatRequest) -> Response:
    """Answer a conversation in Ollama's form, as lines of JSON or (without `stream`) whole."""
    return await _ChatCall(request, body).response()


async def generate(request: Request, body: OllamaGenerateRequest) -> Response:
    """Answer a prompt in Ollama's form, as lines of JSON or (without `stream`) whole."""
    return await _GenerateCall(request, body).response()


class _OllamaCall(ConversationCall[BodyT]):
    id_prefix = "ollama"
    other_fields: ClassVar[Mapping[str, str]] = {"max_tokens": "options.num_predict", "stop": "options.stop"}
    _structure_field = "format"
    stream_type = JSON_LINES

    def __init__(self, request: Request, body: BodyT) -> None:
        super().__init__(request, body)
        self._durations = Durations()
        self._num_calls = 0  # complete tool calls
        self._raw_reader = AnswerReader()  # of an answer to a raw prompt
        self._raw_prompt = body.raw_prompt(self._context.chat_template)
        if self._raw_prompt is None:
            self._converse(body, body.given_messages())
        self._note_thinking_without_effect()

    def _note_thinking_without_effect(self) -> None:
        """Report a request to reason that the model cannot follow; refuse it if the server is strict."""
        thinking, leniency = self._body.thinking_options(), self._leniency
        template = self._context.chat_template if self._raw_prompt is None else ""
        can_think = self._raw_prompt is None and self._context.reasoning_format is not None
        thinking.note_effort_without_effect(template, leniency, can_think=can_think, param="think")
        if self._body.think is not True or can_think or thinking.variables(template):
            return
        if leniency.is_strict:
            raise InvalidRequestError(
                "think is true, but the model's chat template has no known reasoning format; leave it out",
                param="think",
            )
        leniency.ignore("think")

    @abc.abstractmethod
    def _shaped(self, message: OllamaAnswerMessage, **fields: Any) -> OllamaChat | OllamaGeneration:
        """Return an answer, or a line of a stream, with `message`."""

    @override
    async def response(self) -> Response:
        if not self._body.only_loads:
            return await super().response()
        self._context.llm.check_health()
        return json_response(self._answer(OllamaAnswerMessage(), done=True, done_reason="load"))

    @override
    def _streams(self) -> Sequence[OutputStream]:
        if self._raw_prompt is None:
            return super()._streams()
        options = self._request_options()
        return [
            self._context.llm.generate(self._raw_prompt, self._params, request_id=self._engine_id, **options)
        ]

    @override
    def _fields(self) -> Sequence[Mapping[str, str]]:
        if self._raw_prompt is None:
            return super()._fields()
        return [{"prompt": self.prompt_field, "structured_outputs": "format", **self.other_fields}]

    @override
    def _hooks(self) -> list[OutputHook]:
        conversation = super()._hooks() if self._raw_prompt is None else []
        return [*conversation, lambda _, output: self._durations.observe(output)]

    @override
    async def whole_answer(self) -> OllamaChat | OllamaGeneration:
        [output] = await self._final_outputs()
        [completion] = output.outputs
        message = _joined(self._messages(completion.text, completion))
        return await self._last_answer(message, output, completion, 0)

    @override
    async def _events(self) -> AsyncGenerator[bytes, None]:
        progress = SequenceProgress()
        async with self._outputs() as outputs:
            async for _, output in outputs:
                [completion] = output.outputs
                new_text, first_new_token = progress.advance(completion)
                messages = self._messages(new_text, completion)
                lines = [self._answer(message, done=False) for message in messages]
                if completion.finished:
                    last = await self._last_answer(OllamaAnswerMessage(), output, completion, first_new_token)
                    lines.append(last)
                elif logprobs := await self._logprobs(completion, first_new_token):
                    lines = lines or [self._answer(OllamaAnswerMessage(), done=False)]
                    lines[0].logprobs = logprobs
                if lines:
                    yield b"".join(map(json_line, lines))

    @override
    def _error_event(self, error: ApiError) -> bytes:
        return json_line(error_text(error))

    def _messages(self, new_text: str, completion: CompletionOutput) -> list[OllamaAnswerMessage]:
        """Return the messages of new text; a call is sent once it is complete."""
        raw = self._raw_prompt is not None
        reader = self._raw_reader if raw else self._conversation.reader(completion)
        messages: list[OllamaAnswerMessage] = []
        for event in reader.events(new_text, completion):
            match event:
                case BlockDelta(Block(kind=BlockKind.TEXT), text):
                    messages.append(OllamaAnswerMessage(content=text))
                case BlockDelta(Block(kind=BlockKind.REASONING), text):
                    messages.append(OllamaAnswerMessage(thinking=text))
                case BlockEnd(Block(kind=BlockKind.CALL, is_complete=True) as block):
                    tool = CalledTool(index=self._num_calls, name=block.name, arguments=block.arguments)
                    call = OllamaToolCall(id=reader.new_call_id(), function=tool)
                    messages.append(OllamaAnswerMessage(tool_calls=[call]))
                    self._num_calls += 1
        return messages

    async def _logprobs(self, completion: CompletionOutput, first_token: int) -> Any:
        written = await self._chat_logprobs(completion, first_token)
        return UNSET if written is None else written.content

    def _answer(self, message: OllamaAnswerMessage, **fields: Any) -> OllamaChat | OllamaGeneration:
        return self._shaped(message, model=self._body.model, created_at=timestamp(time.time()), **fields)

    async def _last_answer(
        self,
        message: OllamaAnswerMessage,
        output: RequestOutput,
        completion: CompletionOutput,
        first_token: int,
    ) -> OllamaChat | OllamaGeneration:
        return self._answer(
            message,
            done=True,
            done_reason=end_reason(completion),
            prompt_eval_count=len(output.prompt_token_ids),
            eval_count=len(completion.token_ids),
            logprobs=await self._logprobs(completion, first_token),
            **self._durations.fields(),
        )


class _ChatCall(_OllamaCall[OllamaChatRequest]):
    @override
    def _shaped(self, message: OllamaAnswerMessage, **fields: Any) -> OllamaChat:
        return OllamaChat(message=message, **fields)


class _GenerateCall(_OllamaCall[OllamaGenerateRequest]):
    operation = "text_completion"
    prompt_field = "prompt"

    @override
    def _shaped(self, message: OllamaAnswerMessage, **fields: Any) -> OllamaGeneration:
        return OllamaGeneration(response=message.content, thinking=message.thinking, **fields)


def _joined(pieces: Sequence[OllamaAnswerMessage]) -> OllamaAnswerMessage:
    thinking = [piece.thinking for piece in pieces if piece.thinking is not UNSET]
    calls = [call for piece in pieces if piece.tool_calls is not UNSET for call in piece.tool_calls]
    return OllamaAnswerMessage(
        content="".join(piece.content for piece in pieces),
        thinking="".join(thinking) if thinking else UNSET,
        tool_calls=calls or UNSET,
    )


class Durations:
    """The times of one request, created when it arrives."""

    def __init__(self) -> None:
        self._arrival = time.monotonic()
        self._start: float | None = None  # time of its first step
        self._first_token: float | None = None

    def observe(self, output: RequestOutput) -> None:
        """Note when the request has started and when it has its first token."""
        if self._first_token is None and any(completion.token_ids for completion in output.outputs):
            self._start = output.first_scheduled_time
            self._first_token = time.monotonic()

    def fields(self) -> dict[str, int]:
        """Return the durations up to now in nanoseconds, by Ollama's names.

        Loading covers the time until the first step. Durations that clients divide by are never 0.
        """
        end = time.monotonic()
        first_token = end if self._first_token is None else self._first_token
        start = self._arrival if self._start is None else self._start
        return {
            "total_duration": _nanoseconds(end - self._arrival),
            "load_duration": _nanoseconds(start - self._arrival),
            "prompt_eval_duration": max(1, _nanoseconds(first_token - start)),
            "eval_duration": max(1, _nanoseconds(end - first_token)),
        }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


OLLAMA_ENDPOINTS = (
    Endpoint(
        "POST",
        "/api/chat",
        chat,
        OllamaChat,
        body=OllamaChatRequest,
        takes_any_type=True,
        event=OllamaChat,
        stream_type=JSON_LINES,
        errors=GENERATION_ERRORS,
        error_shape=OLLAMA_ERRORS,
    ),
    Endpoint(
        "POST",
        "/api/generate",
        generate,
        OllamaGeneration,
        body=OllamaGenerateRequest,
        takes_any_type=True,
        event=OllamaGeneration,
        stream_type=JSON_LINES,
        errors=GENERATION_ERRORS,
        error_shape=OLLAMA_ERRORS,
    ),
    *(
        Endpoint(
            "POST",
            path,
            handler,
            answer,
            body=body,
            takes_any_type=True,
            errors=GENERATION_ERRORS,
            error_shape=OLLAMA_ERRORS,
        )
        for path, handler, answer, body in (
            ("/api/embed", embed, OllamaEmbedded, OllamaEmbedRequest),
            ("/api/embeddings", embeddings, OllamaEmbedding, OllamaEmbeddingsRequest),
        )
    ),
    Endpoint(
        "POST",
        "/api/show",
        show_model,
        ShownModel,
        body=ShowRequest,
        takes_any_type=True,
        errors=PROMPT_ERRORS,
        error_shape=OLLAMA_ERRORS,
    ),
    *(
        Endpoint("GET", path, handler, answer, error_shape=OLLAMA_ERRORS)
        for path, handler, answer in (
            ("/api/tags", list_local_models, LocalModelList),
            ("/api/ps", list_running_models, RunningModelList),
            ("/api/version", ollama_version, OllamaVersion),
        )
    ),
)
