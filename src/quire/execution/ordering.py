"""The likeliest tokens of each row, in one total order: by logit falling, then by token id.

Selection algorithms leave the order of equal logits open, and logits computed in bfloat16 are often equal.
Here all tokens above a threshold are taken, so that a tie is never cut through, and ties are settled by id.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.execution.arrays import BoolArray, Float32Array, Int64Array

_HEAD_SIZE = 128  # least tokens in a head that is not complete
_NUM_GROUPS = 512
_MOST_TOKENS = 1024
_LOWEST = np.finfo(np.float32).min


@dataclasses.dataclass(slots=True, frozen=True)
class Head:
    """The `count[s]` likeliest tokens of each row s, in order; W is the largest count.

    A row that is `complete` lacks only tokens whose logit is -inf; any other has at least 128. A row in
    which too many tokens tie has none.
    """

    logits: Float32Array  # [S, W], padded with -inf
    token_ids: Int64Array  # [S, W]
    count: Int64Array  # [S]
    complete: BoolArray  # [S]


def likeliest(logits: Float32Array) -> Head:
    """Return the heads of `logits` [S, V], which must not contain NaN."""
    threshold = _thresholds(logits)
    taken = logits >= threshold[:, None]
    count = np.count_nonzero(taken, axis=1)
    crowded = count > _MOST_TOKENS
    taken[crowded] = False
    count[crowded] = 0
    rows, ids = np.divmod(np.flatnonzero(taken), logits.shape[1])
    column = np.arange(len(rows)) - (np.cumsum(count) - count)[rows]
    values = np.full((len(logits), max(1, count.max())), -np.inf, dtype=np.float32)
    token_ids = np.zeros(values.shape, dtype=np.int64)
    values[rows, column] = logits[rows, ids]
    token_ids[rows, column] = ids
    order = np.argsort(-values, axis=1, kind="stable")  # ids rise within a row, so ties go by id
    return Head(
        np.take_along_axis(values, order, axis=1),
        np.take_along_axis(token_ids, order, axis=1),
        count,
        (threshold == _LOWEST) & ~crowded,
    )


def top_tokens(logits: Float32Array, count: int) -> Int64Array:
    """Return the ids of the `count` (1 to 128) likeliest tokens of each row, in order: [S, min(count, V)]."""
    count = min(count, logits.shape[1])
    head = likeliest(logits)
    top = np.empty((len(logits), count), dtype=np.int64)
    enough = head.count >= count
    if enough.any():
        top[enough] = head.token_ids[enough, :count]
    for row in np.flatnonzero(~enough).tolist():
        top[row] = np.argsort(-logits[row], kind="stable")[:count]
    return top


def _thresholds(logits: Float32Array) -> Float32Array:
    """Return for each row a logit that at least 128 tokens reach, the lowest float if fewer are finite.

    The maxima of disjoint groups of tokens are logits of the row, so their 128th largest is such a one, and
    close to the best.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size <= _NUM_GROUPS:
        return np.full(num_rows, _LOWEST, dtype=np.float32)
    group_size = vocab_size // _NUM_GROUPS
    grouped = logits[:, : group_size * _NUM_GROUPS].reshape(num_rows, group_size, _NUM_GROUPS)
    place = _NUM_GROUPS - _HEAD_SIZE
    reached: Float32Array = np.partition(grouped.max(axis=1), place, axis=1)[:, place]
    return np.maximum(reached, _LOWEST)
