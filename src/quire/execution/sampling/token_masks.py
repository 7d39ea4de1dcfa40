"""The tokens that grammars allow, applied to rows of logits."""

from __future__ import annotations

import numpy as np

from quire.execution.arrays import BoolArray, Float32Array, Int64Array
from quire.execution.persistent_batch import InconsistentPlanError
from quire.execution.sampling.positions import SamplingPositions
from quire.step import GrammarOutput, IntArray, SchedulerOutput

_NO_MASK = -1


class TokenMasks:
    """The bitmask rows of some of a step's sampling positions.

    Args:
        bitmask: [N, ceil(vocabulary / 32)], see `quire.step.GrammarOutput`.
        mask_of_position: [P] the row of `bitmask` for each sampling position, -1 where any token is allowed.
    """

    def __init__(self, bitmask: IntArray, mask_of_position: Int64Array) -> None:
        self._bitmask = bitmask
        self._mask_of_position = mask_of_position

    @classmethod
    def of(cls, grammar: GrammarOutput, output: SchedulerOutput, sampling: SamplingPositions) -> TokenMasks:
        """Return the masks of a step's sampling positions; requests that do not sample are skipped.

        Raises:
            InconsistentPlanError: a request does not have one mask for each of its positions.
        """
        first_mask = np.cumsum(grammar.num_rows) - grammar.num_rows
        request_of = {output.request_ids[row]: index for index, row in enumerate(sampling.rows.tolist())}
        mask_of_position: Int64Array = np.full(len(sampling.request), _NO_MASK, dtype=np.int64)
        for request_id, first, count in zip(
            grammar.request_ids, first_mask.tolist(), grammar.num_rows.tolist(), strict=True
        ):
            if request_id not in request_of:
                continue
            start, end = np.searchsorted(sampling.request, request_of[request_id] + np.arange(2)).tolist()
            if end - start != count:
                raise InconsistentPlanError(
                    f"request {request_id!r} samples {end - start} tokens, but its grammar has {count} masks"
                )
            mask_of_position[start:end] = np.arange(first, first + count)
        return cls(grammar.bitmask, mask_of_position)

    @property
    def bitmask(self) -> IntArray:
        """Bit t % 32 of word t // 32 says whether token t is allowed, [N, ceil(vocabulary / 32)]."""
        return self._bitmask

    @property
    def mask_of_position(self) -> Int64Array:
        """The row of `bitmask` for each position, [P]; -1: any token is allowed."""
        return self._mask_of_position

    @property
    def is_masked(self) -> BoolArray:
        """Which positions have a mask, [P]."""
        masked: BoolArray = self._mask_of_position != _NO_MASK
        return masked

    def apply(self, logits: Float32Array, position: int) -> None:
        """Forbid what the mask of `position` does not allow, in one row of logits [V], in place."""
        words = np.ascontiguousarray(self._bitmask[self._mask_of_position[position]], dtype="<i4")
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(logits))
        logits[allowed == 0] = -np.inf
