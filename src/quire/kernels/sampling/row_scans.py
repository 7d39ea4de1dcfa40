"""Scans of whole rows of logits that tokens are chosen by on the host: the interface, and the reference."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import numpy as np
from typing_extensions import override

from quire.kernels.arrays import Float32Array, Float64Array
from quire.kernels.bounds import MAX_HEAD_TOKENS, MIN_HEAD_TOKENS
from quire.step import BoolArray, Int64Array

_MIN_GROUPS = 512
_VECTOR = 16  # groups are whole vectors of the native kernels where they are longer than one
LOWEST = float(np.finfo(np.float32).min)
_CHUNK_ELEMENTS = 1 << 16  # half a megabyte of float64: stays in the core's cache


@dataclasses.dataclass(slots=True, frozen=True)
class Head:
    """The `count[s]` likeliest tokens of each row s, in order: by logit falling, then by token id.

    W is the largest count. A row that is `complete` lacks only tokens whose logit is -inf; any other has at
    least `MIN_HEAD_TOKENS`. A row in which too many tokens tie has none.
    """

    logits: Float32Array  # [S, W], padded with -inf
    token_ids: Int64Array  # [S, W]
    count: Int64Array  # [S]
    complete: BoolArray  # [S]


class RowScans(ABC):
    """Work over whole rows of logits, [R, V] float32, a row's numbers adjacent.

    Every method takes `rows`, [S] int64: which of them to work on; None: all. A row's result has the same
    bits whatever the other rows are.
    """

    @abstractmethod
    def largest(
        self, logits: Float32Array, rows: Int64Array | None = None
    ) -> tuple[Int64Array, Float32Array]:
        """Return (token ids, logits), [S] each: the largest logit of each row and the lowest id that has it.

        A row with a NaN gives its first NaN.
        """

    @abstractmethod
    def likeliest(self, logits: Float32Array, rows: Int64Array | None = None) -> Head:
        """Return the heads of rows, which must not contain NaN."""

    @abstractmethod
    def sum_exp(
        self,
        logits: Float32Array,
        maxima: Float32Array,
        temperature: Float64Array,
        rows: Int64Array | None = None,
    ) -> Float64Array:
        """Return each row's sum of `relative_weights`, [S]; `maxima` and `temperature` are [S]."""

    @abstractmethod
    def ranks(
        self, logits: Float32Array, token_ids: Int64Array, rows: Int64Array | None = None
    ) -> Int64Array:
        """Return the place of one token of each row, 1 for the likeliest, [S]; ties go to the lower id."""


class ReferenceScans(RowScans):
    """In numpy.

    Selection algorithms leave the order of equal logits open, and logits computed in bfloat16 are often
    equal. Here all tokens above a threshold are taken, so that a tie is never cut through, and ties are
    settled by id.
    """

    @override
    def largest(
        self, logits: Float32Array, rows: Int64Array | None = None
    ) -> tuple[Int64Array, Float32Array]:
        chosen = _take(logits, rows)
        token_ids: Int64Array = chosen.argmax(axis=1)
        return token_ids, chosen[np.arange(len(chosen)), token_ids]

    @override
    def likeliest(self, logits: Float32Array, rows: Int64Array | None = None) -> Head:
        chosen = _take(logits, rows)
        threshold = _thresholds(chosen)
        taken = chosen >= threshold[:, None]
        count = np.count_nonzero(taken, axis=1)
        crowded = count > MAX_HEAD_TOKENS
        taken[crowded] = False
        count[crowded] = 0
        row_of, ids = np.divmod(np.flatnonzero(taken), chosen.shape[1])
        column = np.arange(len(row_of)) - (np.cumsum(count) - count)[row_of]
        values = np.full((len(chosen), max(1, count.max(initial=0))), -np.inf, dtype=np.float32)
        token_ids = np.zeros(values.shape, dtype=np.int64)
        values[row_of, column] = chosen[row_of, ids]
        token_ids[row_of, column] = ids
        order = np.argsort(-values, axis=1, kind="stable")  # ids rise within a row, so ties go by id
        return Head(
            np.take_along_axis(values, order, axis=1),
            np.take_along_axis(token_ids, order, axis=1),
            count,
            (threshold == LOWEST) & ~crowded,
        )

    @override
    def sum_exp(
        self,
        logits: Float32Array,
        maxima: Float32Array,
        temperature: Float64Array,
        rows: Int64Array | None = None,
    ) -> Float64Array:
        chosen = _take(logits, rows)
        num_rows, vocab_size = chosen.shape
        sums = np.empty(num_rows)
        step = max(1, _CHUNK_ELEMENTS // vocab_size)
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            sums[part] = relative_weights(chosen[part], maxima[part], temperature[part]).sum(axis=1)
        return sums

    @override
    def ranks(
        self, logits: Float32Array, token_ids: Int64Array, rows: Int64Array | None = None
    ) -> Int64Array:
        chosen = _take(logits, rows)
        places = np.empty(len(chosen), dtype=np.int64)
        for index, token_id in enumerate(token_ids.tolist()):
            row = chosen[index]
            before = np.count_nonzero(row[:token_id] == row[token_id])
            places[index] = 1 + np.count_nonzero(row > row[token_id]) + before
        return places


def relative_weights(logits: Float32Array, maxima: Float32Array, temperature: Float64Array) -> Float64Array:
    """Return probabilities relative to that of each row's likeliest token, which is exactly 1.

    Args:
        logits: [S, any].
        maxima: [S] the largest logit of each row, finite.
        temperature: [S] above 0.
    """
    with np.errstate(over="ignore", under="ignore"):
        exponents = np.subtract(logits, maxima[:, None], dtype=np.float64)
        exponents /= temperature[:, None]
        weights: Float64Array = np.exp(exponents, out=exponents)
    return weights


def group_size(vocab_size: int) -> int:
    """Return the tokens of a group of which the likeliest is looked at first; 0: there is one group."""
    if vocab_size <= _MIN_GROUPS:
        return 0
    size = vocab_size // _MIN_GROUPS
    return size - size % _VECTOR if size >= _VECTOR else size


def _thresholds(logits: Float32Array) -> Float32Array:
    """Return for each row a logit that at least 128 tokens reach, the lowest float if fewer are finite.

    The maxima of disjoint groups of tokens are logits of the row, so their 128th largest is such a one, and
    close to the best.
    """
    num_rows, vocab_size = logits.shape
    size = group_size(vocab_size)
    if not size:
        return np.full(num_rows, LOWEST, dtype=np.float32)
    maxima = np.maximum.reduceat(logits, np.arange(0, vocab_size, size), axis=1)
    place = maxima.shape[1] - MIN_HEAD_TOKENS
    reached: Float32Array = np.partition(maxima, place, axis=1)[:, place]
    return np.maximum(reached, LOWEST)


def _take(logits: Float32Array, rows: Int64Array | None) -> Float32Array:
    return logits if rows is None else logits[rows]
