"""Formats with calls between marks, after content or instead of it."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from quire.dialogue.calls.grammar_writing import GrammarWriter
from quire.dialogue.calls.reading import CallNotation
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.calls.tools import ToolUse


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What a model writes before its first call, between two calls, and after the last one."""

    head: str
    separator: str
    tail: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCallFormat(ToolCallFormat):
    """How a model's answer calls tools between marks.

    Args:
        notation: notation of the calls between the marks.
        openings: marks that begin calls; also one of the notation's, with which models begin without them.
        closings: marks that may end them.
        ignored: marks around all calls, which say nothing.
        start: first characters of answers that are calls without a mark; "" if there are none such. JSON and
            lists are answers, too, so only calls of tools that the request has count.
        layout: layout of the calls that a grammar enforces.
        token_layout: the layout instead of it for a model whose vocabulary has `token_layout_mark`.
        token_layout_mark: a mark of the notation.
    """

    notation: CallNotation
    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    start: str = ""
    layout: Layout
    token_layout: Layout | None = None
    token_layout_mark: str = ""

    @property
    @override
    def marks(self) -> tuple[str, ...]:
        notation = self.notation.marks
        return (*self.openings, *self.closings, *self.ignored, *notation)

    @property
    def beginnings(self) -> tuple[str, ...]:
        """Marks that begin calls, or all calls."""
        return (*self.openings, *self.ignored)

    @property
    @override
    def known_only(self) -> bool:
        return bool(self.start)

    @override
    def answer_grammar(self, writer: GrammarWriter, use: ToolUse, content: str | None) -> str:
        call = writer.one_of(self.notation.grammar(writer, tool) for tool in use.callable_tools)
        layout = self._layout_for(writer)
        head = writer.literal(layout.head)
        calls = _calls_grammar(writer, call, layout, several=use.several)
        if use.must_call:
            return f"{head} {calls}"
        if content is not None:
            return f"{head} {calls} | {content}"
        if self.start:
            return f'{writer.text_without(self.openings, self.start)} | {head} {calls} | ""'
        opening = self._opening_of(layout)
        rest = writer.literal(layout.head[len(opening) :])
        text = writer.text_without(self.openings)
        return f"{writer.text_up_to(opening, self.openings)} {rest} {calls} | {text}"

    def _layout_for(self, writer: GrammarWriter) -> Layout:
        """Return how calls are laid out by a model with the tokens that `writer` knows."""
        if self.token_layout is not None and writer.is_token(self.token_layout_mark):
            return self.token_layout
        return self.layout

    def _opening_of(self, layout: Layout) -> str:
        """Return the mark that a layout begins with."""
        marks = (*self.ignored, *self.openings)
        return next(mark for mark in marks if layout.head.startswith(mark))


def _calls_grammar(writer: GrammarWriter, call: str, layout: Layout, *, several: bool) -> str:
    """Return the expression for calls and what is after them."""
    separator, tail = layout.separator, layout.tail
    if not several:
        return f"{call} {writer.literal(tail)}"
    if tail.startswith(separator):  # a lexer cannot tell one from the other before both have come
        return f"({call} {writer.literal(separator)})+ {writer.literal(tail[len(separator) :])}"
    return f"{call} ({writer.literal(separator)} {call})* {writer.literal(tail)}"
