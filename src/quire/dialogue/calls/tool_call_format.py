"""The interface of tool call formats."""

from __future__ import annotations

import abc
import dataclasses

from quire.dialogue.calls.grammar_writing import GrammarWriter
from quire.dialogue.calls.tools import ToolUse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat(abc.ABC):
    """How a model's answer calls tools.

    Args:
        template_marks: what a chat template of this format has in it; each entry is texts that it has all of.
        arguments_as_text: whether the template wants a call's arguments as JSON text, not as an object.
        null_content: whether the template wants null, not "", for a message that has calls and no content.
        short_ids: whether the template wants ids of nine letters and digits.
        numbered_ids: whether the template wants ids such as functions.name:0, counted in the conversation.
        ends: marks that end an answer where they are tokens, whether the model's files say so or not.
        one_call_a_turn: whether a message of the template has place for one call, and for either
        reasoning or content before it.
    """

    template_marks: tuple[tuple[str, ...], ...]
    arguments_as_text: bool = False
    null_content: bool = False
    short_ids: bool = False
    numbered_ids: bool = False
    ends: tuple[str, ...] = ()
    one_call_a_turn: bool = False

    @property
    @abc.abstractmethod
    def marks(self) -> tuple[str, ...]:
        """All marks; any may be a special token of the model."""

    @property
    def known_only(self) -> bool:
        """Whether only calls of tools that the request has are calls."""
        return False

    @property
    def in_messages(self) -> bool:
        """Whether calls and content are messages, as in harmony."""
        return False

    @abc.abstractmethod
    def answer_grammar(self, writer: GrammarWriter, use: ToolUse, content: str | None) -> str:
        """Return the expression for an answer that calls tools as `use` says, with valid arguments.

        Args:
            writer: writer of the grammar.
            use: use of tools by the answer.
            content: the expression for an answer that calls none; None: any text.

        Raises:
            InvalidRequestError: the format cannot enforce what a tool's schema wants.
        """
