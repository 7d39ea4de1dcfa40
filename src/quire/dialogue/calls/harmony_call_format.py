"""The grammar of calls in harmony."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from quire.dialogue.calls.grammar_writing import GrammarWriter
from quire.dialogue.calls.json_calls import object_grammar
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.calls.tools import Tool, ToolUse
from quire.dialogue.harmony_messages import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDS_OF_BODY,
    FINAL_HEADER,
    FUNCTIONS,
    MARKS,
    MESSAGE,
    MESSAGE_START,
    RETURN,
)

_COMMENTARY = f"{CHANNEL}commentary"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyCallFormat(ToolCallFormat):
    """How an answer in harmony calls a tool: one, since its call ends the answer."""

    @property
    @override
    def marks(self) -> tuple[str, ...]:
        return MARKS

    @property
    @override
    def ends(self) -> tuple[str, ...]:
        return RETURN, CALL

    @property
    @override
    def in_messages(self) -> bool:
        return True

    @override
    def answer_grammar(self, writer: GrammarWriter, use: ToolUse, content: str | None) -> str:
        """See `ToolCallFormat.answer_grammar`; thoughts are not in it, and come before."""
        call = writer.one_of(_call_grammar(writer, tool) for tool in use.callable_tools)
        if use.must_call:
            return call
        if content is None:
            content = writer.text_without(ENDS_OF_BODY)
        preamble = writer.one_of(
            [
                f"{writer.literal(_COMMENTARY + MESSAGE)} {writer.text_up_to(END, ENDS_OF_BODY)} "
                f"{writer.literal(MESSAGE_START)}"
            ]
        )
        return f"{preamble}* ({call} | {writer.literal(FINAL_HEADER)} {content})"


def _call_grammar(writer: GrammarWriter, tool: Tool) -> str:
    header = f"{_COMMENTARY} to={FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}"
    return f"{writer.literal(header)} {object_grammar(writer, tool)}"
