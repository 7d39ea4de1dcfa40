"""Plans of decode steps that follow from those before are the plans that steps have by themselves."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.sparse_prefill import SkippedKeys
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.size_classes import CHUNK_SIZES, DECODE_SIZES, SizeClasses
from quire.kernels.triton.attention import items as attention_items
from quire.kernels.triton.attention import plan as attention_planner
from quire.kernels.triton.attention.plan import AttentionPlanner
from unmutated import UNMUTATED

CLASSES = (16, 64)
HEADS = HeadLayout(8, 2, 32)


def step(
    places: Any, counts: Any = 1, *, sizes: SizeClasses = DECODE_SIZES, skipped: SkippedKeys | None = None
) -> AttentionBatch:
    places = np.array(places)
    counts = np.broadcast_to(counts, places.shape)
    tables = np.zeros((len(places), int((places + counts).max()) // 16 + 1), dtype=np.int32)
    return AttentionBatch.build(places, counts, tables, 16, skipped_keys=skipped).padded(sizes)


def assert_alike(planner: AttentionPlanner, batch: AttentionBatch, window: int = 0) -> None:
    found, expected = planner(batch), attention_items.plan_arrays(HEADS, window, CLASSES, batch)
    assert found.numbers == expected.numbers
    for one, other in zip(found.arrays, expected.arrays, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


@settings(max_examples=150, deadline=None, backend=UNMUTATED)
@given(data=st.data(), window=st.sampled_from([0, 1, 20, 64, 100]))
def test_any_steps(data: st.DataObject, window: int) -> None:
    planner = AttentionPlanner(HEADS, window, CLASSES)
    places = np.array(data.draw(st.lists(st.integers(0, 700), min_size=1, max_size=12), label="places"))
    with mock.patch.object(attention_items, "PROGRAMS", data.draw(st.sampled_from([1, 30, 528]))):
        for change in data.draw(st.lists(st.sampled_from("ddddddddmcsl"), max_size=12), label="changes"):
            counts, sizes, skipped = 1, DECODE_SIZES, None
            if change == "m":  # others in their places
                places = places.copy()
                places[0] = data.draw(st.integers(0, 700))
            elif change == "c":
                counts = data.draw(
                    st.sampled_from([np.arange(1, len(places) + 1), 1 + (places == places.max())])
                )
                sizes = data.draw(st.sampled_from([CHUNK_SIZES, DECODE_SIZES]))
            elif change == "s" and not window:
                skipped = SkippedKeys(np.full(len(places), 16), places // 2)
            elif change == "l" and len(places) > 1:
                places = places[1:]
            assert_alike(planner, step(places, counts, sizes=sizes, skipped=skipped), window)
            places = places + counts


def test_a_plan_is_made_once_for_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AttentionBatch] = []
    plan_arrays = attention_items.plan_arrays
    monkeypatch.setattr(
        attention_planner, "plan_arrays", lambda *args: made.append(args[-1]) or plan_arrays(*args)
    )
    planner = AttentionPlanner(HEADS, 0, CLASSES)
    for place in range(1000, 1000 + 128):
        assert_alike(planner, step([place, place - 300]))
    assert [batch.num_cached_tokens.tolist() for batch in made] == [
        [1000, 700], [1004, 704], [1024, 724], [1068, 768], [1088, 788]
    ]  # fmt: skip


def test_what_was_planned_is_not_changed() -> None:
    """Nor does it matter what becomes of the numbers of the step before."""
    planner = AttentionPlanner(HEADS, 0, CLASSES)
    batch = step([10])
    first = planner(batch)
    kept = [array.copy() for array in first.arrays]
    batch.num_cached_tokens[:] = 11
    second = planner(step([11]))
    assert all(map(np.array_equal, first.arrays, kept))
    assert not np.array_equal(first.arrays[0], second.arrays[0])
    batch.num_cached_tokens[:] = 500
    assert_alike(planner, step([12]))
