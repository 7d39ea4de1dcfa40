"""Two-sided attention over rows of whole prompts: against float64 attention, and its bits in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from native_settings import on_instruction_sets, threads

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


def random_rows(heads: HeadLayout, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return queries, keys and values of each sequence, [length, width]."""
    generator = torch.Generator().manual_seed(1)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return [torch.randn(length, width, generator=generator).to(dtype) for length in LENGTHS]


def attended(kernels: KernelSet, rows: list[torch.Tensor], heads: HeadLayout, **options: Any) -> torch.Tensor:
    lengths = [len(each) for each in rows]
    batch = AttentionBatch.build(
        np.zeros(len(rows)), np.array(lengths), np.zeros((len(rows), max(lengths))), 1
    ).over_rows()
    qkv = torch.cat(rows)
    kv = KVOfRows.of(qkv, heads)
    query = kernels.rotary_and_write_kv(
        qkv, kv, batch, heads=heads, cos=None, sin=None, q_norm=None, k_norm=None, eps=0.0
    )
    return kernels.paged_attention(query, kv, batch, scale=heads.head_dim**-0.5, **options)


def random_bias(heads: HeadLayout, most: int) -> torch.Tensor:
    """Return what is added to scores by distances up to `most`."""
    return torch.randn(heads.num_heads, 2 * most + 1, generator=torch.Generator().manual_seed(2))


def naive(
    rows: torch.Tensor, heads: HeadLayout, window: int = 0, distance_bias: torch.Tensor | None = None
) -> torch.Tensor:
    sizes = [count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
    query, key, value = (
        part.double().view(len(rows), -1, heads.head_dim) for part in rows.split(sizes, dim=-1)
    )
    key, value = (part.repeat_interleave(heads.group, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * heads.head_dim**-0.5
    distance = torch.arange(len(rows)) - torch.arange(len(rows))[:, None]
    if distance_bias is not None:
        most = distance_bias.shape[1] // 2
        scores += distance_bias.double()[:, distance.clamp(-most, most) + most]
    if window:
        scores.masked_fill_(distance.abs() >= window, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_each_token_sees_both_sides(name: str, window: int, dtype: torch.dtype) -> None:
    heads = HeadLayout(4, 2, 32)
    rows = random_rows(heads, dtype)
    found = attended(KERNELS[name], rows, heads, window=window).split(LENGTHS)
    for each, result in zip(rows, found, strict=True):
        expected = naive(each, heads, window)
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("most", "window"), [(0, 0), (7, 9), (50, 0), (128, 200), (1500, 0)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_scores_get_a_bias_by_distance(name: str, most: int, window: int, dtype: torch.dtype) -> None:
    heads = HeadLayout(4, 2, 32)
    rows, bias = random_rows(heads, dtype), random_bias(heads, most)
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
    rows = random_rows(heads, dtype)
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
    rows = random_rows(heads, dtype)
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
    rows = random_rows(heads)
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
        attended(KERNELS[name], random_rows(heads), heads, distance_bias=torch.zeros(shape))


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
