"""How many of an answer's tokens are reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.dialogue.harmony_messages import ANALYSIS, HarmonyMessages
from quire.dialogue.incoming_text import IncomingText, Reading
from quire.dialogue.reasoning.formats import ExpectedReasoning


class ReasoningTokens:
    """Counts the tokens of one answer that come before the mark which ends its reasoning.

    In harmony, these are the tokens of the bodies of analysis messages. Of a mark of several tokens, all but
    the last count.

    Args:
        reasoning: with which the answer may begin.
        token_text: returns the text of a token.
        token_id_of: returns the id of the token that was added to the vocabulary as a text, if any.
    """

    def __init__(
        self,
        reasoning: ExpectedReasoning,
        token_text: Callable[[int], str],
        token_id_of: Callable[[str], int | None],
    ) -> None:
        self.count = 0
        self._start = reasoning.format.start
        self._end = reasoning.format.end
        self._end_token_id = token_id_of(self._end)
        self._token_text = token_text
        self._has_begun = reasoning.is_open
        self._has_ended = False
        self._num_seen = 0
        self._messages = MessageReasoning(reasoning.is_open) if reasoning.format.in_messages else None
        self._text = ""  # up to the first mark; then the last of it, in which the other may begin

    def update(self, token_ids: Sequence[int]) -> int:
        """Return the number of reasoning tokens of an answer, to which tokens may have been added."""
        for index in range(self._num_seen, len(token_ids)):
            if self._has_ended:
                break
            self._see(token_ids[index])
        self._num_seen = len(token_ids)
        return self.count

    def _see(self, token_id: int) -> None:
        if self._messages is not None:
            self.count += self._messages.is_reasoning(self._token_text(token_id))
        elif not self._has_begun:
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


class MessageReasoning:
    """Tells which tokens of an answer in harmony are within the body of an analysis message.

    Args:
        in_reasoning: whether the answer begins in such a body.
    """

    def __init__(self, in_reasoning: bool) -> None:
        self._text = IncomingText()
        self._in_reasoning = in_reasoning
        self._reading = self._read(HarmonyMessages(self._text, in_analysis=in_reasoning))
        next(self._reading)

    def is_reasoning(self, text: str) -> bool:
        """Whether the next token, which has this text, is in reasoning and does not end it."""
        was_in_reasoning = self._in_reasoning
        self._text.add(text)
        next(self._reading)
        return was_in_reasoning and self._in_reasoning

    def _read(self, messages: HarmonyMessages) -> Reading[None]:
        while (header := (yield from messages.header())) is not None:
            self._in_reasoning = header.channel == ANALYSIS
            while (yield from messages.body()):
                pass
            self._in_reasoning = False
