"""Drawing one token per row: temperature, min-p, top-k, top-p, then inversion of the cumulative distribution.

Every filter keeps a prefix of the tokens in descending order of probability, so a row rarely needs more than
its most likely tokens: all rows are decided at once from these heads, and the few that cannot be, one by one
from a histogram. Sums run along a row in a fixed order, and the path taken depends on the row alone, so the
draw is batch-invariant.

Filters: top-k (Fan et al. 2018), top-p or nucleus (Holtzman et al. 2020), min-p (Nguyen et al. 2024).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.execution.arrays import BoolArray, Float32Array, Float64Array, Int64Array
from quire.execution.sampling.histogram import draw_from_histogram
from quire.kernels.sampling.rows import SamplingKernels, relative_weights


@dataclasses.dataclass(slots=True, frozen=True)
class Filters:
    """What each row samples with; arrays [S]."""

    temperature: Float64Array  # above 0
    top_k: Int64Array  # at least 1; V or more keeps all
    top_p: Float64Array  # above 0; 1 keeps all
    min_p: Float64Array  # 0 keeps all


def draw(
    logits: Float32Array,
    maxima: Float32Array,
    filters: Filters,
    uniforms: Float64Array,
    *,
    rows: Int64Array,
    kernels: SamplingKernels,
) -> Int64Array:
    """Return one token id per row.

    Args:
        logits: [R, V], after penalties and bans, before temperature.
        maxima: [S] the largest logit of each row, finite.
        filters: for each row.
        uniforms: [S] numbers in [0, 1).
        rows: [S] which rows of `logits` these are.
        kernels: scan the rows.
    """
    token_ids, decided = _Kept(logits, maxima, filters, rows, kernels).choose(uniforms)
    for row in np.flatnonzero(~decided).tolist():
        token_ids[row] = draw_from_histogram(
            logits[rows[row]],
            temperature=filters.temperature[row : row + 1],
            top_k=int(filters.top_k[row]),
            top_p=float(filters.top_p[row]),
            min_p=float(filters.min_p[row]),
            uniform=float(uniforms[row]),
        )
    return token_ids


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
        filters: Filters,
        rows: Int64Array,
        kernels: SamplingKernels,
    ) -> None:
        self.filters = filters
        self.head = kernels.likeliest(logits, rows)
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
            self.mass[unknown] = kernels.sum_exp(logits, maxima[unknown], temperature, rows[unknown])

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
