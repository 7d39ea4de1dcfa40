"""How far the keys that stay move back when blocks before them go, so that positions stay contiguous."""

from __future__ import annotations

import numpy as np

from quire.kv.eviction.kvcrush import Int64Array


def positions_to_move_back(evicted: Int64Array, num_blocks: int, block_size: int) -> Int64Array:
    """Return by how many positions each block that stays moves back, [L, num_blocks - count].

    Args:
        evicted: numbers of each layer's blocks, ascending, [L, count].
        num_blocks: blocks in the cache, the evicted ones included, and the last, partly filled one.
        block_size: tokens per block.
    """
    is_evicted = np.zeros((len(evicted), num_blocks), dtype=np.bool_)
    np.put_along_axis(is_evicted, evicted, values=True, axis=1)
    num_before = np.cumsum(is_evicted, axis=1)
    return num_before[~is_evicted].reshape(len(evicted), -1) * block_size
