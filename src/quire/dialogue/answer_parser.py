"""The parser of answers: splits text into reasoning, content and tool calls.

A call's event is emitted when its name is known, and is complete when all of it has come and its arguments
are a JSON object. A call that turns out to be malformed before that is content, with the marks around it,
even if its beginning was emitted as a call. Where an answer is cut off, the beginning of a call is neither
call nor content: it could become either. White space beside a call or reasoning is neither content nor
reasoning.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from quire.dialogue.calls.json_copying import copy_object
from quire.dialogue.calls.marked_call_format import MarkedCallFormat
from quire.dialogue.calls.reading import CallReader, NotACallError
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.events import AnswerEvent, ArgumentsDelta, ContentDelta, ReasoningDelta
from quire.dialogue.harmony_messages import ANALYSIS, FUNCTIONS, HarmonyMessages
from quire.dialogue.incoming_text import IncomingText, Reading
from quire.dialogue.marked_answer import MarkedAnswer
from quire.dialogue.reasoning.formats import ExpectedReasoning


class AnswerParser:
    """Takes one answer's text as it comes.

    Args:
        call_format: in which the model calls tools; None: it has none to call.
        tools: JSON schema of each tool's arguments, by the tool's name.
        reasoning: with which the answer may begin; None: with none.
        content_marks: around content, and no part of it, see `ReasoningFormat`.
    """

    def __init__(
        self,
        call_format: ToolCallFormat | None,
        tools: Mapping[str, Mapping[str, Any]],
        reasoning: ExpectedReasoning | None = None,
        content_marks: tuple[str, ...] = (),
    ) -> None:
        self._events: list[AnswerEvent] = []
        self._text = IncomingText()
        known_only = call_format is not None and call_format.known_only
        self._calls = CallReader(self._text, tools, known_only, self._events)
        self._reading = self._answer(call_format, reasoning, content_marks).read()

    def _answer(
        self,
        call_format: ToolCallFormat | None,
        reasoning: ExpectedReasoning | None,
        content_marks: tuple[str, ...],
    ) -> MarkedAnswer | HarmonyAnswer:
        """Return the reader of answers in these formats."""
        in_harmony = call_format is not None and call_format.in_messages
        if in_harmony or (reasoning is not None and reasoning.format.in_messages):
            return HarmonyAnswer(
                self._text, self._calls, self._events.append, reasoning, reads_calls=in_harmony
            )
        marked = call_format if isinstance(call_format, MarkedCallFormat) else None
        return MarkedAnswer(
            self._text, self._calls, self._events.append, marked, reasoning, content_marks=content_marks
        )

    @property
    def has_calls(self) -> bool:
        """Whether there are calls so far, all of them complete."""
        return self._calls.num_calls > 0 and self._calls.are_complete

    def feed(self, text: str) -> list[AnswerEvent]:
        """Add a piece of the answer; return the new events."""
        self._text.add(text)
        return self._advance()

    def finish(self, *, is_cut_off: bool = False) -> list[AnswerEvent]:
        """Return the last events; no more text comes.

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
    """Return the events with consecutive ones merged."""
    merged: list[AnswerEvent] = []
    for _, group in itertools.groupby(events, key=type):
        first, *more = group
        if isinstance(first, ContentDelta | ReasoningDelta | ArgumentsDelta):
            text = "".join(one.text for one in (first, *more) if isinstance(one, type(first)))
            merged.append(dataclasses.replace(first, text=text))
        else:
            merged += (first, *more)
    return merged


_PARAGRAPH = "\n\n"


class HarmonyAnswer:
    """Reads an answer. All analysis messages are joined as paragraphs, and so are all final ones.

    Args:
        text: text of the answer.
        calls: reads each call.
        emit: takes each event.
        reads_calls: whether messages to a recipient are calls; otherwise they are like others.
        reasoning: with which the answer may begin; None: analysis is content.
    """

    def __init__(
        self,
        text: IncomingText,
        calls: CallReader,
        emit: Callable[[AnswerEvent], None],
        reasoning: ExpectedReasoning | None,
        *,
        reads_calls: bool,
    ) -> None:
        self._text = text
        self._calls = calls
        self._emit = emit
        self._reads_calls = reads_calls
        self._tells_reasoning = reasoning is not None
        self._messages = HarmonyMessages(text, in_analysis=reasoning is not None and reasoning.is_open)
        self._said: set[type[ContentDelta | ReasoningDelta]] = set()

    def read(self) -> Reading[None]:
        """Read the whole answer."""
        while (header := (yield from self._messages.header())) is not None:
            name = header.recipient.removeprefix(FUNCTIONS)
            if name and self._reads_calls and (yield from self._read_call(name)):
                while (yield from self._messages.body()):
                    pass
            elif header.channel == ANALYSIS and self._tells_reasoning:
                yield from self._say(ReasoningDelta)
            else:
                yield from self._say(ContentDelta)

    def _say(self, delta: type[ContentDelta | ReasoningDelta]) -> Reading[None]:
        before = _PARAGRAPH if delta in self._said else ""
        while piece := (yield from self._messages.body()):
            self._emit(delta(before + piece))
            self._said.add(delta)
            before = ""

    def _read_call(self, name: str) -> Reading[bool]:
        """Read a call; return whether there is one, if maybe cut off. Otherwise its text is unread."""
        self._text.mark()
        yield from self._text.skip_space()
        if (yield from self._text.peek()) != "{":
            space = self._text.since_mark()
            piece = yield from self._messages.body()
            if piece or not self._messages.is_closed:
                self._messages.unread(space + piece if piece else "")
                return False
            self._calls.begin(name)
            self._calls.end()
            return True
        self._calls.begin(name)
        try:
            yield from copy_object(self._text, self._calls.arguments)
        except NotACallError:
            if self._text.is_cut_off and self._text.has_run_out:
                self._calls.cut_off()
                return True
            self._messages.unread(self._text.since_mark())
            self._calls.take_back()
            return False
        self._calls.end()
        return True
