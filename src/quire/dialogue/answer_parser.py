"""The parser of answers: which of a text is thought, which is content, and which is calls of tools.

A call begins, for whoever reads the events, when its name is known, and is complete when all of it has come
and its arguments are an object in JSON. What turns out to be malformed before that is content, with the marks
around it, even if its beginning has been told as a call. Where an answer is cut off, the beginning of a call
is neither call nor content: no one knows what it would be. White space beside a call or a thought is neither
content nor thought.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from quire.dialogue.calls.marked_call_format import MarkedCallFormat
from quire.dialogue.calls.reading import CallReader
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.events import AnswerEvent, ArgumentsDelta, ContentDelta, ReasoningDelta
from quire.dialogue.harmony_answer import HarmonyAnswer
from quire.dialogue.incoming_text import IncomingText
from quire.dialogue.marked_answer import MarkedAnswer
from quire.dialogue.reasoning.formats import ExpectedThought


class AnswerParser:
    """Takes one answer's text as it comes.

    Args:
        call_format: in which the model calls tools; None: it has none to call.
        tools: JSON schema of each tool's arguments, by the tool's name.
        thought: with which the answer may begin; None: with none.
    """

    def __init__(
        self,
        call_format: ToolCallFormat | None,
        tools: Mapping[str, Mapping[str, Any]],
        thought: ExpectedThought | None = None,
    ) -> None:
        self._events: list[AnswerEvent] = []
        self._text = IncomingText()
        known_only = call_format is not None and call_format.known_only
        self._calls = CallReader(self._text, tools, known_only, self._events)
        self._reading = self._answer(call_format, thought).read()

    def _answer(
        self, call_format: ToolCallFormat | None, thought: ExpectedThought | None
    ) -> MarkedAnswer | HarmonyAnswer:
        """Return what reads answers in these formats."""
        in_harmony = call_format is not None and call_format.in_messages
        if in_harmony or (thought is not None and thought.format.in_messages):
            return HarmonyAnswer(
                self._text, self._calls, self._events.append, thought, reads_calls=in_harmony
            )
        marked = call_format if isinstance(call_format, MarkedCallFormat) else None
        return MarkedAnswer(self._text, self._calls, self._events.append, marked, thought)

    @property
    def has_calls(self) -> bool:
        """Whether there have been calls so far, and all of them complete."""
        return self._calls.num_calls > 0 and self._calls.are_complete

    def feed(self, text: str) -> list[AnswerEvent]:
        """Add a piece of the answer; return what is known since the last call."""
        self._text.add(text)
        return self._advance()

    def finish(self, *, is_cut_off: bool = False) -> list[AnswerEvent]:
        """Return what is left to say, no more text coming.

        Args:
            is_cut_off: whether something else than the model has ended the answer.
        """
        self._text.end(is_cut_off=is_cut_off)
        return self._advance()

    def _advance(self) -> list[AnswerEvent]:
        next(self._reading, None)
        events = _merged(self._events)
        self._events.clear()
        return events


def _merged(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """Return events of which those that continue one another are one."""
    merged: list[AnswerEvent] = []
    for _, group in itertools.groupby(events, key=type):
        first, *more = group
        if isinstance(first, ContentDelta | ReasoningDelta | ArgumentsDelta):
            text = "".join(one.text for one in (first, *more) if isinstance(one, type(first)))
            merged.append(dataclasses.replace(first, text=text))
        else:
            merged += (first, *more)
    return merged
