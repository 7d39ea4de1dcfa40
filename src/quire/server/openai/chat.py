"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec.structs
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.front.text.input_processor import ProcessedRequest
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.calls.blocks import AnswerReader, Block, BlockBegin, BlockDelta, BlockEvent, BlockKind
from quire.server.calls.call import ConversationCall
from quire.server.calls.outputs import end_reason
from quire.server.openai.bodies import ChatCompletionRequest
from quire.server.openai.call import CompletionsCall
from quire.server.wire.answers import (
    AssistantMessage,
    CalledFunctionDelta,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatEndReason,
    Completion,
    CompletionTokensDetails,
    FunctionCall,
    TokenUsage,
    ToolCall,
    ToolCallDelta,
)


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, whole or (with `stream`) as server-sent events."""
    return await ChatCall(request, body).response()


class ChatCall(ConversationCall[ChatCompletionRequest], CompletionsCall[ChatCompletionRequest]):
    """A call of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    answer_type = ChatCompletion
    event_type = ChatCompletionChunk

    def __init__(self, request: Request, body: ChatCompletionRequest) -> None:
        super().__init__(request, body)
        self._opening_fields: dict[str, Any] = {}  # of the first event of a streamed choice
        self._names_ids = bool(body.return_tokens_as_token_ids)
        self._converse(body, body.given_messages())
        if body.thinking_token_budget is not None and self._context.reasoning_format is None:
            raise InvalidRequestError(
                f"thinking_token_budget is {body.thinking_token_budget}, but the model's reasoning format is "
                "not known from its chat template; leave it out, or start the server with --reasoning-format",
                param="thinking_token_budget",
            )
        self._conversation.note_without_effect(self._leniency, self.effort_field)

    def _prepared(self, options: dict[str, Any]) -> Sequence[Awaitable[ProcessedRequest]]:
        return [self._conversation.prepared(self._engine_id, options)]

    @property
    @override
    def _structure_field(self) -> str | None:
        body = self._body
        is_by_format = body.response_format is not None and body.structured_outputs is None
        return "response_format" if is_by_format else None

    @override
    def _usage(self, outputs: Sequence[RequestOutput]) -> TokenUsage:
        usage = super()._usage(outputs)
        counts = [
            self._conversation.num_reasoning_tokens(one) for output in outputs for one in output.outputs
        ]
        known = [count for count in counts if count is not None]
        if not known:
            return usage
        details = CompletionTokensDetails(reasoning_tokens=sum(known))
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def _end_reason(self, completion: CompletionOutput) -> ChatEndReason | None:
        reason = end_reason(completion)
        if reason == "stop" and self._conversation.reader(completion).has_calls:
            return "tool_calls"
        return reason

    async def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=_message_of(self._conversation.reader(completion), completion),
            logprobs=await self._chat_logprobs(completion, 0),
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
        logprobs = await self._chat_logprobs(completion, first_new_token)
        reader = self._conversation.reader(completion)
        deltas = _deltas_of(reader, new_text, completion)
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


def _message_of(reader: AnswerReader, completion: CompletionOutput) -> AssistantMessage:
    """Return a whole answer as a message."""
    blocks = reader.whole(completion)
    content = [block.text for block in blocks if block.kind is BlockKind.TEXT]
    reasoning = [block.text for block in blocks if block.kind is BlockKind.REASONING]
    calls = [
        ToolCall(id=reader.new_call_id(), function=FunctionCall(name=block.name, arguments=block.text))
        for block in blocks
        if block.kind is BlockKind.CALL
    ]
    shown = "".join(reasoning) if reasoning else UNSET
    return AssistantMessage(
        content="".join(content) if content or not (reasoning or calls) else None,
        reasoning_content=shown,
        reasoning=shown,
        tool_calls=calls or UNSET,
    )


def _deltas_of(reader: AnswerReader, text: str, completion: CompletionOutput) -> list[ChatDelta]:
    """Return the deltas of an answer's new text."""
    events = reader.events(text, completion)
    return [delta for event in events if (delta := _delta_of(reader, event)) is not None]


def _delta_of(reader: AnswerReader, event: BlockEvent) -> ChatDelta | None:
    match event:
        case BlockDelta(Block(kind=BlockKind.TEXT), text):
            return ChatDelta(content=text)
        case BlockDelta(Block(kind=BlockKind.REASONING), text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case BlockDelta(Block(call_index=index), text):
            function = CalledFunctionDelta(arguments=text)
            return ChatDelta(tool_calls=[ToolCallDelta(index=index, function=function)])
        case BlockBegin(Block(kind=BlockKind.CALL, call_index=index, name=name)):
            function = CalledFunctionDelta(name=name, arguments="")
            call = ToolCallDelta(index=index, id=reader.new_call_id(), type="function", function=function)
            return ChatDelta(tool_calls=[call])
    return None
