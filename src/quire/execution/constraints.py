"""Per-request changes to logits: allowed tokens, banned words, a minimum length, and a bias."""

from __future__ import annotations

import sys

import numpy as np

from quire.execution.arrays import Float32Array, Int64Array
from quire.sampling_params import SamplingParams
from quire.step import IntArray

UNTIL_THE_END = sys.maxsize


class Constraints:
    """The constraints of one request; see `of`.

    A banned sequence forbids its last token whenever the output ends in the tokens before it. Until
    `min_tokens` tokens have been generated, all token ids that would end the request are forbidden.

    Attributes:
        until: number of output tokens after which the request is unconstrained.
    """

    def __init__(self, params: SamplingParams, *, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        sequences = [sequence for sequence in params.bad_words_token_ids if sequence]
        banned = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self._banned_ids: Int64Array = np.array(banned, dtype=np.int64)
        self._banned_after = [(sequence[:-1], sequence[-1]) for sequence in sequences if len(sequence) > 1]
        self._longest_prefix = max((len(prefix) for prefix, _ in self._banned_after), default=0)
        self._allowed_ids: Int64Array = np.array(params.allowed_token_ids, dtype=np.int64)
        self._bias_ids: Int64Array = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias: Float32Array = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._min_tokens = params.min_tokens
        # Models list end-of-sequence ids that their vocabulary does not have; those need no ban.
        ending = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
        in_vocabulary = [token_id for token_id in ending if 0 <= token_id < vocab_size]
        self._ending_ids: Int64Array = np.array(in_vocabulary, dtype=np.int64)
        lasts = sequences or params.logit_bias or params.allowed_token_ids
        self.until = UNTIL_THE_END if lasts else self._min_tokens

    @classmethod
    def of(
        cls, params: SamplingParams, *, eos_token_ids: tuple[int, ...], vocab_size: int
    ) -> Constraints | None:
        """Return the request's constraints, or None if it has none."""
        constraints = cls(params, eos_token_ids=eos_token_ids, vocab_size=vocab_size)
        return constraints if constraints.until > 0 else None

    @property
    def depends_on_output(self) -> bool:
        """Whether what is banned depends on the tokens before, and not on their number only."""
        return bool(self._banned_after)

    @property
    def allowed_ids(self) -> Int64Array:
        """The only tokens that are allowed; empty: all are."""
        return self._allowed_ids

    @property
    def biases(self) -> tuple[Int64Array, Float32Array]:
        """Token ids, and what is added to their logits."""
        return self._bias_ids, self._bias

    def banned_ids(self, num_output_tokens: int) -> Int64Array:
        """Return the tokens that are banned after any output of so many tokens."""
        if num_output_tokens < self._min_tokens:
            return np.concatenate((self._banned_ids, self._ending_ids))
        return self._banned_ids

    @property
    def allows_few(self) -> bool:
        """Whether only some tokens are allowed."""
        return self._allowed_ids.size > 0

    def apply(self, logits: Float32Array, output_token_ids: IntArray) -> None:
        """Change one row of logits in place.

        Args:
            logits: [V].
            output_token_ids: the request's output so far.
        """
        if self.allows_few:
            allowed = logits[self._allowed_ids]
            logits.fill(-np.inf)
            logits[self._allowed_ids] = allowed
        logits[self._banned_ids] = -np.inf
        if self._banned_after:
            self._ban_completions(logits, output_token_ids)
        if len(output_token_ids) < self._min_tokens:
            logits[self._ending_ids] = -np.inf
        logits[self._bias_ids] += self._bias

    def _ban_completions(self, logits: Float32Array, output_token_ids: IntArray) -> None:
        first = max(0, len(output_token_ids) - self._longest_prefix)
        tail = tuple(output_token_ids[first:].tolist())
        for prefix, last in self._banned_after:
            if tail[-len(prefix) :] == prefix:
                logits[last] = -np.inf
