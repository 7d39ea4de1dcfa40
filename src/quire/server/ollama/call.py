"""POST /api/chat and /api/generate."""

from __future__ import annotations

import abc
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.calls.call import GenerationCall
from quire.server.calls.conversation import AnswerReader, Conversation
from quire.server.calls.logprobs import chat_logprobs
from quire.server.calls.outputs import OutputHook, OutputStream, SequenceProgress, end_reason
from quire.server.context import leniency_of
from quire.server.ollama.answers import (
    OllamaAnswerMessage,
    OllamaChat,
    OllamaGeneration,
    error_text,
    json_line,
    timestamp,
)
from quire.server.ollama.body import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from quire.server.ollama.durations import Durations
from quire.server.ollama.message_reader import MessageReader
from quire.server.wire.answers import json_response
from quire.server.wire.errors import ApiError
from quire.server.wire.streaming import JSON_LINES

_FIELD_NAMES = {
    "max_tokens": "options.num_predict",
    "structured_outputs": "format",
    "stop": "options.stop",
}

BodyT = TypeVar("BodyT", bound=OllamaRequest)


async def chat(request: Request, body: OllamaChatRequest) -> Response:
    """Answer a conversation in Ollama's form, in lines of JSON or, without `stream`, whole."""
    return await _ChatCall(request, body).response()


async def generate(request: Request, body: OllamaGenerateRequest) -> Response:
    """Answer a prompt in Ollama's form, in lines of JSON or, without `stream`, whole."""
    return await _GenerateCall(request, body).response()


class _OllamaCall(GenerationCall[BodyT]):
    id_prefix = "ollama"
    stream_type = JSON_LINES

    def __init__(self, request: Request, body: BodyT) -> None:
        super().__init__(request, body)
        self._durations = Durations()
        self._raw_prompt = body.raw_prompt(self._context.chat_template)
        self._conversation: Conversation | None = None
        if self._raw_prompt is None:
            self._conversation = Conversation(self._context, body, self._params)
            self._params = self._conversation.params
        self._note_thinking_without_effect()

    def _note_thinking_without_effect(self) -> None:
        """Note that the model is to think, which it cannot, unless the server is strict."""
        thinking, leniency = self._body.thinking_options(), leniency_of(self._request)
        template = "" if self._conversation is None else self._context.chat_template
        can_think = self._conversation is not None and self._context.thought_format is not None
        thinking.note_effort_without_effect(template, leniency, can_think=can_think, param="think")
        if self._body.think is not True or can_think or thinking.variables(template):
            return
        if leniency.is_strict:
            raise InvalidRequestError(
                "think is true, and the model's chat template does not tell how it thinks; leave it out",
                param="think",
            )
        leniency.ignore("think")

    @abc.abstractmethod
    def _shaped(self, message: OllamaAnswerMessage, **fields: Any) -> OllamaChat | OllamaGeneration:
        """Return an answer, or a line of a stream, that says `message`."""

    @override
    async def response(self) -> Response:
        if not self._body.only_loads:
            return await super().response()
        self._context.llm.check_health()
        return json_response(self._answer(OllamaAnswerMessage(), done=True, done_reason="load"))

    def _streams(self) -> Sequence[OutputStream]:
        options = self._request_options()
        if self._conversation is not None:
            return [self._conversation.outputs(self._engine_id, options)]
        prompt = self._raw_prompt or ""
        return [self._context.llm.generate(prompt, self._params, request_id=self._engine_id, **options)]

    def _fields(self) -> Sequence[Mapping[str, str]]:
        fields = {**_FIELD_NAMES, "prompt": self._prompt_field}
        if self._conversation is not None and self._conversation.is_structured_by_tools:
            fields["structured_outputs"] = "tools"
        return [fields]

    @property
    @abc.abstractmethod
    def _prompt_field(self) -> str:
        """The field that the prompt comes from."""

    @override
    def _hooks(self) -> list[OutputHook]:
        conversation = [] if self._conversation is None else [self._conversation.observe]
        return [*conversation, lambda _, output: self._durations.observe(output)]

    @override
    async def whole_answer(self) -> OllamaChat | OllamaGeneration:
        [output] = await self._final_outputs()
        [completion] = output.outputs
        message = MessageReader(self._reader(completion)).whole(completion)
        return await self._last_answer(message, output, completion, 0)

    @override
    async def _events(self) -> AsyncGenerator[bytes, None]:
        progress = SequenceProgress()
        reader: MessageReader | None = None
        async with self._outputs() as outputs:
            async for _, output in outputs:
                [completion] = output.outputs
                reader = reader or MessageReader(self._reader(completion))
                new_text, first_new_token = progress.advance(completion)
                messages = reader.pieces(new_text, completion)
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

    def _reader(self, completion: CompletionOutput) -> AnswerReader:
        if self._conversation is None:
            return AnswerReader(None, None, None, shows_thought=True)
        return self._conversation.reader(completion)

    async def _logprobs(self, completion: CompletionOutput, first_token: int) -> Any:
        tokenizer = self._context.llm.tokenizer
        written = await chat_logprobs(tokenizer, completion, first_token, self._body.top_logprobs or 0)
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
    _prompt_field = "messages"

    @override
    def _shaped(self, message: OllamaAnswerMessage, **fields: Any) -> OllamaChat:
        return OllamaChat(message=message, **fields)


class _GenerateCall(_OllamaCall[OllamaGenerateRequest]):
    operation = "text_completion"
    _prompt_field = "prompt"

    @override
    def _shaped(self, message: OllamaAnswerMessage, **fields: Any) -> OllamaGeneration:
        return OllamaGeneration(response=message.content, thinking=message.thinking, **fields)
