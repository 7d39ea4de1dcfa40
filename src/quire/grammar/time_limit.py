"""A limit on the computing time of a grammar: one that is slow for every token ends its own request only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.grammar.interface import Grammar
from quire.step import IntArray

BURST = 50  # tokens whose time one token may take, if those before it were quick


class TimeLimitedGrammar(Grammar):
    """A grammar with a limit on the computing time per mask and per accepted token.

    The limit holds on average: a few slow tokens among quick ones are accepted (a leaky bucket). `accept`,
    `num_valid` and `fill_bitmask` raise InvalidRequestError once it is exceeded.

    Args:
        grammar: is followed.
        seconds_per_token: the limit.
        clock: seconds of computing time of the calling thread.
    """

    def __init__(
        self, grammar: Grammar, seconds_per_token: float, *, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._grammar = grammar
        self._seconds_per_token = seconds_per_token
        self._clock = clock
        self._excess = 0.0  # seconds beyond the limit

    @property
    @override
    def num_bytes(self) -> int:
        return self._grammar.num_bytes

    @override
    def accept(self, token_ids: Sequence[int]) -> bool:
        start = self._clock()
        accepted = self._grammar.accept(token_ids)
        self._charge(start, len(token_ids))
        return accepted

    @override
    def rollback(self, num_tokens: int) -> None:
        self._grammar.rollback(num_tokens)

    @override
    def num_valid(self, token_ids: Sequence[int]) -> int:
        start = self._clock()
        count = self._grammar.num_valid(token_ids)
        self._charge(start, len(token_ids))
        return count

    @override
    def fill_bitmask(self, row: IntArray) -> None:
        start = self._clock()
        self._grammar.fill_bitmask(row)
        self._charge(start, 1)

    @override
    def copy(self) -> TimeLimitedGrammar:
        return TimeLimitedGrammar(self._grammar.copy(), self._seconds_per_token, clock=self._clock)

    def _charge(self, start: float, num_tokens: int) -> None:
        allowed = num_tokens * self._seconds_per_token
        self._excess = max(self._excess + self._clock() - start - allowed, 0.0)
        if self._excess > BURST * self._seconds_per_token:
            raise InvalidRequestError(
                "the grammar of structured_outputs takes more computing time than the limit of "
                f"{self._seconds_per_token:g} s for each token (max_grammar_time_per_token); make it less "
                "ambiguous",
                param="structured_outputs",
            )
