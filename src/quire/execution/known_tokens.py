"""Tokens as the host knows them, while a device may know one more."""

from __future__ import annotations

import dataclasses

from quire.step import BoolArray, Int64Array, IntArray


@dataclasses.dataclass(slots=True, frozen=True)
class KnownTokens:
    """The tokens of slots as the host knows them; the last token before a row may be missing.

    A missing token is the last one that the device has chosen, and it has counted it.
    """

    token_ids: IntArray  # [max_num_seqs, more than the largest position] by slot
    times_written: Int64Array  # [R] differs if a slot has got other tokens than those sampled for it
    is_missing: BoolArray  # [R] whether the one before is
