"""How many of an answer's tokens are thought."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.dialogue.thoughts import ExpectedThought


class ThoughtTokens:
    """Counts the tokens of one answer that come before the mark which ends its thought.

    Of a mark of several tokens, all but the last one count.

    Args:
        thought: with which the answer may begin.
        token_text: returns the text of a token.
        token_id_of: returns the id of the token that was added to the vocabulary as a text, if any.
    """

    def __init__(
        self,
        thought: ExpectedThought,
        token_text: Callable[[int], str],
        token_id_of: Callable[[str], int | None],
    ) -> None:
        self.count = 0
        self._start = thought.format.start
        self._end = thought.format.end
        self._end_token_id = token_id_of(self._end)
        self._token_text = token_text
        self._has_begun = thought.is_open
        self._has_ended = False
        self._num_seen = 0
        self._text = ""  # up to the first mark; then the last of it, in which the other may begin

    def update(self, token_ids: Sequence[int]) -> int:
        """Return the number of thought tokens of an answer, to which tokens may have been added."""
        for index in range(self._num_seen, len(token_ids)):
            if self._has_ended:
                break
            self._see(token_ids[index])
        self._num_seen = len(token_ids)
        return self.count

    def _see(self, token_id: int) -> None:
        if not self._has_begun:
            self._see_before(token_id)
        elif self._is_end(token_id):
            self._has_ended = True
        else:
            self.count += 1

    def _see_before(self, token_id: int) -> None:
        self._text = (self._text + self._token_text(token_id)).lstrip()
        self._has_begun = self._text.startswith(self._start)
        self._has_ended = not self._has_begun and not self._start.startswith(self._text)

    def _is_end(self, token_id: int) -> bool:
        if self._end_token_id is not None:
            return token_id == self._end_token_id
        self._text = self._text[-len(self._end) :] + self._token_text(token_id)
        return self._end in self._text
