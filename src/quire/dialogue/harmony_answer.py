"""Answers in harmony: thoughts, content and calls, each a message."""

from __future__ import annotations

from collections.abc import Callable

from quire.dialogue.call_reading import CallReader, NotACallError
from quire.dialogue.events import AnswerEvent, ContentDelta, ReasoningDelta
from quire.dialogue.harmony_messages import ANALYSIS, HarmonyMessages
from quire.dialogue.incoming_text import IncomingText, Reading
from quire.dialogue.json_copying import copy_value
from quire.dialogue.thoughts import ExpectedThought

FUNCTIONS = "functions."
"""The namespace of a request's tools; built-in ones, which a template may offer, have others."""

_PARAGRAPH = "\n\n"


class HarmonyAnswer:
    """Reads an answer. Its thoughts are paragraphs of one thought, and its content of one content.

    Args:
        text: of the answer.
        calls: reads each call.
        emit: takes each event.
        reads_calls: whether messages to a recipient are calls; otherwise they are like others.
        thought: with which the answer may begin; None: what it thinks is content.
    """

    def __init__(
        self,
        text: IncomingText,
        calls: CallReader,
        emit: Callable[[AnswerEvent], None],
        thought: ExpectedThought | None,
        *,
        reads_calls: bool,
    ) -> None:
        self._text = text
        self._calls = calls
        self._emit = emit
        self._reads_calls = reads_calls
        self._tells_thoughts = thought is not None
        self._messages = HarmonyMessages(text, in_analysis=thought is not None and thought.is_open)
        self._said: set[type[ContentDelta | ReasoningDelta]] = set()

    def read(self) -> Reading[None]:
        """Read the whole answer."""
        while (header := (yield from self._messages.header())) is not None:
            name = header.recipient.removeprefix(FUNCTIONS)
            if name and self._reads_calls:
                yield from self._read_call(name)
            elif header.channel == ANALYSIS and self._tells_thoughts:
                yield from self._say(ReasoningDelta)
            else:
                yield from self._say(ContentDelta)

    def _say(self, delta: type[ContentDelta | ReasoningDelta]) -> Reading[None]:
        before = _PARAGRAPH if delta in self._said else ""
        while piece := (yield from self._messages.body()):
            self._emit(delta(before + piece))
            self._said.add(delta)
            before = ""

    def _read_call(self, name: str) -> Reading[None]:
        self._calls.begin(name)
        try:
            yield from self._read_arguments()
        except NotACallError:
            self._calls.break_off()
        while (yield from self._messages.body()):
            pass

    def _read_arguments(self) -> Reading[None]:
        """Pass on an object as JSON, or else the text that a tool other than a function takes."""
        yield from self._text.skip_space()
        if (yield from self._text.peek()) == "{":
            yield from copy_value(self._text, self._calls.arguments)
        else:
            has_text = False
            while piece := (yield from self._messages.body()):
                self._calls.arguments(piece)
                has_text = True
            if not has_text and not self._messages.is_closed:
                raise NotACallError
        self._calls.end()
