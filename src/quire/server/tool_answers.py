"""Answers that may call tools, in the shapes of chat completions."""

from __future__ import annotations

import dataclasses
import secrets
import string

from msgspec import UNSET

from quire.dialogue.answer_parser import AnswerParser
from quire.dialogue.call_grammar import structure_of_answer
from quire.dialogue.events import AnswerEvent, ArgumentsDelta, CallBegin, ContentDelta
from quire.dialogue.formats import FORMATS, ToolCallFormat, format_of_template, has_place_for_tools
from quire.dialogue.tools import ToolUse
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.server.context import ServerContext
from quire.server.responses import (
    AssistantMessage,
    CalledFunctionDelta,
    ChatDelta,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)

_SHORT_ID_CHARACTERS = string.ascii_letters + string.digits
_SHORT_ID_LENGTH = 9


def tool_call_format(context: ServerContext) -> ToolCallFormat:
    """Return the format in which the served model calls tools.

    Raises:
        InvalidRequestError: its chat template has no place for tools, or the format is unknown.
    """
    template = context.llm.tokenizer.chat_template_source
    if template is None or not has_place_for_tools(template):
        raise InvalidRequestError(
            "the model's chat template has no place for tools; leave them out, or serve a model that was "
            "trained to call tools",
            param="tools",
        )
    call_format = known_format(context)
    if call_format is None:
        raise InvalidRequestError(
            "the format in which the model calls tools is not known from its chat template; start the server "
            "with --tool-call-format",
            param="tools",
        )
    return call_format


def known_format(context: ServerContext) -> ToolCallFormat | None:
    """Return the format in which the served model calls tools; None if it is unknown."""
    name: str | None = context.config.tool_call_format
    if name == "auto":
        name = format_of_template(context.llm.tokenizer.chat_template_source or "")
    return None if name is None else FORMATS[name]


def params_with_tools(
    params: SamplingParams, use: ToolUse, call_format: ToolCallFormat, context: ServerContext
) -> SamplingParams:
    """Return the parameters of an answer that calls tools as it may or must.

    Raises:
        InvalidRequestError: that cannot be enforced.
    """
    if not use.needs_grammar and params.structured_outputs is None:
        return params
    token_id_of = context.llm.tokenizer.added_token_id
    structure = structure_of_answer(call_format, use, token_id_of, content=params.structured_outputs)
    return dataclasses.replace(params, structured_outputs=structure)


class ToolAnswer:
    """One answer, read as it comes.

    Args:
        call_format: in which the model calls tools.
        use: of tools by the answer.
    """

    def __init__(self, call_format: ToolCallFormat, use: ToolUse) -> None:
        self._parser = AnswerParser(call_format, use.schemas)
        self._short_ids = call_format.short_ids

    @property
    def has_calls(self) -> bool:
        """Whether it has called a tool so far."""
        return self._parser.num_calls > 0

    def deltas(self, text: str, *, is_last: bool) -> list[ChatDelta]:
        """Return what is new with a piece of text."""
        return [delta for event in self._events(text, is_last) if (delta := self._delta(event)) is not None]

    def message(self, text: str) -> AssistantMessage:
        """Return the whole answer as a message."""
        content: list[str] = []
        calls: list[ToolCall] = []
        for event in self._events(text, is_last=True):
            match event:
                case ContentDelta(text=piece):
                    content.append(piece)
                case CallBegin(name=name):
                    calls.append(ToolCall(id=self._new_id(), function=FunctionCall(name=name, arguments="")))
                case ArgumentsDelta(text=piece):
                    calls[-1].function.arguments += piece
        said = "".join(content)
        return AssistantMessage(content=said if said or not calls else None, tool_calls=calls or UNSET)

    def _events(self, text: str, is_last: bool) -> list[AnswerEvent]:
        return self._parser.feed(text) + (self._parser.finish() if is_last else [])

    def _delta(self, event: AnswerEvent) -> ChatDelta | None:
        match event:
            case ContentDelta(text=text):
                return ChatDelta(content=text)
            case CallBegin(index=index, name=name):
                function = CalledFunctionDelta(name=name, arguments="")
                call = ToolCallDelta(index=index, id=self._new_id(), type="function", function=function)
                return ChatDelta(tool_calls=[call])
            case ArgumentsDelta(index=index, text=text):
                return ChatDelta(
                    tool_calls=[ToolCallDelta(index=index, function=CalledFunctionDelta(arguments=text))]
                )
        return None

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_SHORT_ID_CHARACTERS) for _ in range(_SHORT_ID_LENGTH))
        return f"call_{secrets.token_hex(12)}"
