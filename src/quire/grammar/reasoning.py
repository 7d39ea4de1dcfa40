"""Reasoning before structured output: free up to its end, which a budget may force.

The budget counts tokens. When it is spent, one token after the other is the only one allowed: a forced end
needs nothing else from scheduler and sampler than a grammar does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from quire.grammar.interface import Grammar
from quire.step import IntArray
from quire.structured_outputs import ReasoningParams

_NUM_BYTES = 1_000  # of reasoning without a structure after it
_ALL = -1  # a word of a bitmask that allows all of its tokens


class Spelling:
    """The bytes of a model's tokens.

    Args:
        decode: returns those of one token.
        num_tokens: number of tokens of the tokenizer.
        eos_token_ids: end a sequence.
    """

    def __init__(
        self, decode: Callable[[int], bytes], num_tokens: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._decode = decode
        self._num_tokens = num_tokens

    def text(self, token_id: int) -> bytes:
        """Return the bytes of a token; none of an id that the tokenizer does not have."""
        return self._decode(token_id) if token_id < self._num_tokens else b""

    @functools.cached_property
    def all_texts(self) -> list[bytes]:
        """The bytes of each token."""
        return [self._decode(token_id) for token_id in range(self._num_tokens)]


class ReasoningEnd:
    """The mark that ends reasoning: one token, or a text that tokens may share with the text around it.

    Args:
        reasoning: whose end it is.
        spelling: spelling of the tokens.
    """

    def __init__(self, reasoning: ReasoningParams, spelling: Spelling) -> None:
        self._token_id = reasoning.end_token_id
        self._text = reasoning.end.encode()
        self._spelling = spelling
        self._overlong: dict[int, list[int]] = {}

    def after(self, matched: int, token_id: int) -> int | None:
        """Return how many bytes of the mark have come after a token; None: all of it.

        Args:
            matched: bytes that had come before.
            token_id: id of the token.
        """
        if self._token_id is not None:
            return None if token_id == self._token_id else 0
        text = self._text[:matched] + self._spelling.text(token_id)
        if self._text in text:
            return None
        longest = min(len(text), len(self._text) - 1)
        return next(n for n in range(longest, -1, -1) if text.endswith(self._text[:n]))

    def overlong_tokens(self, matched: int) -> list[int]:
        """Return the tokens that have more than the rest of the mark, after `matched` bytes of it."""
        if self._token_id is not None:
            return []
        if matched not in self._overlong:
            texts = enumerate(self._spelling.all_texts)
            self._overlong[matched] = [one for one, text in texts if self._has_more(matched, text)]
        return self._overlong[matched]

    def is_overlong(self, matched: int, token_id: int) -> bool:
        """Whether a token has more than the rest of the mark, after `matched` bytes of it."""
        return self._token_id is None and self._has_more(matched, self._spelling.text(token_id))

    def _has_more(self, matched: int, text: bytes) -> bool:
        if self._text[-1] not in text:
            return False
        together = self._text[:matched] + text
        at = together.find(self._text)
        return 0 <= at < len(together) - len(self._text)


class ReasoningGrammar(Grammar):
    """Reasoning, and then what a structure allows; anything if there is none.

    With a structure, tokens that end the sequence are not allowed in reasoning, nor tokens with its end and
    more text, which the structure would miss. Reasoning that is not open may be left out; it begins with just
    the tokens of `start` then, since whatever else comes is the structure's. Where tokens must lead from the
    reasoning to what comes after it, the reasoning must be there, and has such an end without a structure,
    too.

    Args:
        reasoning: that may come first.
        structure: in its initial state; None: none.
        end: end of the reasoning, shared by the grammars of equal ones.
        spelling: spelling of the model's tokens.
    """

    def __init__(
        self, reasoning: ReasoningParams, structure: Grammar | None, end: ReasoningEnd, spelling: Spelling
    ) -> None:
        self._reasoning = reasoning
        self._structure = structure
        self._end = end
        self._spelling = spelling
        self._head: list[int] = []  # tokens of the mark that begins the reasoning
        self._has_begun = reasoning.is_open
        self._matched: list[int] = []  # bytes of the mark that ends it, after each token of the reasoning
        self._ended_at: int | None = None  # tokens of the reasoning when its end had come unforced
        self._is_over = False
        self._num_after = 0  # tokens accepted since

    @property
    def num_bytes(self) -> int:
        """Estimated size in its initial state."""
        return _NUM_BYTES + (0 if self._structure is None else self._structure.num_bytes)

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over these tokens; False, and nothing changes, if they are not allowed."""
        count = self._advance(token_ids)
        if count == len(token_ids):
            return True
        self.rollback(count)
        return False

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""
        after = min(num_tokens, self._num_after)
        if after and self._structure is not None:
            self._structure.rollback(after)
        self._num_after -= after
        before = num_tokens - after
        if not self._has_begun:
            self._is_over = self._num_after > 0
        elif before:
            self._is_over = False
        within = min(before, len(self._matched))
        del self._matched[len(self._matched) - within :]
        if self._ended_at is not None and len(self._matched) < self._ended_at:
            self._ended_at = None
        if before > within:
            del self._head[len(self._head) - (before - within) :]
            self._has_begun = False

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens could be accepted, one after the other. Changes nothing."""
        count = self._advance(token_ids)
        self.rollback(count)
        return count

    def fill_bitmask(self, row: IntArray) -> None:
        """Write which tokens may come next: [ceil(vocabulary / 32)]."""
        if not self._is_over and (forced := self._forced_token) is not None:
            row[:] = 0
            _set(row, forced)
        elif self._has_begun and not self._is_over and self._has_strict_end:
            row[:] = _ALL
            overlong = self._end.overlong_tokens(self._num_matched)
            for token_id in (*self._spelling.eos_token_ids, *overlong):
                row.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        elif self._structure is None:
            row[:] = _ALL
        else:
            self._structure.fill_bitmask(row)
            if not self._is_over:
                _set(row, self._reasoning.start_token_ids[0])

    def copy(self) -> ReasoningGrammar:
        """Return an independent grammar in the same state."""
        structure = None if self._structure is None else self._structure.copy()
        other = ReasoningGrammar(self._reasoning, structure, self._end, self._spelling)
        other._head, other._matched = self._head.copy(), self._matched.copy()
        other._has_begun, other._is_over, other._num_after = self._has_begun, self._is_over, self._num_after
        other._ended_at = self._ended_at
        return other

    @property
    def _num_matched(self) -> int:
        """Bytes of the mark that ends the reasoning which have come."""
        return self._matched[-1] if self._matched else 0

    @property
    def _forced_token(self) -> int | None:
        """The only token that may come before the reasoning is over, if there is only one."""
        if not self._has_begun:
            is_forced = self._reasoning.bridge_token_ids or (self._structure is not None and self._head)
            return self._reasoning.start_token_ids[len(self._head)] if is_forced else None
        if self._ended_at is not None:
            return self._reasoning.bridge_token_ids[len(self._matched) - self._ended_at]
        budget = self._reasoning.budget
        if budget is None or len(self._matched) < budget:
            return None
        return self._reasoning.closing_token_ids[len(self._matched) - budget]

    def _advance(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the first that is not allowed; return how many."""
        for count, token_id in enumerate(token_ids):
            if self._is_over:
                accepted = self._accept_after(token_id)
            elif self._has_begun:
                accepted = self._accept_reasoning(token_id)
            else:
                accepted = self._accept_head(token_id)
            if not accepted:
                return count
        return len(token_ids)

    def _accept_after(self, token_id: int) -> bool:
        if self._structure is not None and not self._structure.accept([token_id]):
            return False
        self._is_over = True
        self._num_after += 1
        return True

    def _accept_head(self, token_id: int) -> bool:
        if not self._has_strict_end:
            return self._accept_free_head(token_id)
        start = self._reasoning.start_token_ids
        if token_id == start[len(self._head)]:
            self._head.append(token_id)
            self._has_begun = len(self._head) == len(start)
            return True
        may_be_left_out = not self._head and not self._reasoning.bridge_token_ids
        return may_be_left_out and self._accept_after(token_id)

    def _accept_free_head(self, token_id: int) -> bool:
        """Accept any token; one token may have white space before the mark, and anything after it."""
        start = self._reasoning.start.encode()
        text = b"".join(map(self._spelling.text, (*self._head, token_id))).lstrip()
        self._has_begun = text.startswith(start)
        if not self._has_begun and not start.startswith(text):
            return self._accept_after(token_id)
        self._head.append(token_id)
        return True

    def _accept_reasoning(self, token_id: int) -> bool:
        forced = self._forced_token
        if forced is not None:
            matched = 0
            accepted = token_id == forced
            is_last = len(self._matched) + 1 == self._closed_length
            ends = False
        else:
            after = self._end.after(self._num_matched, token_id)
            matched = 0 if after is None else after
            accepted = not self._has_strict_end or not self._hides_end(token_id)
            ends = after is None
            is_last = ends and not self._reasoning.bridge_token_ids
        if accepted:
            self._matched.append(matched)
            self._is_over = is_last
            if ends:
                self._ended_at = len(self._matched)
        return accepted

    @property
    def _closed_length(self) -> int:
        """Tokens of reasoning whose end is being forced, and of what leads from it to the rest."""
        if self._ended_at is not None:
            return self._ended_at + len(self._reasoning.bridge_token_ids)
        return (self._reasoning.budget or 0) + len(self._reasoning.closing_token_ids)

    @property
    def _has_strict_end(self) -> bool:
        """Whether the reasoning must have an end after which something else can begin."""
        return self._structure is not None or bool(self._reasoning.bridge_token_ids)

    def _hides_end(self, token_id: int) -> bool:
        """Whether a structure could not begin after reasoning that ends with this token."""
        return token_id in self._spelling.eos_token_ids or self._end.is_overlong(self._num_matched, token_id)


def _set(row: IntArray, token_id: int) -> None:
    row.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
