"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.request_output import CompletionOutput, RequestOutput
from quire.server.anthropic.answers import (
    ANTHROPIC_ERRORS,
    NO_INPUT,
    BlockStart,
    BlockStop,
    ContentBlock,
    ContentBlockDelta,
    InputJsonDelta,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    StopDetails,
    StopReason,
    StreamEvent,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    TokenCount,
    ToolUseContent,
    Usage,
    error_answer,
    named_event,
)
from quire.server.anthropic.body import CountTokensRequest, MessagesRequest
from quire.server.calls.blocks import (
    AnswerReader,
    Block,
    BlockBegin,
    BlockDelta,
    BlockEnd,
    BlockEvent,
    BlockKind,
)
from quire.server.calls.call import ConversationCall
from quire.server.calls.conversation import Conversation
from quire.server.calls.outputs import SequenceProgress
from quire.server.context import context_of
from quire.server.wire.answers import json_response
from quire.server.wire.errors import ApiError
from quire.server.wire.openapi import GENERATION_ERRORS, PROMPT_ERRORS, Endpoint
from quire.status import FinishReason

CALL_ID_PREFIX = "toolu_"


async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation in Anthropic's form, whole or (with `stream`) as server-sent events."""
    return await _MessagesCall(request, body).response()


async def count_message_tokens(request: Request, body: CountTokensRequest) -> Response:
    """Count the tokens of a conversation's prompt."""
    context = context_of(request).of_model(body.model)
    tokens = await Conversation(context, body, body.given_messages()).prompt_tokens()
    return json_response(TokenCount(input_tokens=len(tokens)))


class _MessagesCall(ConversationCall[MessagesRequest]):
    id_prefix = "msg"
    effort_field = "output_config.effort"
    other_fields: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences"}

    def __init__(self, request: Request, body: MessagesRequest) -> None:
        super().__init__(request, body)
        self._converse(body, body.given_messages())
        switch = None if body.thinking is None else "thinking"
        self._conversation.note_without_effect(self._leniency, self.effort_field, switch)

    @property
    @override
    def _structure_field(self) -> str:
        return self._body.structure_field

    @override
    async def whole_answer(self) -> MessageAnswer:
        [output] = await self._final_outputs()
        [completion] = output.outputs
        reader = self._conversation.reader(completion)
        content = [_content_of(reader, block, block.text) for block in reader.whole(completion)]
        stop = _stop_details(completion, reader)
        return self._message(output, content, stop.stop_reason, stop.stop_sequence)

    @override
    async def _events(self) -> AsyncGenerator[bytes, None]:
        progress = SequenceProgress()
        async with self._outputs() as outputs:
            async for _, output in outputs:
                [completion] = output.outputs
                reader = self._conversation.reader(completion)
                events: list[StreamEvent] = []
                if not progress.begun:
                    events.append(MessageStart(self._message(output, [], None, None)))
                new_text, _ = progress.advance(completion)
                events += [_event_of(reader, event) for event in reader.events(new_text, completion)]
                if completion.finished:
                    details = _stop_details(completion, reader)
                    events += [MessageDelta(details, _usage_of(output)), MessageStop()]
                if events:
                    yield b"".join(map(named_event, events))

    @override
    def _error_event(self, error: ApiError) -> bytes:
        return named_event(error_answer(error))

    def _message(
        self,
        output: RequestOutput,
        content: list[ContentBlock],
        stop_reason: StopReason | None,
        stop_sequence: str | None,
    ) -> MessageAnswer:
        return MessageAnswer(
            id=self._id,
            model=self._body.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=_usage_of(output),
        )


def _event_of(reader: AnswerReader, event: BlockEvent) -> StreamEvent:
    """Return a new part of an answer as an event of a content block."""
    match event:
        case BlockBegin(block):
            return BlockStart(block.index, _content_of(reader, block, ""))
        case BlockDelta(Block(kind=BlockKind.TEXT, index=index), text):
            return ContentBlockDelta(index, TextDelta(text))
        case BlockDelta(Block(kind=BlockKind.REASONING, index=index), text):
            return ContentBlockDelta(index, ThinkingDelta(text))
        case BlockDelta(Block(index=index), text):
            return ContentBlockDelta(index, InputJsonDelta(text))
        case BlockEnd(block):
            return BlockStop(block.index)


def _content_of(reader: AnswerReader, block: Block, text: str) -> ContentBlock:
    """Return a content block for a block of the answer, with this (initial) text."""
    match block.kind:
        case BlockKind.TEXT:
            return TextContent(text=text)
        case BlockKind.REASONING:
            return ThinkingContent(thinking=text)
        case BlockKind.CALL:
            arguments = block.arguments if text and block.is_complete else NO_INPUT
            return ToolUseContent(id=reader.new_call_id(CALL_ID_PREFIX), name=block.name, input=arguments)


def _stop_details(completion: CompletionOutput, reader: AnswerReader) -> StopDetails:
    reason: StopReason
    sequence = None
    if completion.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif reader.has_calls:
        reason = "tool_use"
    elif isinstance(completion.stop_reason, str):
        reason, sequence = "stop_sequence", completion.stop_reason
    else:
        reason = "end_turn"
    return StopDetails(stop_reason=reason, stop_sequence=sequence)


def _usage_of(output: RequestOutput) -> Usage:
    cached = output.num_cached_tokens
    return Usage(
        input_tokens=len(output.prompt_token_ids) - cached,
        output_tokens=sum(len(completion.token_ids) for completion in output.outputs),
        cache_read_input_tokens=cached,
    )


MESSAGE_ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/messages",
        create_message,
        MessageAnswer,
        body=MessagesRequest,
        event=MessageAnswer,
        errors=GENERATION_ERRORS,
        error_shape=ANTHROPIC_ERRORS,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        count_message_tokens,
        TokenCount,
        body=CountTokensRequest,
        errors=PROMPT_ERRORS,
        error_shape=ANTHROPIC_ERRORS,
    ),
)
