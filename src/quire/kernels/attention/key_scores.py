"""The attention weights that the keys of a step get, by which cache eviction decides."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.bounds import TILE
from quire.kernels.devices.device import HOST
from quire.step import Int64Array

NOWHERE = -1


@dataclasses.dataclass(slots=True, eq=False)
class KeyScores:
    """What each cached key gets of the attention of scoring tokens, over all heads.

    S sequences, T tokens, L layers. Attention overwrites the scores of one layer. The scores of a sequence
    are either rows, one for each of its scoring tokens, or the sum of these rows. Rows and sums begin at
    multiples of `TILE`, and are zero where a key is not seen. A row whose weights are not finite is zero.

    A row adds the heads in ascending order. A sum adds the weights of all tokens and heads, rounded down to
    multiples of `SCORE_UNIT`, as integers: so it has the same bits in whatever order, and the sums of a
    prompt's chunks add up to those of the whole prompt.
    """

    row_starts: Int64Array  # [T] where a token's row begins in `rows`, or `NOWHERE`
    sum_starts: Int64Array  # [T] where the sums of a token's sequence begin in `sums`, or `NOWHERE`
    layer_rows: torch.Tensor  # [L, N] float32, where the kernels are
    layer_sums: torch.Tensor  # [L, M] int64, in `SCORE_UNIT`, likewise
    first_row: Int64Array  # [S] where a sequence's first row begins in `rows`
    first_sum: Int64Array  # [S] where a sequence's sums begin in `sums`
    num_scoring_tokens: Int64Array  # [S] of a sequence
    num_rows: Int64Array  # [S] of a sequence, each of as many numbers as its keys fill tiles
    num_keys: Int64Array  # [S] in the cache after this step
    layer: int = 0  # whose scores attention writes

    @classmethod
    def build(
        cls,
        num_tokens: Int64Array,
        num_keys: Int64Array,
        first_scoring_token: npt.NDArray[Any],
        is_summed: npt.NDArray[np.bool_] | None = None,
        *,
        num_layers: int = 1,
        device: torch.device = HOST,
    ) -> Self | None:
        """Return where a step's scores go, or None if no token scores.

        Args:
            num_tokens: [S] tokens of each sequence in this step.
            num_keys: [S] tokens in its cache after this step.
            first_scoring_token: [S] the first of its tokens in this step that scores, as all after it do;
                `num_tokens` or more: none does.
            is_summed: [S] whether its scores are summed over its tokens; None: none is.
            num_layers: L.
            device: where the kernels write them.
        """
        num_scoring = np.maximum(num_tokens - np.asarray(first_scoring_token, dtype=np.int64), 0)
        if not num_scoring.any():
            return None
        summed = np.zeros(len(num_tokens), dtype=bool) if is_summed is None else np.asarray(is_summed)
        num_rows = np.where(summed, 0, num_scoring)
        stride = -(-num_keys // TILE) * TILE
        row_numbers = num_rows * stride
        sum_numbers = np.where(summed & (num_scoring > 0), stride, 0)
        first_row = np.cumsum(row_numbers) - row_numbers
        first_sum = np.cumsum(sum_numbers) - sum_numbers
        sequence = np.repeat(np.arange(len(num_tokens)), num_tokens)
        first_token = (np.cumsum(num_tokens) - num_tokens)[sequence]
        scoring_index = np.arange(len(sequence)) - first_token - (num_tokens - num_scoring)[sequence]
        scores = scoring_index >= 0
        row_starts = first_row[sequence] + scoring_index * stride[sequence]
        return cls(
            row_starts=np.where(scores & ~summed[sequence], row_starts, NOWHERE),
            sum_starts=np.where(scores & summed[sequence], first_sum[sequence], NOWHERE),
            layer_rows=torch.empty(num_layers, int(row_numbers.sum()), device=device),
            layer_sums=torch.empty(num_layers, int(sum_numbers.sum()), dtype=torch.int64, device=device),
            first_row=first_row,
            first_sum=first_sum,
            num_scoring_tokens=num_scoring,
            num_rows=num_rows,
            num_keys=num_keys,
        )

    @property
    def rows(self) -> torch.Tensor:
        """A view [N] of the layer's part of `layer_rows`."""
        return self.layer_rows[self.layer]

    @property
    def sums(self) -> torch.Tensor:
        """A view [M] of the layer's part of `layer_sums`."""
        return self.layer_sums[self.layer]

    def clear(self) -> None:
        """Set all scores of the layer to zero."""
        self.rows.zero_()
        self.sums.zero_()

    def rows_of(self, sequence: int) -> torch.Tensor:
        """Return a view [L, scoring tokens, keys] float32 of a sequence's rows."""
        count, num_keys = int(self.num_rows[sequence]), int(self.num_keys[sequence])
        stride = -(-num_keys // TILE) * TILE
        start = int(self.first_row[sequence])
        rows = self.layer_rows[:, start : start + count * stride]
        return rows.view(len(rows), count, stride)[:, :, :num_keys]

    def sums_of(self, sequence: int) -> torch.Tensor:
        """Return a view [L, keys] int64 of a sequence's sums, in `SCORE_UNIT`."""
        start = int(self.first_sum[sequence])
        return self.layer_sums[:, start : start + int(self.num_keys[sequence])]
