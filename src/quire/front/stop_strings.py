"""Stop strings in streamed text; text that may be the start of a stop string is withheld."""

from __future__ import annotations

from collections.abc import Sequence

from quire.front.detokenizer import TokenDecoder


class StoppableText:
    """The text of one completion; the end of it is withheld while it may be the start of a stop string.

    The result does not depend on how the text is split into tokens: the stop string that is complete first
    counts, and of several that end at the same character the longest.

    Args:
        decoder: of the completion's tokens.
        stop: strings that end the text.
        include_stop: keep the stop string at the end of the text.
    """

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str], *, include_stop: bool) -> None:
        self.text = ""
        self._withheld = ""
        self._decoder = decoder
        self._stop = stop
        self._include_stop = include_stop

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed, if any, after which the text is final.

        With `may_stop` False, stop strings that end in this token's text are ignored.
        """
        return self._add(self._decoder.push(token_id), may_stop)

    def finish(self, *, may_stop: bool) -> str | None:
        """Release the withheld text; return the stop string found in it, if any."""
        stopped_by = self._add(self._decoder.flush(), may_stop)
        self.text += self._withheld
        self._withheld = ""
        return stopped_by

    def _add(self, added: str, may_stop: bool) -> str | None:
        if not self._stop:
            self.text += added
            return None
        if not added:
            return None
        pending = self._withheld + added
        found = self._find(pending, len(self._withheld)) if may_stop else None
        if found is not None:
            start, word = found
            self.text += pending[: start + len(word)] if self._include_stop else pending[:start]
            self._withheld = ""
            return word
        keep = self._length_to_withhold(pending)
        self.text += pending[: len(pending) - keep]
        self._withheld = pending[len(pending) - keep :]
        return None

    def _find(self, pending: str, old_length: int) -> tuple[int, str] | None:
        """Return (start, stop string) of the match that ends first, beyond `old_length`, if any.

        A match can only begin within the withheld text or after it, so released text need not be searched.
        """
        best: tuple[int, int, str] | None = None
        for word in self._stop:
            start = pending.find(word, max(0, old_length - len(word) + 1))
            if start >= 0 and (best is None or (start + len(word), start) < best[:2]):
                best = (start + len(word), start, word)
        return best and (best[1], best[2])

    def _length_to_withhold(self, pending: str) -> int:
        """Return the length of the longest suffix of `pending` that is a proper prefix of a stop string."""
        longest = 0
        for word in self._stop:
            for length in range(min(len(word) - 1, len(pending)), longest, -1):
                if pending.endswith(word[:length]):
                    longest = length
                    break
        return longest
