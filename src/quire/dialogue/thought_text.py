"""Where in an answer's text the thought ends that it may begin with."""

from __future__ import annotations

from quire.dialogue.incoming_text import SPACE, IncomingText, Reading
from quire.dialogue.thoughts import ExpectedThought


class ThoughtText:
    """Tells the thought of one answer, as the text comes, from what follows it.

    To the thought belong its marks and the white space after it. While the answer may still turn out to begin
    with no thought, its text is neither.

    Args:
        thought: with which the answer may begin.

    Attributes:
        is_over: whether all further text follows the thought.
    """

    def __init__(self, thought: ExpectedThought) -> None:
        self.is_over = False
        self._format = thought.format
        self._is_open = thought.is_open
        self._text = IncomingText()
        self._thought: list[str] = []  # since the last call
        self._rest: list[str] = []
        self._reading = self._read()

    def feed(self, added: str) -> tuple[str, str]:
        """Add a piece of the answer; return what has come of the thought, and of the rest."""
        self._text.add(added)
        return self._advance()

    def finish(self) -> tuple[str, str]:
        """Return what is left of both, the answer being complete."""
        self._text.end()
        return self._advance()

    def _advance(self) -> tuple[str, str]:
        next(self._reading, None)
        known = "".join(self._thought), "".join(self._rest)
        self._thought.clear()
        self._rest.clear()
        return known

    def _read(self) -> Reading[None]:
        if self._is_open or (yield from self._begins()):
            yield from self._read_thought()
        self.is_over = True
        while piece := (yield from self._text.piece()):
            self._text.mark()
            self._rest.append(piece)

    def _begins(self) -> Reading[bool]:
        space = yield from self._text.whole_run(SPACE)
        start = yield from self._text.match(self._format.start)
        (self._thought if start else self._rest).append(space + start)
        return bool(start)

    def _read_thought(self) -> Reading[None]:
        marker = ""
        while not marker:
            self._text.mark()
            piece, marker = yield from self._text.piece_before((self._format.end,))
            if not piece and not marker:
                return
            self._thought.append(piece + marker)
        while (yield from self._text.peek()) and (space := self._text.run(SPACE)):
            self._text.mark()
            self._thought.append(space)
