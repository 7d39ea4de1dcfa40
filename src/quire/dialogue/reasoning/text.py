"""Which of an answer's text is reasoning."""

from __future__ import annotations

from quire.dialogue.harmony_messages import ANALYSIS, HarmonyMessages
from quire.dialogue.incoming_text import SPACE, IncomingText, Reading
from quire.dialogue.reasoning.formats import ExpectedReasoning


class ReasoningText:
    """Tells the reasoning of one answer, as the text comes, from what follows it.

    To the reasoning belong its marks and the white space after it; in harmony, the headers of all messages.
    While the answer may still turn out to begin with no reasoning, its text is neither.

    Args:
        reasoning: with which the answer may begin.

    Attributes:
        is_over: whether all further text follows the reasoning.
    """

    def __init__(self, reasoning: ExpectedReasoning) -> None:
        self.is_over = False
        self._format = reasoning.format
        self._is_open = reasoning.is_open
        self._text = IncomingText()
        self._parts: list[tuple[str, bool]] = []  # since the last call
        self._reading = self._read_messages() if self._format.in_messages else self._read()

    def feed(self, added: str) -> list[tuple[str, bool]]:
        """Add a piece of the answer; return the parts that have come, each with whether it is reasoning."""
        self._text.add(added)
        return self._advance()

    def finish(self) -> list[tuple[str, bool]]:
        """Return the parts that are left, the answer being complete."""
        self._text.end()
        return self._advance()

    def _advance(self) -> list[tuple[str, bool]]:
        next(self._reading, None)
        known, self._parts = self._parts, []
        return known

    def _read(self) -> Reading[None]:
        if self._is_open or (yield from self._begins()):
            yield from self._read_reasoning()
        self.is_over = True
        while piece := (yield from self._text.piece()):
            self._text.mark()
            self._parts.append((piece, False))

    def _read_messages(self) -> Reading[None]:
        messages = HarmonyMessages(self._text, in_analysis=self._is_open)
        while (header := (yield from messages.header())) is not None:
            self._parts.append((messages.skipped, True))
            while piece := (yield from messages.body()):
                self._parts.append((piece, header.channel == ANALYSIS))
        self._parts.append((messages.skipped, True))

    def _begins(self) -> Reading[bool]:
        space = yield from self._text.whole_run(SPACE)
        start = yield from self._text.match(self._format.start)
        self._parts.append((space + start, bool(start)))
        return bool(start)

    def _read_reasoning(self) -> Reading[None]:
        marker = ""
        while not marker:
            self._text.mark()
            piece, marker = yield from self._text.piece_before((self._format.end,))
            if not piece and not marker:
                return
            self._parts.append((piece + marker, True))
        while (yield from self._text.peek()) and (space := self._text.run(SPACE)):
            self._text.mark()
            self._parts.append((space, True))
