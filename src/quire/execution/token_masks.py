"""The tokens that grammars allow, applied to rows of logits."""

from __future__ import annotations

import numpy as np

from quire.execution.arrays import BoolArray, Float32Array, Int64Array
from quire.execution.persistent_batch import InconsistentPlanError
from quire.execution.sampling_positions import SamplingPositions
from quire.step import GrammarOutput, IntArray, SchedulerOutput

_NO_MASK = -1


class TokenMasks:
    """The bitmask rows of some of a step's places.

    Args:
        bitmask: [N, ceil(vocabulary / 32)], see `quire.step.GrammarOutput`.
        mask_of_place: [P] the row of `bitmask` for each place, -1 for those that may take any token.
    """

    def __init__(self, bitmask: IntArray, mask_of_place: Int64Array) -> None:
        self._bitmask = bitmask
        self._mask_of_place = mask_of_place

    @classmethod
    def of(cls, grammar: GrammarOutput, output: SchedulerOutput, places: SamplingPositions) -> TokenMasks:
        """Return the masks of a step's places; those of requests that do not sample are passed over.

        Raises:
            InconsistentPlanError: a request has not one mask for each of its places.
        """
        first_mask = np.cumsum(grammar.num_rows) - grammar.num_rows
        request_of = {output.request_ids[row]: index for index, row in enumerate(places.rows.tolist())}
        mask_of_place: Int64Array = np.full(len(places.request), _NO_MASK, dtype=np.int64)
        for request_id, first, count in zip(
            grammar.request_ids, first_mask.tolist(), grammar.num_rows.tolist(), strict=True
        ):
            if request_id not in request_of:
                continue
            start, end = np.searchsorted(places.request, request_of[request_id] + np.arange(2)).tolist()
            if end - start != count:
                raise InconsistentPlanError(
                    f"request {request_id!r} samples {end - start} tokens, but its grammar has {count} masks"
                )
            mask_of_place[start:end] = np.arange(first, first + count)
        return cls(grammar.bitmask, mask_of_place)

    @property
    def is_masked(self) -> BoolArray:
        """Which places have a mask, [P]."""
        masked: BoolArray = self._mask_of_place != _NO_MASK
        return masked

    def apply(self, logits: Float32Array, place: int) -> None:
        """Forbid what the mask of `place` does not allow, in one row of logits [V], in place."""
        words = np.ascontiguousarray(self._bitmask[self._mask_of_place[place]], dtype="<i4")
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(logits))
        logits[allowed == 0] = -np.inf
