"""How unlike each other the keys of a layer's blocks are (after Cai et al. 2025, "R-KV")."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.kv.eviction.scores import WeightArray

_ROWS = 256
"""Keys that are compared with all others at a time, about: bounds the memory."""


def diversity(keys: WeightArray, block_size: int) -> WeightArray:
    """Return how unlike the keys of each block and each key are, [blocks, tokens]; higher is less alike.

    It is the negated sum, over the keys of the block, of cosine similarities: those below the mean of their
    row count as 0, as does a key's similarity to itself; then comes the mean over the heads.

    Args:
        keys: of all evictable tokens, [kv_heads, tokens, head_dim].
        block_size: tokens per block, of which `tokens` is a multiple.
    """
    num_heads, num_tokens, _ = keys.shape
    norms = np.linalg.norm(keys, axis=2, keepdims=True)
    directions = (keys / np.where(norms > 0, norms, 1)).astype(np.float32)
    similarity: WeightArray = np.zeros((num_tokens // block_size, num_tokens), dtype=np.float32)
    step = max(_ROWS // block_size, 1) * block_size
    for start in range(0, num_tokens, step):
        rows = np.arange(start, min(start + step, num_tokens))
        blocks = slice(start // block_size, (rows[-1] + 1) // block_size)
        for head in directions:
            counted = _above_mean(head[rows] @ head.T, rows)
            similarity[blocks] += counted.reshape(-1, block_size, num_tokens).sum(axis=1)
    unlike: WeightArray = (similarity / -num_heads).astype(np.float32)
    return unlike


def _above_mean(similarity: WeightArray, rows: npt.NDArray[np.int64]) -> WeightArray:
    """Return similarities of keys `rows` to all keys, without their own and those below their row's mean."""
    similarity[np.arange(len(rows)), rows] = 0.0
    similarity[similarity < similarity.mean(axis=1, keepdims=True)] = 0.0
    return similarity
