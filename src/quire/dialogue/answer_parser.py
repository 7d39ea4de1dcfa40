"""The parser of answers: which of a text is content, and which is calls of tools.

A call begins, for whoever reads the events, when its name is known. What turns out to be no call before that
is content, with the marks around it. A call that has begun and is malformed ends where it is malformed, with
the arguments that it has by then; what follows up to the mark that ends it belongs to no one. White space
beside a call is no content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.dialogue.call_reading import CallReader, NotACallError
from quire.dialogue.events import AnswerEvent, ArgumentsDelta, ContentDelta
from quire.dialogue.formats import ToolCallFormat
from quire.dialogue.incoming_text import SPACE, IncomingText, Reading


class AnswerParser:
    """Takes one answer's text as it comes.

    Args:
        call_format: in which the model calls tools.
        tools: JSON schema of each tool's arguments, by the tool's name.
    """

    def __init__(self, call_format: ToolCallFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._format = call_format
        self._events: list[AnswerEvent] = []
        self._text = IncomingText()
        self._space: list[str] = []  # after content, or before anything
        self._has_content = False
        self._follows_call = False
        self._calls = CallReader(self._text, tools, call_format.known_only, self._events.append)
        self._reading = self._read()

    @property
    def num_calls(self) -> int:
        """Calls so far, a last one that has begun included."""
        return self._calls.num_calls + self._calls.is_open

    def feed(self, text: str) -> list[AnswerEvent]:
        """Add a piece of the answer; return what is known since the last call."""
        self._text.add(text)
        return self._advance()

    def finish(self) -> list[AnswerEvent]:
        """Return what is left to say, the answer being complete."""
        self._text.end()
        return self._advance()

    def _advance(self) -> list[AnswerEvent]:
        next(self._reading, None)
        events = _merged(self._events)
        self._events.clear()
        return events

    def _read(self) -> Reading[None]:
        markers = (*self._format.openings, *self._format.ignored)
        yield from self._read_start()
        while True:
            self._text.mark()
            before, marker = yield from self._text.piece_before(markers)
            self._add_content(before)
            while marker in self._format.openings:
                marker = yield from self._read_calls(marker)
            if not before and not marker and not (yield from self._text.peek()):
                break
        if not self._follows_call and any(self._space):
            self._events.append(ContentDelta("".join(self._space)))

    def _read_start(self) -> Reading[None]:
        """Read calls that begin the answer without a mark."""
        if self._format.start:
            self._add_content((yield from self._text.whole_run(SPACE)))
            if (yield from self._text.peek()) == self._format.start:
                yield from self._read_calls("")

    def _read_calls(self, opening: str) -> Reading[str]:
        """Read calls after the mark that begins them; return the mark of the next ones, if it has come."""
        num_before = self._calls.num_calls
        self._text.mark()
        is_broken = False
        remainder = ""
        try:
            yield from self._format.notation.read(self._calls)
        except NotACallError:
            is_broken = self._calls.is_open
            if is_broken:
                self._calls.break_off()
            else:
                remainder = self._text.since_mark()
        if self._calls.num_calls == num_before:
            self._add_content(opening + remainder)
            return ""
        self._follows_call = True
        self._add_content(remainder)
        if is_broken:
            return (yield from self._skip_broken_call())
        if not remainder and self._format.closings:
            yield from self._text.skip_space()
            yield from self._text.match(*self._format.closings)
        return ""

    def _skip_broken_call(self) -> Reading[str]:
        """Drop what follows in a broken call; return the mark that begins the next ones, if there is one."""
        markers = (*self._format.closings, *self._format.openings)
        while True:
            before, marker = yield from self._text.piece_before(markers)
            if marker or not before:
                return marker if marker in self._format.openings else ""

    def _add_content(self, text: str) -> None:
        """Say more to the user; white space at the end only once something follows it."""
        if self._follows_call:
            text = text.lstrip()
        said = text.rstrip()
        if not said:
            self._space += [text] if text else []
            return
        before = "" if self._follows_call and not self._has_content else "".join(self._space)
        self._space[:] = [text[len(said) :]]
        self._has_content = True
        self._follows_call = False
        self._events.append(ContentDelta(before + said))


def _merged(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """Return events of which those that continue one another are one."""
    merged: list[AnswerEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            merged[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            merged[-1] = ArgumentsDelta(last.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
