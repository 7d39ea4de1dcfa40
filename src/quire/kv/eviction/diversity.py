"""Diversity of the keys of a layer's blocks (after Cai et al. 2025, "R-KV")."""

from __future__ import annotations

import numpy as np

from quire.kv.eviction.scores import FloatArray, WeightArray
from quire.step import Int64Array

ROWS = 256
"""Keys that are compared with all others at a time, about: bounds the memory."""


def diversity(keys: WeightArray, block_size: int, rest: Int64Array) -> FloatArray:
    """Return how unlike the keys of each of the blocks `rest` are to those of all of them, [rest].

    Higher is less alike. For two keys that is the cosine similarity, negated: those below the mean over all
    keys count as 0, as does a key's similarity to itself; then comes the mean over the heads. A block has
    the sum over its keys, and of that the mean over the keys of all blocks in `rest`.

    Args:
        keys: of all evictable tokens, [kv_heads, tokens, head_dim].
        block_size: tokens per block, of which `tokens` is a multiple.
        rest: numbers of the blocks that are compared, ascending.
    """
    norms = np.linalg.norm(keys, axis=2, keepdims=True)
    directions = keys / np.where(norms > 0, norms, 1)
    tokens = (rest[:, None] * block_size + np.arange(block_size)).ravel()
    similarity: FloatArray = np.zeros(len(rest), dtype=np.float64)
    step = max(ROWS // block_size, 1)
    for start in range(0, len(rest), step):
        end = min(start + step, len(rest))
        rows = tokens[start * block_size : end * block_size]
        for head in directions:
            similarity[start:end] += _similarity(head, rows, tokens).reshape(end - start, -1).sum(axis=1)
    unlike: FloatArray = -similarity / (len(keys) * len(tokens))
    return unlike


def _similarity(head: WeightArray, rows: Int64Array, tokens: Int64Array) -> FloatArray:
    """Return how alike keys `rows` and `tokens` are: [rows], sums of what is not below a row's mean."""
    similarity = head[rows] @ head.T
    similarity[np.arange(len(rows)), rows] = 0.0
    similarity[similarity < similarity.mean(axis=1, keepdims=True)] = 0.0
    sums: FloatArray = similarity[:, tokens].sum(axis=1, dtype=np.float64)
    return sums
