"""Per-request changes to logits: allowed tokens, banned words, a minimum length, and a bias."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from quire.execution.arrays import Float32Array, Int64Array
from quire.sampling_params import SamplingParams
from quire.step import IntArray

UNTIL_THE_END = sys.maxsize


class Constraints:
    """The constraints of one request; see `of`.

    A banned sequence forbids its last token whenever the output ends in the tokens before it. Tokenizers make
    tokens of some words that the vocabulary does not have; a sequence with one never comes up. Until
    `min_tokens` tokens have been generated, all token ids that would end the request are forbidden.

    Attributes:
        until: number of output tokens after which the request is unconstrained.
    """

    def __init__(self, params: SamplingParams, *, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        vocabulary = range(vocab_size)
        sequences = [
            sequence
            for sequence in params.bad_words_token_ids
            if sequence and all(token_id in vocabulary for token_id in sequence)
        ]
        banned = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self._banned_ids: Int64Array = np.array(banned, dtype=np.int64)
        self._completions = _Completions([sequence for sequence in sequences if len(sequence) > 1])
        self._allowed_ids: Int64Array = np.array(params.allowed_token_ids, dtype=np.int64)
        self._bias_ids: Int64Array = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias: Float32Array = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._min_tokens = params.min_tokens
        # Models list end-of-sequence ids that their vocabulary does not have; those need no ban.
        ending = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
        in_vocabulary = [token_id for token_id in ending if token_id in vocabulary]
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

    def banned_completions(self, output_token_ids: IntArray) -> Int64Array:
        """Return the last tokens of the banned sequences that an output of known tokens has begun."""
        return self._completions.after(output_token_ids)

    def possible_completions(self, output_token_ids: IntArray) -> tuple[Int64Array, Int64Array]:
        """Return what is banned behind one more token than is known.

        Returns:
            (that token, the banned one), [N] each.
        """
        return self._completions.after_one_more(output_token_ids)

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
        logits[self.banned_ids(len(output_token_ids))] = -np.inf
        logits[self.banned_completions(output_token_ids)] = -np.inf
        logits[self._bias_ids] += self._bias


class _Completions:
    """Which tokens would complete sequences, each of two tokens or more."""

    def __init__(self, sequences: list[tuple[int, ...]]) -> None:
        self._by_last_but_one: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._by_third_last: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        pairs = []
        for sequence in sequences:
            self._by_last_but_one[sequence[-2]].append(sequence)
            if len(sequence) == 2:
                pairs.append(sequence)
            else:
                self._by_third_last[sequence[-3]].append(sequence)
        self._pairs: Int64Array = np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def after(self, token_ids: IntArray) -> Int64Array:
        """Return the tokens that would."""
        begun = _begun(self._by_last_but_one, token_ids, num_missing=1)
        return np.array([sequence[-1] for sequence in begun], dtype=np.int64)

    def after_one_more(self, token_ids: IntArray) -> tuple[Int64Array, Int64Array]:
        """Return which tokens would behind which other one, [N] each: (the other one, the last)."""
        begun = _begun(self._by_third_last, token_ids, num_missing=2)
        longer = np.array([sequence[-2:] for sequence in begun], dtype=np.int64).reshape(-1, 2)
        before, last = np.concatenate((self._pairs, longer)).T
        return before, last


def _begun(
    sequences: Mapping[int, list[tuple[int, ...]]], token_ids: IntArray, *, num_missing: int
) -> list[tuple[int, ...]]:
    """Return the sequences that tokens end in all but the last `num_missing` of.

    Args:
        sequences: by the last of these.
        token_ids: [T].
    """
    if not sequences or not len(token_ids):
        return []
    candidates = sequences.get(int(token_ids[-1]), [])
    return [
        sequence
        for sequence in candidates
        if tuple(token_ids[num_missing - len(sequence) :].tolist()) == sequence[:-num_missing]
    ]
