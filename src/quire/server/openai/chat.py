"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec.structs
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.calls.conversation import Conversation
from quire.server.calls.logprobs import chat_logprobs
from quire.server.calls.outputs import OutputHook, OutputStream, end_reason
from quire.server.calls.tool_answers import deltas_of, message_of
from quire.server.context import leniency_of
from quire.server.openai.bodies import ChatCompletionRequest
from quire.server.openai.call import CompletionsCall
from quire.server.wire.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatEndReason,
    ChatLogprobs,
    Completion,
    CompletionTokensDetails,
    TokenUsage,
)


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, whole or, with `stream`, as server-sent events."""
    return await _ChatCall(request, body).response()


class _ChatCall(CompletionsCall[ChatCompletionRequest]):
    id_prefix = "chatcmpl"
    answer_type = ChatCompletion
    event_type = ChatCompletionChunk

    def __init__(self, request: Request, body: ChatCompletionRequest) -> None:
        super().__init__(request, body)
        self._opening_fields: dict[str, Any] = {}  # of the event that a streamed choice begins with
        self._conversation = Conversation(self._context, body, self._params)
        self._params = self._conversation.params
        if body.thinking_token_budget is not None and self._context.thought_format is None:
            raise InvalidRequestError(
                f"thinking_token_budget is {body.thinking_token_budget}, but the model's chat template does "
                "not tell how it thinks; leave it out, or start the server with --reasoning-format",
                param="thinking_token_budget",
            )
        options = body.prompt_options()
        options.note_documents_without_effect(self._context.chat_template, leniency_of(request))
        can_think = self._context.thought_format is not None
        template, leniency = self._context.chat_template, leniency_of(request)
        body.thinking_options().note_effort_without_effect(template, leniency, can_think=can_think)

    def _streams(self) -> Sequence[OutputStream]:
        return [self._conversation.outputs(self._engine_id, self._request_options())]

    def _fields(self) -> Sequence[Mapping[str, str]]:
        body = self._body
        fields = {"prompt": "messages"}
        if self._conversation.is_structured_by_tools:
            fields["structured_outputs"] = "tools"
        elif body.response_format is not None and body.structured_outputs is None:
            fields["structured_outputs"] = "response_format"
        return [fields]

    @override
    def _hooks(self) -> list[OutputHook]:
        return [self._conversation.observe]

    @override
    def _usage(self, outputs: Sequence[RequestOutput]) -> TokenUsage:
        usage = super()._usage(outputs)
        counts = [self._conversation.num_thought_tokens(one) for output in outputs for one in output.outputs]
        known = [count for count in counts if count is not None]
        if not known:
            return usage
        details = CompletionTokensDetails(reasoning_tokens=sum(known))
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def _end_reason(self, completion: CompletionOutput) -> ChatEndReason | None:
        reason = end_reason(completion)
        has_calls = self._conversation.reader(completion).has_calls
        return "tool_calls" if reason == "stop" and has_calls else reason

    async def _logprobs(self, completion: CompletionOutput, first_token: int) -> ChatLogprobs | None:
        tokenizer = self._context.llm.tokenizer
        return await chat_logprobs(tokenizer, completion, first_token, self._body.top_logprobs or 0)

    async def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=message_of(self._conversation.reader(completion), completion),
            logprobs=await self._logprobs(completion, 0),
            finish_reason=self._end_reason(completion),
            token_ids=self._token_ids(completion, 0),
        )

    @override
    def _answer_fields(self, first: RequestOutput) -> dict[str, Any]:
        return self._prompt_fields(0, first)

    async def _opening(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[ChatChunkChoice]:
        self._opening_fields = self._prompt_fields(prompt_index, output)
        delta = ChatDelta(role="assistant", content="")
        return [ChatChunkChoice(index=completion.index, delta=delta)]

    async def _continuation(
        self, prompt_index: int, completion: CompletionOutput, new_text: str, first_new_token: int
    ) -> list[ChatChunkChoice]:
        index = completion.index
        logprobs = await self._logprobs(completion, first_new_token)
        reader = self._conversation.reader(completion)
        deltas = deltas_of(reader, new_text, completion)
        token_ids = self._token_ids(completion, first_new_token)
        if not deltas and (token_ids or (logprobs and logprobs.content)):
            deltas = [ChatDelta(content="")]
        pieces = [ChatChunkChoice(index=index, delta=delta) for delta in deltas]
        if pieces:
            pieces[0].logprobs, pieces[0].token_ids = logprobs, token_ids
        if reason := self._end_reason(completion):
            pieces.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason))
        return pieces

    @override
    def _event(
        self, choices: list[Any], usage: TokenUsage | UnsetType | None
    ) -> Completion | ChatCompletionChunk:
        opens = bool(choices) and choices[0].delta.role is not UNSET
        fields = self._opening_fields if opens else {}
        return ChatCompletionChunk(choices=choices, usage=usage, **fields, **self._head)
