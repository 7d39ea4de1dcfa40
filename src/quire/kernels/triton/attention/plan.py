"""The plan of a step's attention: made once for each step and shape of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.step_arrays import HostArrays
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.bounds import TILE
from quire.kernels.size_classes import SizeClasses, next_power_of_2
from quire.kernels.triton.attention.items import END_TILE, FIRST_PLACE, feature_parts, plan_arrays
from quire.step import Int64Array

ROW_CLASSES = (16, 64, 128)  # rows of a query tile: decodes, a few tokens, prefill chunks
MAX_ROWS_OF_LARGE_HEADS = 64  # with more features than 128, two tiles of sums would not stay in registers
MAX_ROWS_OF_LATENTS = 16  # nor would they beside those of the rest of a head
MAX_FLOAT32_ROWS = 16  # whose products are no tensor cores', and take many registers, too
MIN_CONVERTED_ROWS = 64  # smaller tiles would add products in another order, if numbers are converted first


@dataclasses.dataclass(slots=True, frozen=True)
class TileClass:
    """Query tiles of equal height. N items, M merges."""

    rows: int  # tokens times the heads of a group, and the rest of the last token's
    items: torch.Tensor  # [N, ITEM_FIELDS] int32, see `plan_arrays`
    merges: torch.Tensor  # [M, MERGE_FIELDS] int32, see `plan_arrays`
    part_sums: torch.Tensor  # [parts, kv_heads, rows, padded head_dim] float32
    part_statistics: torch.Tensor  # [parts, kv_heads, 2, rows] float32
    num_visits: int  # tiles that items with a list of them may visit


@dataclasses.dataclass(slots=True, frozen=True)
class AttentionPlan:
    """A step's plan, on the device of the kernels."""

    classes: tuple[TileClass, ...]
    has_gaps: bool


def attention_plan(
    batch: AttentionBatch,
    heads: HeadLayout,
    window: int,
    *,
    is_float32: bool,
    is_converted: bool,
    device: torch.device,
) -> AttentionPlan:
    """Return the plan of a step for layers of this shape and window (0: none), made once.

    `is_float32` says of what type products are, and `is_converted` whether what is cached is of another one.
    """
    key = ("triton attention", heads, window, is_float32, is_converted)
    plan: AttentionPlan | None = batch.plans.get(key)
    if plan is None:
        classes = _row_classes(heads, is_float32, is_converted)
        arrays, numbers = batch.on_device(key, AttentionPlanner(heads, window, classes), device)
        *of_classes, has_gaps = numbers
        num_parts, num_visits = of_classes[: len(classes)], of_classes[len(classes) :]
        planned = [
            _tile_class(
                rows, arrays[2 * number : 2 * number + 2], num_parts[number], num_visits[number], heads
            )
            for number, rows in enumerate(classes)
        ]
        plan = AttentionPlan(tuple(tiles for tiles in planned if len(tiles.items)), bool(has_gaps))
        batch.plans[key] = plan
    return plan


def _row_classes(heads: HeadLayout, is_float32: bool, is_converted: bool) -> tuple[int, ...]:
    """Return the numbers of rows that tiles may have; a token's heads are in one."""
    features, rest = feature_parts(heads.head_dim)
    most = ROW_CLASSES[-1] if features <= 128 else MAX_ROWS_OF_LARGE_HEADS
    least = MIN_CONVERTED_ROWS if is_converted else 1
    if is_float32:
        least, most = 1, MAX_FLOAT32_ROWS
    if rest:
        least, most = 1, MAX_ROWS_OF_LATENTS  # tiles of one height have one order
    fitting = tuple(rows for rows in ROW_CLASSES if max(heads.group, least) <= rows <= most)
    return fitting or (next_power_of_2(heads.group),)


def _tile_class(
    rows: int, arrays: Sequence[torch.Tensor], num_parts: int, num_visits: int, heads: HeadLayout
) -> TileClass:
    items, merges = arrays
    features = sum(feature_parts(heads.head_dim))
    return TileClass(
        rows=rows,
        items=items,
        merges=merges,
        part_sums=torch.empty(num_parts, heads.num_kv_heads, rows, features, device=items.device),
        part_statistics=torch.empty(num_parts, heads.num_kv_heads, 2, rows, device=items.device),
        num_visits=num_visits,
    )


@dataclasses.dataclass(slots=True, frozen=True)
class _Planned:
    """The plan of a decode step."""

    num_rows: int
    sizes: SizeClasses
    places: Int64Array  # [S], of its tokens in their sequences' caches
    made: HostArrays


class AttentionPlanner:
    """Makes the arrays of a step's attention plan, as `plan_arrays` does; they are read-only.

    Captured steps keep it. Where the same sequences compute one token each, step after step, and none of them
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
            items[:, FIRST_PLACE] += items[:, END_TILE] > 0  # others are of padding rows, or of none
    return made._replace(arrays=tuple(arrays))
