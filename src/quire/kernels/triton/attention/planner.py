"""Plans of recorded decode steps, made of the plan of the step before where that is possible."""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.step_arrays import HostArrays
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.bounds import TILE
from quire.kernels.size_classes import SizeClasses
from quire.kernels.triton.attention.items import END_TILE, FIRST_PLACE, Int64Array, plan_arrays


@dataclasses.dataclass(slots=True, frozen=True)
class _Planned:
    """What was made of a decode step."""

    num_rows: int
    sizes: SizeClasses
    places: Int64Array  # [S], of its tokens in their sequences' caches
    made: HostArrays


class AttentionPlanner:
    """Makes the arrays of a step's attention plan, as `plan_arrays` does; nobody writes to them.

    Recorded steps keep it. Where the same sequences compute one token each, step after step, and none of them
    comes to another tile of keys, all that changes in the plan is where these tokens are.

    Args:
        heads, window, classes: as for `plan_arrays`.
    """

    def __init__(self, heads: HeadLayout, window: int, classes: tuple[int, ...]) -> None:
        self._how = heads, window, classes
        self._last: _Planned | None = None

    def __call__(self, batch: AttentionBatch) -> HostArrays:
        """Return the arrays and numbers of a step's plan."""
        last, self._last = self._last, None
        if batch.skipped_keys is not None or not (batch.num_tokens == 1).all():
            return plan_arrays(*self._how, batch)
        if last is not None and self._has_same_tiles(last, batch):
            made = _moved_on(last.made)
        else:
            made = plan_arrays(*self._how, batch)
        self._last = _Planned(batch.num_rows, batch.sizes, batch.num_cached_tokens.copy(), made)
        return made

    def _has_same_tiles(self, last: _Planned, batch: AttentionBatch) -> bool:
        """Return whether a decode step is the next one of the same sequences, and sees the same tiles."""
        _, window, _ = self._how
        places = batch.num_cached_tokens
        if (
            (batch.num_rows, batch.sizes) != (last.num_rows, last.sizes)
            or not np.array_equal(places, last.places + 1)
            or not (places % TILE).all()
        ):
            return False
        first_seen = places - window + 1
        return not window or bool(((first_seen <= 0) | (first_seen % TILE != 0)).all())


def _moved_on(made: HostArrays) -> HostArrays:
    """Return a decode step's arrays with each token in the next place."""
    arrays = list(made.arrays)
    for number in range(0, len(arrays), 2):  # items, and then merges, of each class
        if len(arrays[number]):
            items = arrays[number] = arrays[number].copy()
            items[:, FIRST_PLACE] += items[:, END_TILE] > 0  # others are of nobody's rows, or of none
    return made._replace(arrays=tuple(arrays))
