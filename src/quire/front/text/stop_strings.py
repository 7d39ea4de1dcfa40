"""Stop strings in streamed text; text that may be the start of a stop string is withheld."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from quire.dialogue.reasoning.text import ReasoningText
from quire.front.text.detokenizer import TokenDecoder


class StopString:
    """A string that ends the text, matched character by character in time linear in the text.

    After Knuth, Morris and Pratt (1977). The table of borders only grows with the longest partial match, so
    that a long string costs nothing up front.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0]  # by position: length of the longest proper prefix that also ends there

    def advance(self, matched: int, character: str) -> int:
        """Return how many characters of the string are matched after `character` is added to the text.

        Args:
            matched: how many were matched before.
            character: the next one.
        """
        text = self.text
        if matched == len(text):
            matched = self.border(matched)
        while matched and text[matched] != character:
            matched = self.border(matched)
        return matched + (text[matched] == character)

    def border(self, length: int) -> int:
        """Return the length of the longest proper prefix that is also a suffix of the first `length`."""
        text, borders = self.text, self._borders
        while len(borders) < length:
            character, shorter = text[len(borders)], borders[-1]
            while shorter and text[shorter] != character:
                shorter = borders[shorter - 1]
            borders.append(shorter + (text[shorter] == character))
        return borders[length - 1]


class StopStrings:
    """The stop strings of a request, shared by its completions."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.strings = tuple(map(StopString, texts))
        self.first_characters = frozenset(map(operator.itemgetter(0), texts))


class StoppableText:
    """The text of one completion, whose end is withheld while it may start a stop string.

    The result does not depend on how the text is split into tokens: the stop string completed first counts,
    and the longest of several that end at the same character. Those that begin in reasoning do not count.

    Args:
        decoder: decoder of the completion's tokens.
        stop: strings that end the text.
        include_stop: keep the stop string at the end of the text.
        reasoning: reads the reasoning that the text may begin with; None: there is none.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        stop: StopStrings,
        *,
        include_stop: bool,
        reasoning: ReasoningText | None = None,
    ) -> None:
        self.text = ""
        self._withheld = ""
        self._decoder = decoder
        self._stop = stop
        self._matched = [0] * len(stop.strings)  # characters of each that the text ends with
        self._include_stop = include_stop
        self._reasoning = reasoning

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed, if any, after which the text is final.

        With `may_stop` False, stop strings that end in this token's text are ignored.
        """
        added = self._decoder.push(token_id)
        if self._reasoning is None:
            return self._add(added, may_stop)
        return self._add_parts(self._reasoning, self._reasoning.feed(added), may_stop)

    def finish(self, *, may_stop: bool) -> str | None:
        """Release the withheld text; return the stop string found in it, if any."""
        added = self._decoder.flush()
        if self._reasoning is None:
            stopped_by = self._add(added, may_stop)
        else:
            parts = self._reasoning.feed(added) + self._reasoning.finish()
            stopped_by = self._add_parts(self._reasoning, parts, may_stop)
        self.text += self._withheld
        self._withheld = ""
        return stopped_by

    def _add_parts(self, reading: ReasoningText, parts: list[tuple[str, bool]], may_stop: bool) -> str | None:
        """Add parts of the text, as pairs (text, whether it is reasoning)."""
        if reading.is_over:
            self._reasoning = None
        for text, is_reasoning in parts:
            if is_reasoning:
                self._add_unmatched(text)
            elif (word := self._add(text, may_stop)) is not None:
                return word
        return None

    def _add_unmatched(self, text: str) -> None:
        """Add text without matching stop strings, and reset partial matches."""
        self.text += self._withheld + text
        self._withheld = ""
        self._matched = [0] * len(self._matched)

    def _add(self, added: str, may_stop: bool) -> str | None:
        if not self._withheld and self._stop.first_characters.isdisjoint(added):
            self.text += added
            return None
        pending = self._withheld + added
        for end, character in enumerate(added, start=len(self._withheld) + 1):
            word = self._advance(character)
            if word is not None and may_stop:
                self.text += pending[: end if self._include_stop else end - len(word)]
                self._withheld = ""
                return word
        keep = self._length_to_withhold()
        self.text += pending[: len(pending) - keep]
        self._withheld = pending[len(pending) - keep :]
        return None

    def _advance(self, character: str) -> str | None:
        """Match one more character; return the longest stop string that it completes, if any."""
        completed = None
        for index, string in enumerate(self._stop.strings):
            matched = self._matched[index] = string.advance(self._matched[index], character)
            if matched == len(string.text) and (completed is None or matched > len(completed)):
                completed = string.text
        return completed

    def _length_to_withhold(self) -> int:
        """Return the length of the longest end of the text that is a proper prefix of a stop string."""
        return max(
            matched if matched < len(string.text) else string.border(matched)
            for matched, string in zip(self._matched, self._stop.strings, strict=True)
        )
