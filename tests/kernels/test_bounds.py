"""The sizes by which memory is planned are those of the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from caches import make_cache
from quire.kernels import attention, bounds, sampling, tiles
from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu import _native
from quire.kernels.cpu.layers import native_layer, native_plan

SHARED = [
    "TILE", "SPAN", "HEAD_DIM_MULTIPLE", "MAX_HEAD_DIM", "MAX_SPAN_BYTES",
    "MIN_HEAD_TOKENS", "MAX_HEAD_TOKENS", "SCORE_UNIT",
]  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_a_bound_is_that_of_the_native_kernels(name: str) -> None:
    assert getattr(bounds, name) == getattr(_native, name)


def test_the_reference_uses_the_bounds() -> None:
    assert attention.TILE is tiles.TILE is bounds.TILE
    assert tiles.SCRATCH_FLOATS is bounds.SCRATCH_FLOATS
    assert sampling.MAX_HEAD_TOKENS is bounds.MAX_HEAD_TOKENS


@pytest.mark.parametrize(("num_seqs", "num_kv_heads"), [(1, 8), (1, 55), (6, 8), (55, 1)])
@pytest.mark.parametrize("length", [500, 5000, 20_000])
def test_attention_of_fourteen_threads_stays_within_its_bounds(
    num_seqs: int, num_kv_heads: int, length: int
) -> None:
    tables = np.arange(num_seqs * -(-length // 16)).reshape(num_seqs, -1)
    batch = AttentionBatch.build(np.full(num_seqs, length - 1), np.full(num_seqs, 1), tables, 16)
    layer = native_layer(make_cache(1, 1, num_kv_heads, 16, 128, torch.float32).views[0])
    needed = native_plan(batch, window=0, group=4).scratch_bytes(layer, num_threads=14)
    spans = -(-length // bounds.SPAN)
    states = min(spans * bounds.SPAN_BYTES, bounds.MAX_SPAN_BYTES) if spans > 1 else 0
    assert needed <= states + bounds.THREAD_BYTES
    if length == 5000 and num_seqs * num_kv_heads == 55:  # as much as a span can take
        assert needed >= 0.9 * states
