"""The sizes by which memory is planned are those of the kernels."""

from __future__ import annotations

import pytest

from quire.kernels import bounds
from quire.kernels.attention import paged as attention
from quire.kernels.attention import tiles
from quire.kernels.cpu import _native
from quire.kernels.sampling import row_scans as sampling

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
