"""Answers in harmony: thoughts, content and calls, each a message."""

from __future__ import annotations

from collections.abc import Callable

from quire.dialogue.calls.json_copying import copy_object
from quire.dialogue.calls.reading import CallReader, NotACallError
from quire.dialogue.events import AnswerEvent, ContentDelta, ReasoningDelta
from quire.dialogue.harmony_messages import ANALYSIS, FUNCTIONS, HarmonyMessages
from quire.dialogue.incoming_text import IncomingText, Reading
from quire.dialogue.reasoning.formats import ExpectedThought

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
            if name and self._reads_calls and (yield from self._read_call(name)):
                while (yield from self._messages.body()):
                    pass
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
