"""What changes the logits of a step: grammars, allowed tokens, banned words, a minimum length, and biases."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quire.execution.persistent_batch import InconsistentPlanError
from quire.execution.sampling.positions import SamplingPositions
from quire.kernels.arrays import Float64Array
from quire.kernels.sampling.token_choice import NUM_EDIT_NUMBERS, LogitMasks, RowEdits
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN, BoolArray, GrammarOutput, Int64Array, IntArray, SchedulerOutput

UNTIL_THE_END = sys.maxsize
NO_MASK = -1

NO_EDIT = (-1.0, 0.0, 0.0, float(NO_TOKEN))
"""The numbers of an edit that changes nothing, as in `LogitEdits`."""

_WORD = 32  # tokens


class Constraints:
    """The constraints of one request; see `of`.

    A banned sequence forbids its last token whenever the output ends in the tokens before it. Tokenizers make
    tokens of some words that the vocabulary does not have; a sequence with one never comes up. Until
    `min_tokens` tokens have been generated, all token ids that would end the request are forbidden.

    Attributes:
        allowed_words: [V / 32] a mask of the only tokens that are allowed; None: all are.
        allowed_ids: the same tokens.
        has_completions: whether tokens are banned behind others.
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
        longer = [sequence for sequence in sequences if len(sequence) > 1]
        self._completions = _Completions(longer)
        self.has_completions = bool(longer)
        self.allowed_ids: Int64Array = np.array(params.allowed_token_ids, dtype=np.int64)
        self.allowed_words = _mask_words(self.allowed_ids, vocab_size)
        self._min_tokens = params.min_tokens
        # Models list end-of-sequence ids that their vocabulary does not have; those need no ban.
        ending = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
        early = [token_id for token_id in ending if token_id in vocabulary]
        self._edits = _edits(params.logit_bias, banned)
        self._early_edits = _edits(params.logit_bias, banned + early)
        lasts = sequences or params.logit_bias or params.allowed_token_ids
        self.until = UNTIL_THE_END if lasts else self._min_tokens

    @classmethod
    def of(
        cls, params: SamplingParams, *, eos_token_ids: tuple[int, ...], vocab_size: int
    ) -> Constraints | None:
        """Return the request's constraints, or None if it has none."""
        ways = params.min_tokens, params.bad_words_token_ids, params.logit_bias, params.allowed_token_ids
        if not any(ways):
            return None
        constraints = cls(params, eos_token_ids=eos_token_ids, vocab_size=vocab_size)
        return constraints if constraints.until > 0 else None

    def edits(self, num_output_tokens: int) -> RowEdits:
        """Return the edits behind any output of this many tokens, of row 0."""
        return self._early_edits if num_output_tokens < self._min_tokens else self._edits

    def banned_completions(self, output_token_ids: IntArray) -> Int64Array:
        """Return the last tokens of the banned sequences that an output of known tokens has begun."""
        return self._completions.after(output_token_ids)

    def possible_completions(self, output_token_ids: IntArray) -> tuple[Int64Array, Int64Array]:
        """Return what is banned after one more token than is known.

        Returns:
            (that token, the banned one), [N] each.
        """
        return self._completions.after_one_more(output_token_ids)


class _Completions:
    """Banned sequences of two or more tokens, and the tokens that would complete them."""

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
        """Return the tokens that would complete a sequence after `token_ids`."""
        begun = _begun(self._by_last_but_one, token_ids, num_missing=1)
        return np.array([sequence[-1] for sequence in begun], dtype=np.int64)

    def after_one_more(self, token_ids: IntArray) -> tuple[Int64Array, Int64Array]:
        """Return which last token would complete a sequence after which next one, [N] each: (next, last)."""
        begun = _begun(self._by_third_last, token_ids, num_missing=2)
        longer = np.array([sequence[-2:] for sequence in begun], dtype=np.int64).reshape(-1, 2)
        before, last = np.concatenate((self._pairs, longer)).T
        return before, last


