"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.dialogue.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ContentDelta,
    ReasoningDelta,
)
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.anthropic.answers import (
    NO_INPUT,
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
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
from quire.server.calls.call import GenerationCall
from quire.server.calls.conversation import AnswerReader, Conversation
from quire.server.calls.outputs import OutputHook, OutputStream, SequenceProgress, is_cut_off
from quire.server.calls.tool_answers import object_of
from quire.server.context import context_of, leniency_of
from quire.server.wire.answers import json_response
from quire.server.wire.errors import ApiError
from quire.status import FinishReason

CALL_ID_PREFIX = "toolu_"

_FIELD_NAMES = {"prompt": "messages", "stop": "stop_sequences"}


async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation in Anthropic's form, whole or, with `stream`, as server-sent events."""
    return await _MessagesCall(request, body).response()


async def count_message_tokens(request: Request, body: CountTokensRequest) -> Response:
    """Count the tokens of a conversation's prompt."""
    context = context_of(request)
    context.require_model(body.model)
    tokens = await Conversation(context, body).prompt_tokens()
    return json_response(TokenCount(input_tokens=len(tokens)))


class _MessagesCall(GenerationCall[MessagesRequest]):
    id_prefix = "msg"

    def __init__(self, request: Request, body: MessagesRequest) -> None:
        super().__init__(request, body)
        self._conversation = Conversation(self._context, body, self._params)
        self._params = self._conversation.params
        can_think = self._context.thought_format is not None
        template, leniency = self._context.chat_template, leniency_of(request)
        thinking = body.thinking_options()
        thinking.note_effort_without_effect(
            template, leniency, can_think=can_think, param="output_config.effort"
        )
        if body.thinking is not None:
            thinking.note_switch_without_effect(template, leniency, can_think=can_think, param="thinking")

    def _streams(self) -> Sequence[OutputStream]:
        return [self._conversation.outputs(self._engine_id, self._request_options())]

    def _fields(self) -> Sequence[Mapping[str, str]]:
        is_by_tools = self._conversation.is_structured_by_tools
        structure = "tools" if is_by_tools else self._body.structure_field
        return [{**_FIELD_NAMES, "structured_outputs": structure}]

    @override
    def _hooks(self) -> list[OutputHook]:
        return [self._conversation.observe]

    @override
    async def whole_answer(self) -> MessageAnswer:
        [output] = await self._final_outputs()
        [completion] = output.outputs
        reader = self._conversation.reader(completion)
        content = _content_of(reader, completion)
        stop = _stop_details(completion, reader)
        return self._message(output, content, stop.stop_reason, stop.stop_sequence)

    @override
    async def _events(self) -> AsyncGenerator[bytes, None]:
        progress = SequenceProgress()
        blocks: _StreamedBlocks | None = None
        async with self._outputs() as outputs:
            async for _, output in outputs:
                [completion] = output.outputs
                events: list[StreamEvent] = []
                if blocks is None:
                    blocks = _StreamedBlocks(self._conversation.reader(completion))
                    events.append(MessageStart(self._message(output, [], None, None)))
                new_text, _ = progress.advance(completion)
                events += blocks.events(new_text, completion)
                if completion.finished:
                    details = _stop_details(completion, blocks.reader)
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


class _StreamedBlocks:
    """Turns an answer's events into those of its content blocks, of which one at a time is open."""

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self._index = -1
        self._open: type[ContentBlock] | None = None

    def events(self, new_text: str, completion: CompletionOutput) -> list[StreamEvent]:
        """Return what is new with a piece of the answer's text."""
        events: list[StreamEvent] = []
        is_last = completion.finished
        for event in self.reader.events(new_text, is_last=is_last, is_cut_off=is_cut_off(completion)):
            events += self._translated(event)
        return events + self._close() if is_last else events

    def _translated(self, event: AnswerEvent) -> list[StreamEvent]:
        match event:
            case ContentDelta(text=text):
                start = [] if self._open is TextContent else self._begin(TextContent(text=""))
                return [*start, BlockDelta(self._index, TextDelta(text))]
            case ReasoningDelta(text=text):
                start = [] if self._open is ThinkingContent else self._begin(ThinkingContent(thinking=""))
                return [*start, BlockDelta(self._index, ThinkingDelta(text))]
            case CallBegin(name=name):
                call_id = self.reader.new_call_id(CALL_ID_PREFIX)
                return self._begin(ToolUseContent(id=call_id, name=name, input=NO_INPUT))
            case ArgumentsDelta(text=text):
                return [BlockDelta(self._index, InputJsonDelta(text))]
            case CallEnd():
                return self._close()

    def _begin(self, block: ContentBlock) -> list[StreamEvent]:
        closed = self._close()
        self._index += 1
        self._open = type(block)
        return [*closed, BlockStart(self._index, block)]

    def _close(self) -> list[StreamEvent]:
        if self._open is None:
            return []
        self._open = None
        return [BlockStop(self._index)]


def _content_of(reader: AnswerReader, completion: CompletionOutput) -> list[ContentBlock]:
    """Return the blocks of a whole answer."""
    blocks: list[ContentBlock] = []
    arguments: list[str] = []  # pieces of the last call's
    for event in reader.events(completion.text, is_last=True, is_cut_off=is_cut_off(completion)):
        match event:
            case ContentDelta(text=piece):
                if blocks and isinstance(blocks[-1], TextContent):
                    blocks[-1].text += piece
                else:
                    blocks.append(TextContent(text=piece))
            case ReasoningDelta(text=piece):
                if blocks and isinstance(blocks[-1], ThinkingContent):
                    blocks[-1].thinking += piece
                else:
                    blocks.append(ThinkingContent(thinking=piece))
            case CallBegin(name=name):
                arguments = []
                call_id = reader.new_call_id(CALL_ID_PREFIX)
                blocks.append(ToolUseContent(id=call_id, name=name, input=NO_INPUT))
            case ArgumentsDelta(text=piece):
                arguments.append(piece)
            case CallEnd(is_complete=True):
                call = blocks[-1]
                assert isinstance(call, ToolUseContent)
                call.input = object_of("".join(arguments))
            case CallEnd() if completion.finish_reason is not FinishReason.LENGTH:
                blocks.pop()  # a stop sequence has cut it off
    return blocks


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
