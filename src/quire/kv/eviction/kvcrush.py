"""KVCrush: keeps a diverse few of the blocks with low scores (Jha et al. 2025)."""

from __future__ import annotations

import numpy as np

from quire.config import KVCrushAnchorPointMode, KVCrushConfig
from quire.kv.eviction.scores import FloatArray
from quire.step import BoolArray, Int64Array


class KVCrush:
    """Chooses blocks that stay, for one sequence.

    The random bits of a sequence come from one PCG64 generator, which goes on from layer to layer and from
    one eviction to the next.

    Args:
        config: with a budget above 0.
        block_size: tokens per block.
    """

    def __init__(self, config: KVCrushConfig, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self._random = np.random.Generator(np.random.PCG64(config.rng_seed))

    def retained(self, sums: FloatArray, overflowing: Int64Array) -> Int64Array:
        """Return which of a layer's overflowing blocks stay: [budget].

        Args:
            sums: added weights of the layer's evictable tokens, [blocks * block_size].
            overflowing: the blocks that would go, in ascending order; at least as many as the budget.
        """
        bits = _upper_half(sums).reshape(-1, self._block_size)
        distance = np.count_nonzero(bits[overflowing] != self._anchor(bits), axis=1)
        by_distance = overflowing[np.argsort(distance, kind="stable")]
        stride = len(by_distance) // self._config.budget
        return by_distance[: stride * self._config.budget : stride]

    def _anchor(self, bits: BoolArray) -> BoolArray:
        """Return the bits to measure the distance from: [block_size]."""
        size = self._block_size
        anchor: Int64Array
        match self._config.anchor_point_mode:
            case KVCrushAnchorPointMode.ZEROS:
                anchor = np.zeros(size, dtype=np.int64)
            case KVCrushAnchorPointMode.ONES:
                anchor = np.ones(size, dtype=np.int64)
            case KVCrushAnchorPointMode.ALTERNATING:
                anchor = np.arange(size) % 2
            case KVCrushAnchorPointMode.MEAN:
                anchor = (2 * np.count_nonzero(bits, axis=0) > len(bits)).astype(np.int64)
            case KVCrushAnchorPointMode.RANDOM:
                anchor = self._random.integers(0, 2, size)
        return anchor.astype(np.bool_)


def _upper_half(values: FloatArray) -> BoolArray:
    """Return which values are among the larger half, rounded down; of equal ones the first."""
    is_large = np.zeros(len(values), dtype=np.bool_)
    is_large[np.argsort(-values, kind="stable")[: len(values) // 2]] = True
    return is_large
