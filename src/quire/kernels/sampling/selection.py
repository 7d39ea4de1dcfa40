"""Drawing one token per row: temperature, min-p, top-k, top-p, then inversion of the cumulative distribution.

Every filter keeps a prefix of the tokens in descending order of probability, so a row rarely needs more than
its most likely tokens: all rows are decided at once from these heads, and the few that cannot be, one by one
from a histogram. Sums run along a row in a fixed order, and the path taken depends on the row alone, so the
draw is batch-invariant.

Filters: top-k (Fan et al. 2018), top-p or nucleus (Holtzman et al. 2020), min-p (Nguyen et al. 2024).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from quire.kernels.arrays import Float32Array, Float64Array
from quire.kernels.bounds import MIN_HEAD_TOKENS
from quire.kernels.sampling.row_scans import RowScans, relative_weights
from quire.kernels.sampling.token_choice import Array, Filters
from quire.step import BoolArray, Int64Array

_NUM_BINS = 4096


def draw(
    logits: Float32Array,
    maxima: Float32Array,
    filters: Filters[Array],
    uniforms: Float64Array,
    *,
    rows: Int64Array,
    scans: RowScans,
) -> Int64Array:
    """Return one token id per row.

    Args:
        logits: [R, V], after penalties and bans, before temperature.
        maxima: [S] the largest logit of each row, finite.
        filters: for each row.
        uniforms: [S] numbers in [0, 1).
        rows: [S] which rows of `logits` these are.
        scans: of the rows.
    """
    token_ids, decided = _Kept(logits, maxima, filters, rows, scans).choose(uniforms)
    for row in np.flatnonzero(~decided).tolist():
        if filters.top_k[row] <= MIN_HEAD_TOKENS:
            one = slice(row, row + 1)
            numbers = filters.temperature, filters.top_k, filters.top_p, filters.min_p
            of_row = Filters(*(of_rows[one] for of_rows in numbers))
            token_ids[row] = _draw_from_largest(
                logits[rows[row]], maxima[one], of_row, uniforms[one], scans=scans
            )
            continue
        token_ids[row] = draw_from_histogram(
            logits[rows[row]],
            temperature=filters.temperature[row : row + 1],
            top_k=int(filters.top_k[row]),
            top_p=float(filters.top_p[row]),
            min_p=float(filters.min_p[row]),
            uniform=float(uniforms[row]),
        )
    return token_ids


def _draw_from_largest(
    logits: Float32Array,
    maxima: Float32Array,
    filters: Filters[Array],
    uniforms: Float64Array,
    *,
    scans: RowScans,
) -> int:
    """Return the token id of one row in which too many tokens tie for a head, of the few that top-k keeps.

    What it draws does not depend on the other tokens, whose logits may be unknown: see `Linear.largest`.
    `logits` are [V], the others as for `draw`.
    """
    largest = np.argsort(-logits, kind="stable")[: filters.top_k[0]]
    alone = np.full((1, len(logits)), -np.inf, dtype=np.float32)
    alone[0, largest] = logits[largest]
    kept = _Kept(alone, maxima, filters, np.zeros(1, dtype=np.int64), scans)
    return int(kept.choose(uniforms)[0][0])


class _Kept:
    """What the filters keep of the heads of some rows.

    A row's *mass* is the sum of the weights of all tokens that min-p and top-k keep. It is known when the
    head reaches past the last of them, and otherwise only if the row has neither filter: then all tokens
    count.
    """

    def __init__(
        self,
        logits: Float32Array,
        maxima: Float32Array,
        filters: Filters[Array],
        rows: Int64Array,
        scans: RowScans,
    ) -> None:
        self.filters = filters
        self.head = scans.likeliest(logits, rows)
        weights = relative_weights(self.head.logits, maxima, filters.temperature)
        self.cumulative = np.cumsum(weights, axis=1)
        passing = np.count_nonzero(weights >= filters.min_p[:, None], axis=1)
        self.num_kept = np.minimum(passing, filters.top_k)
        self.reaches_end = (
            (passing < self.head.count) | (filters.top_k <= self.head.count) | self.head.complete
        )
        self.keeps_all = (filters.top_k >= logits.shape[1]) & (filters.min_p == 0)
        self.mass = self._cumulative_at(self.num_kept)
        unknown = np.flatnonzero(self.keeps_all & ~self.reaches_end)
        if unknown.size:
            temperature = filters.temperature[unknown]
            self.mass[unknown] = scans.sum_exp(logits, maxima[unknown], temperature, rows[unknown])

    def choose(self, uniforms: Float64Array) -> tuple[Int64Array, BoolArray]:
        """Return a token id per row, and whether the head was enough to decide it."""
        has_nucleus = self.filters.top_p < 1
        nucleus = 1 + np.count_nonzero(self.cumulative < (self.filters.top_p * self.mass)[:, None], axis=1)
        num_kept = np.where(has_nucleus, np.minimum(self.num_kept, nucleus), self.num_kept)
        target = uniforms * np.where(has_nucleus, self._cumulative_at(num_kept), self.mass)
        index = np.count_nonzero(self.cumulative <= target[:, None], axis=1)
        nucleus_known = ~has_nucleus | self.reaches_end | (nucleus <= self.head.count)
        decided = (self.reaches_end | self.keeps_all) & nucleus_known & (index < self.head.count)
        column = np.minimum(index, self.cumulative.shape[1] - 1)
        return self.head.token_ids[np.arange(len(column)), column], decided

    def _cumulative_at(self, count: Int64Array) -> Float64Array:
        """Return the summed weight of the first `count` tokens of each row."""
        return self.cumulative[np.arange(len(count)), count - 1]


def draw_from_histogram(
    logits: Float32Array,
    *,
    temperature: Float64Array,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    """Return the token id of one row whose probability is too spread out for its head to decide.

    Sorting a whole vocabulary for one token is slow: the tokens are put into bins by their logits, and only
    the bins that a boundary falls into are sorted.

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
