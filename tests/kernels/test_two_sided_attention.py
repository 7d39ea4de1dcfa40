"""Two-sided attention over rows of whole prompts: against float64 attention, and its bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_settings import on_instruction_sets, threads
from row_attention import attended, naive, random_bias, random_rows

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVOfRows
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.interface import KernelSet
from quire.kernels.reference import ReferenceKernels

KERNELS: dict[str, KernelSet] = {"native": NativeKernels(), "reference": ReferenceKernels()}
LENGTHS = [1, 130, 2, 64, 65, 5, 63, 1100]
WINDOWS = (0, 1, 9, 65, 2000)
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_each_token_sees_both_sides(name: str, window: int, dtype: torch.dtype) -> None:
    heads = HeadLayout(4, 2, 32)
    rows = random_rows(LENGTHS, heads, dtype)
    found = attended(KERNELS[name], rows, heads, window=window).split(LENGTHS)
    for each, result in zip(rows, found, strict=True):
        expected = naive(each, heads, window)
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("most", "window"), [(0, 0), (7, 9), (50, 0), (128, 200), (1500, 0)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_scores_get_a_bias_by_distance(name: str, most: int, window: int, dtype: torch.dtype) -> None:
    heads = HeadLayout(4, 2, 32)
    rows, bias = random_rows(LENGTHS, heads, dtype), random_bias(heads, most)
    found = attended(KERNELS[name], rows, heads, window=window, distance_bias=bias).split(LENGTHS)
    for each, result in zip(rows, found, strict=True):
        expected = naive(each, heads, window, bias)
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=0)
        if most and len(each) > 1:
            without = naive(each, heads, window)
            assert (expected - without).abs().max() > 4 * TOLERANCES[dtype]


@pytest.mark.parametrize(("window", "most"), [(0, None), (9, None), (0, 70), (0, 3)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_bits_do_not_depend_on_company(name: str, dtype: torch.dtype, window: int, most: int | None) -> None:
    heads = HeadLayout(3, 3, 16)
    rows = random_rows(LENGTHS, heads, dtype)
    options = {"window": window, "distance_bias": None if most is None else random_bias(heads, most)}
    together = attended(KERNELS[name], rows, heads, **options).split(LENGTHS)
    backwards = attended(KERNELS[name], rows[::-1], heads, **options).split(LENGTHS[::-1])
    for each, one, other in zip(rows, together, reversed(backwards), strict=True):
        alone = attended(KERNELS[name], [each], heads, **options)
        assert torch.equal(alone, one)
        assert torch.equal(alone, other)


@on_instruction_sets(dtype=list(TOLERANCES), most=[None, 20, 128])
def test_threads_change_no_bit(instruction_set: str, dtype: torch.dtype, most: int | None) -> None:
    heads = HeadLayout(4, 4, 64)
    rows = random_rows(LENGTHS, heads, dtype)
    bias = None if most is None else random_bias(heads, most)
    expected = attended(KERNELS["native"], rows, heads, distance_bias=bias)
    with threads(3):
        assert torch.equal(attended(KERNELS["native"], rows, heads, distance_bias=bias), expected)
    for each, result in zip(rows, expected.split(LENGTHS), strict=True):
        alone = attended(KERNELS["native"], [each], heads, distance_bias=bias)
        assert torch.equal(alone, result)
        exact = naive(each, heads, distance_bias=bias)
        torch.testing.assert_close(result.double(), exact, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("name", KERNELS)
def test_a_token_that_is_not_finite_spoils_its_own_sequence_only(name: str, most: int | None) -> None:
    heads = HeadLayout(4, 2, 32)
    rows = random_rows(LENGTHS, heads)
    options = {"window": 9, "distance_bias": None if most is None else random_bias(heads, most)}
    expected = attended(KERNELS[name], rows, heads, **options).split(LENGTHS)
    rows[1][100] = float("nan")
    found = attended(KERNELS[name], rows, heads, **options).split(LENGTHS)
    assert found[1][100].isnan().all()
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if number != 1:
            assert torch.equal(one, other)
    if name == "reference":
        return  # a tile is multiplied whole
    is_spoilt = found[1].isnan().flatten(1).any(1)
    assert torch.equal(is_spoilt.nonzero().flatten(), torch.arange(92, 109))
    assert torch.equal(found[1][~is_spoilt], expected[1][~is_spoilt])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(4, 8), (3, 9), (4, 9, 1), (36,)], ids=str)
def test_a_bias_of_another_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    heads = HeadLayout(4, 2, 32)
    with pytest.raises(ValueError, match=r"distance_bias is .* it must be \[4, an odd number\]"):
        attended(KERNELS[name], random_rows(LENGTHS, heads), heads, distance_bias=torch.zeros(shape))


@pytest.mark.parametrize("name", KERNELS)
def test_a_bias_is_for_two_sided_batches_only(name: str) -> None:
    batch = AttentionBatch.build(np.array([0]), np.array([1]), np.array([[0]]), 1)
    kv = KVOfRows(torch.zeros(2, 1, 1, 32), torch.zeros(2, 1, 1, 32))
    with pytest.raises(ValueError, match="a batch that is not two-sided"):
        KERNELS[name].paged_attention(
            torch.zeros(1, 4, 32), kv, batch, scale=1.0, distance_bias=torch.zeros(4, 3)
        )


def test_prompts_must_be_whole() -> None:
    batch = AttentionBatch.build(np.array([3]), np.array([2]), np.zeros((1, 5)), 1)
    with pytest.raises(ValueError, match="prompts must be computed whole"):
        batch.over_rows()
