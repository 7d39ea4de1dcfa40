"""Answers with thoughts and calls of tools, in the shapes of chat completions."""

from __future__ import annotations

import re

from msgspec import UNSET, Raw

from quire.dialogue.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ContentDelta,
    ReasoningDelta,
)
from quire.request_output import CompletionOutput
from quire.server.calls.conversation import AnswerReader
from quire.server.calls.outputs import is_cut_off
from quire.server.wire.answers import (
    AssistantMessage,
    CalledFunctionDelta,
    ChatDelta,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)
from quire.status import FinishReason

_LINE_BREAKS = re.compile(r"[\r\n]+")


def message_of(reader: AnswerReader, completion: CompletionOutput) -> AssistantMessage:
    """Return a whole answer as a message."""
    content: list[str] = []
    thought: list[str] = []
    calls: list[ToolCall] = []
    for event in reader.events(completion.text, is_last=True, is_cut_off=is_cut_off(completion)):
        match event:
            case ContentDelta(text=piece):
                content.append(piece)
            case ReasoningDelta(text=piece):
                thought.append(piece)
            case CallBegin(name=name):
                function = FunctionCall(name=name, arguments="")
                calls.append(ToolCall(id=reader.new_call_id(), function=function))
            case ArgumentsDelta(text=piece):
                calls[-1].function.arguments += piece
            case CallEnd(is_complete=False) if completion.finish_reason is not FinishReason.LENGTH:
                calls.pop()  # a stop string has cut it off, which the reason does not say
    shown = "".join(thought) if thought else UNSET
    return AssistantMessage(
        content="".join(content) if content or not (thought or calls) else None,
        reasoning_content=shown,
        reasoning=shown,
        tool_calls=calls or UNSET,
    )


def deltas_of(reader: AnswerReader, text: str, completion: CompletionOutput) -> list[ChatDelta]:
    """Return what is new in an answer with a piece of its text."""
    events = reader.events(text, is_last=completion.finished, is_cut_off=is_cut_off(completion))
    return [delta for event in events if (delta := _delta(reader, event)) is not None]


def object_of(arguments: str) -> Raw:
    """Return a complete call's arguments for APIs that have them as an object: JSON without line breaks.

    In JSON, line breaks are only between values.
    """
    return Raw(_LINE_BREAKS.sub(" ", arguments))


def _delta(reader: AnswerReader, event: AnswerEvent) -> ChatDelta | None:
    match event:
        case ContentDelta(text=text):
            return ChatDelta(content=text)
        case ReasoningDelta(text=text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case CallBegin(index=index, name=name):
            function = CalledFunctionDelta(name=name, arguments="")
            call = ToolCallDelta(index=index, id=reader.new_call_id(), type="function", function=function)
            return ChatDelta(tool_calls=[call])
        case ArgumentsDelta(index=index, text=text):
            return ChatDelta(
                tool_calls=[ToolCallDelta(index=index, function=CalledFunctionDelta(arguments=text))]
            )
    return None
