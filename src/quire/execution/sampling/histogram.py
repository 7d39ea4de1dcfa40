"""Drawing from a row whose probability is too spread out for its most likely tokens to decide.

Sorting a whole vocabulary for one token is slow. Instead, the tokens are put into bins by their logit, and
only the bins that a boundary falls into are sorted.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from quire.execution.arrays import Float32Array, Float64Array, Int64Array
from quire.kernels.sampling.rows import relative_weights

_NUM_BINS = 4096


def draw_from_histogram(
    logits: Float32Array,
    *,
    temperature: Float64Array,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    """Return the token id of one row.

    Args:
        logits: [V], the largest of them finite.
        temperature: [1] above 0.
        top_k: at least 1; V or more keeps all.
        top_p: above 0; 1 keeps all.
        min_p: 0 keeps all.
        uniform: a number in [0, 1).
    """
    maximum = logits.max(keepdims=True)
    weights = relative_weights(logits[None], maximum, temperature)[0]
    token_ids = np.flatnonzero((weights > 0) & (weights >= min_p))
    bins = _Bins(logits[token_ids], weights[token_ids])
    num_kept = min(top_k, len(token_ids))
    mass = bins.mass_of_first(num_kept)
    if top_p < 1:
        num_kept = min(num_kept, 1 + bins.num_reaching(top_p * mass, "left"))
        mass = bins.mass_of_first(num_kept)
    # The last bit of a bin's mass depends on the order of its sum, which may push the draw past the edge.
    index = min(bins.num_reaching(uniform * mass, "right"), num_kept - 1)
    return int(token_ids[bins.item_at(index)])


class _Bins:
    """N items in descending order of their logits, ties by index, sorted only as far as needed.

    Args:
        logits: [N] finite, N at least 1.
        weights: [N] ascending with the logits.
    """

    def __init__(self, logits: Float32Array, weights: Float64Array) -> None:
        depth = float(logits.max()) - logits.astype(np.float64)
        deepest = float(depth.max())
        scale = (_NUM_BINS - 1) / deepest if deepest else 0.0
        self._bin_of = (depth * scale).astype(np.int64)
        self._logits = logits
        self._weights = weights
        self._count = np.cumsum(np.bincount(self._bin_of, minlength=_NUM_BINS))
        self._mass = np.cumsum(np.bincount(self._bin_of, weights, minlength=_NUM_BINS))

    def mass_of_first(self, count: int) -> float:
        """Return the summed weight of the first `count` items, 1 to N."""
        bin_index, place = self._bin_at(count - 1)
        return float(self._cumulative(bin_index, self._sorted(bin_index))[place])

    def num_reaching(self, mass: float, side: Literal["left", "right"]) -> int:
        """Return how many items have a cumulative weight below `mass` ("left") or not above it ("right")."""
        bin_index = min(int(np.searchsorted(self._mass, mass, side=side)), _NUM_BINS - 1)
        cumulative = self._cumulative(bin_index, self._sorted(bin_index))
        return self._num_before(bin_index) + int(np.searchsorted(cumulative, mass, side=side))

    def item_at(self, index: int) -> int:
        """Return the item at place `index`, 0 to N - 1."""
        bin_index, place = self._bin_at(index)
        return int(self._sorted(bin_index)[place])

    def _bin_at(self, index: int) -> tuple[int, int]:
        """Return the bin of the item at `index` and its place there."""
        bin_index = int(np.searchsorted(self._count, index, side="right"))
        return bin_index, index - self._num_before(bin_index)

    def _num_before(self, bin_index: int) -> int:
        return int(self._count[bin_index - 1]) if bin_index else 0

    def _sorted(self, bin_index: int) -> Int64Array:
        """Return the items of a bin in order."""
        items = np.flatnonzero(self._bin_of == bin_index)
        return items[np.argsort(-self._logits[items], kind="stable")]

    def _cumulative(self, bin_index: int, items: Int64Array) -> Float64Array:
        """Return the cumulative weights of a bin's sorted items, with all bins before it."""
        before = self._mass[bin_index - 1] if bin_index else 0.0
        return before + np.cumsum(self._weights[items])