def _begun(
    sequences: Mapping[int, list[tuple[int, ...]]], token_ids: IntArray, *, num_missing: int
) -> list[tuple[int, ...]]:
    """Return the sequences of which the tokens end with all but the last `num_missing`.

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


@dataclasses.dataclass(slots=True, frozen=True)
class RowMasks(LogitMasks[npt.NDArray[Any]]):
    """Which tokens R rows may choose, in the host's memory."""

    @classmethod
    def of(cls, grammar: GrammarOutput, output: SchedulerOutput, sampling: SamplingPositions) -> Self:
        """Return what grammars allow at a step's sampling positions; requests that do not sample are skipped.

        Raises:
            InconsistentPlanError: a request does not have one mask for each of its positions.
        """
        first_mask = np.cumsum(grammar.num_rows) - grammar.num_rows
        request_of = {output.request_ids[row]: index for index, row in enumerate(sampling.rows.tolist())}
        mask_of_row: Int64Array = np.full(len(sampling.request), NO_MASK, dtype=np.int64)
        for request_id, first, count in zip(
            grammar.request_ids, first_mask.tolist(), grammar.num_rows.tolist(), strict=True
        ):
            if request_id not in request_of:
                continue
            start, end = np.searchsorted(sampling.request, request_of[request_id] + np.arange(2)).tolist()
            if end - start != count:
                raise InconsistentPlanError(
                    f"request {request_id!r} samples {end - start} tokens, but its grammar has {count} masks"
                )
            mask_of_row[start:end] = np.arange(first, first + count)
        return cls(grammar.bitmask, mask_of_row)

    @property
    def is_masked(self) -> BoolArray:
        """Which rows choose among some tokens only, [R]."""
        masked: BoolArray = self.mask_of_row != NO_MASK
        return masked


class ChangesOfStep:
    """Collects what changes the logits of R rows before penalties do.

    Args:
        masks: of the rows' grammars.
        num_rows: R.
        vocab_size: V.
    """

    def __init__(self, masks: RowMasks | None, num_rows: int, vocab_size: int) -> None:
        self._bitmasks: list[IntArray] = []
        self._ids: list[Int64Array | None] = []
        self._mask_of_row = [NO_MASK] * num_rows
        if masks is not None:
            self._mask_of_row = masks.mask_of_row.tolist()
            self._bitmasks.append(np.ascontiguousarray(masks.bitmask[:, : num_mask_words(vocab_size)]))
            self._ids += [None] * len(masks.bitmask)
        self.row_edits: list[RowEdits] = []

    def constrain(self, row: int, constraints: Constraints, output: IntArray, *, lacks_last: bool) -> None:
        """Add the constraints of a row's request.

        Args:
            row: which.
            constraints: of its request.
            output: [N] token ids before the one to choose.
            lacks_last: whether the last of them is known to the device only.
        """
        if constraints.allowed_words is not None:
            self._allow_only(row, constraints.allowed_words, constraints.allowed_ids)
        self._edit(RowEdits(row, *constraints.edits(len(output))[1:]))
        if not constraints.has_completions:
            return
        if lacks_last:
            before, last = constraints.possible_completions(output[:-1])
            self._edit(RowEdits(row, last, -np.inf, before))
        else:
            self._edit(RowEdits(row, constraints.banned_completions(output), -np.inf))

    def _allow_only(self, row: int, words: IntArray, token_ids: Int64Array) -> None:
        """Forbid all other tokens to a row, in addition to those that its grammar forbids."""
        mask = self._mask_of_row[row]
        if mask != NO_MASK:
            words = words & self._bitmasks[0][mask]
        self._mask_of_row[row] = len(self._ids)
        self._bitmasks.append(words[None])
        self._ids.append(token_ids if mask == NO_MASK else None)

    def _edit(self, edits: RowEdits) -> None:
        if len(edits.token_ids):
            self.row_edits.append(edits)

    @property
    def masks(self) -> RowMasks | None:
        """Which tokens may be chosen; None: all."""
        if not self._bitmasks:
            return None
        bitmask = self._bitmasks[0] if len(self._bitmasks) == 1 else np.concatenate(self._bitmasks)
        return RowMasks(bitmask, np.array(self._mask_of_row), self._ids)

    @property
    def edits(self) -> Float64Array | None:
        """What is added to single logits, [NUM_EDIT_NUMBERS, E], see `LogitEdits`; None: nothing."""
        if not self.row_edits:
            return None
        ends = list(itertools.accumulate(len(edits.token_ids) for edits in self.row_edits))
        numbers = np.empty((NUM_EDIT_NUMBERS, ends[-1]))
        for end, (row, token_ids, added, after) in zip(ends, self.row_edits, strict=True):
            part = numbers[:, end - len(token_ids) : end]
            part[0], part[1], part[2], part[3] = row, token_ids, added, after
        return numbers


def _edits(logit_bias: Mapping[int, float], banned: Sequence[int]) -> RowEdits:
    added = [*logit_bias.values()] + [-np.inf] * len(banned)
    return RowEdits(0, np.array([*logit_bias, *banned], dtype=np.int64), np.array(added, dtype=np.float32))


def num_mask_words(vocab_size: int) -> int:
    """Return how many words say which tokens are allowed."""
    return -(-vocab_size // _WORD)


def _mask_words(token_ids: Int64Array, vocab_size: int) -> IntArray | None:
    """Return a mask of tokens, [V / 32]; None: without any."""
    if not len(token_ids):
        return None
    allowed = np.zeros(num_mask_words(vocab_size) * _WORD, dtype=np.uint8)
    allowed[token_ids] = 1
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)
