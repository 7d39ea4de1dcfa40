"""Dense layers in Triton: against products in float64, and bit for bit in any company."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from triton_inputs import DEVICE, DTYPES, poisoned, random, strided

from pairwise import pairwise
from quire.kernels.layers.linear import Linear
from quire.kernels.layers.weights import (
    GroupedWeight,
    Weight,
    as_held,
    dequantize,
    quantize_int4,
    quantize_int8,
)
from quire.kernels.reference import ReferenceKernels
from quire.kernels.triton.kernel_set import TritonKernels
from quire.kernels.triton.linear import dense as triton_linear
from quire.kernels.triton.linear import tiled as tiled_linear
from quire.kernels.triton.linear import tma_products
from quire.kernels.triton.linear.tiled import Tile

make_linear = TritonKernels().linear
ROWS = 18  # more than a tile has
SHAPES = [(64, 384), (72, 100), (200, 70), (40, 6), (1, 33)]  # inputs, outputs
TILES = {"own_tile": None, "small_tile": Tile(32, 16, 32, 4, 2)}


@pytest.fixture
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the tiles that layers have, or with one that cuts every shape into several."""
    if request.param is not None:
        monkeypatch.setattr(triton_linear, "tile_of", lambda *_: request.param)
        monkeypatch.setattr(tma_products, "fetched_tile_of", lambda *_: request.param)


def _in_groups(outputs: int, inputs: int, *, bits: int, group_size: int) -> GroupedWeight:
    """Random steps and zeros, and scales that kernels can hold, for weights of up to 4."""
    generator = torch.Generator().manual_seed(0)
    tables = (outputs, inputs // group_size)
    return GroupedWeight(
        torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8),
        as_held(torch.rand(tables, generator=generator) * 4 / (1 << bits)),
        torch.rand(tables, generator=generator) * (1 << bits),
        bits,
    )


def _assert_close(
    linear: Linear,
    rows: torch.Tensor,
    multiplied: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    largest: torch.Tensor | None = None,
) -> None:
    """Compare results for `rows`, of which the layer multiplies `multiplied`, with products in float64.

    And the bits of rows in other company with those that they have together.
    `largest` are the magnitudes of a sum's terms, if they are not those of the weights.
    """
    wide_bias = None if bias is None else bias.double()
    expected = F.linear(multiplied.double(), weight.double(), wide_bias)
    magnitudes = F.linear(
        multiplied.double().abs(),
        (weight if largest is None else largest).double().abs(),
        None if wide_bias is None else wide_bias.abs(),
    )
    wide = strided(poisoned(ROWS, linear.out_features, dtype=torch.float32))
    assert linear(strided(rows), out=wide) is wide
    assert ((wide.cpu().double() - expected).abs() <= magnitudes * 1e-6 + 1e-6).all()
    found = linear(rows)
    assert found.dtype == rows.dtype
    assert torch.equal(found, wide.to(rows.dtype))
    for part in (slice(17, 18), slice(3, 5)):
        assert torch.equal(linear(rows[part].clone()), found[part]), part


def _as_int8(rows: torch.Tensor) -> torch.Tensor:
    """Return what rows are once they are int8 and a scale each, [T, n] float64."""
    values, scales = triton_linear.quantize_rows(rows)
    return values.cpu().double() * scales.cpu().double()[:, None]


@pairwise(indirect=["tile"], tile=TILES, dtype=DTYPES, shape=SHAPES, biased=[False, True])
def test_floats(tile: None, dtype: torch.dtype, shape: tuple[int, int], biased: bool) -> None:
    inputs, outputs = shape
    weight, rows = random(outputs, inputs, dtype=dtype, seed=1).cpu(), random(ROWS, inputs, dtype=dtype)
    bias = random(outputs, seed=2).cpu() if biased else None
    linear = make_linear([weight[:5], weight[5:]], bias, dtype=dtype)
    _assert_close(linear, rows, rows.cpu(), weight, bias)


@pairwise(dtype=DTYPES)
def test_rows_in_int8(dtype: torch.dtype) -> None:
    rows = random(9, 100, dtype=dtype)
    rows[3] = 0.0
    values, scales = triton_linear.quantize_rows(strided(rows))
    expected = quantize_int8(rows.cpu())
    assert torch.equal(scales.cpu(), expected.scales)
    difference = (values.cpu().int() - expected.values.int()).abs()
    assert difference.max() <= 1  # a number just between two steps may go to either
    assert (difference != 0).float().mean() < 0.005
    assert torch.equal(triton_linear.quantize_rows(rows[4:5])[0], values[4:5])


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_what_is_no_number_stays_none_and_in_its_row(quantization: str) -> None:
    rows = random(5, 128, dtype=torch.bfloat16)
    linear = make_linear([random(40, 128, seed=1).cpu()], dtype=torch.bfloat16, quantization=quantization)
    expected = linear(rows)
    rows[1, 7], rows[3, 100] = float("nan"), float("inf")
    found = linear(rows)
    assert not found[[1, 3]].isfinite().any()
    assert torch.equal(found[[0, 2, 4]], expected[[0, 2, 4]])


@pairwise(indirect=["tile"], tile=TILES, dtype=DTYPES, shape=[(72, 100), (200, 70), (40, 6)])
def test_int8(tile: None, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    rows, bias = random(ROWS, inputs, dtype=dtype), random(outputs, seed=2).cpu()
    rows[3] = 0.0
    weight = quantize_int8(random(outputs, inputs, seed=1).cpu())
    linear = make_linear([weight], bias, dtype=dtype)
    _assert_close(linear, rows, _as_int8(rows), dequantize(weight), bias)


@pairwise(
    indirect=["tile"],
    tile=TILES,
    dtype=DTYPES,
    bits=[4, 8],
    groups=[(16, 48), (32, 96), (96, 192), (128, 256)],  # a group's size, inputs
    activations=["int8", "bfloat16"],
)
def test_groups(tile: None, dtype: torch.dtype, bits: int, groups: tuple[int, int], activations: str) -> None:
    group_size, inputs = groups
    rows, bias = random(ROWS, inputs, dtype=dtype), random(70, seed=2).cpu()
    weight = _in_groups(70, inputs, bits=bits, group_size=group_size)
    linear = make_linear([weight], bias, dtype=dtype, int4_activations=activations)
    multiplied = _as_int8(rows) if activations == "int8" else rows.cpu().bfloat16()
    # The kernel takes zeros away from sums, whose terms are larger than the weights' products.
    steps = weight.values.double() + weight.zeros.double().repeat_interleave(group_size, dim=1)
    largest = steps * weight.scales.double().repeat_interleave(group_size, dim=1)
    _assert_close(linear, rows, multiplied, dequantize(weight), bias, largest=largest)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_floats_are_quantized_as_the_reference_does(quantization: str) -> None:
    weight = random(100, 128, seed=3)
    quantized = quantize_int8(weight) if quantization == "int8" else quantize_int4(weight, 64)
    linear = make_linear([weight], dtype=torch.float32, quantization=quantization, group_size=64)
    # A row of the identity shows a column of the weights; of its own steps int8 makes exactly 127.
    found = linear(torch.eye(128, device=DEVICE)).t().cpu()
    torch.testing.assert_close(found, dequantize(quantized).cpu(), rtol=1e-6, atol=1e-6)


KINDS = ["float", "int8", "int4", "grouped_int8"]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(KINDS, 2)])
def test_parts_of_any_kinds(first: str, second: str, quantization: str) -> None:
    make: dict[str, Weight] = {
        "float": random(24, 64, seed=1).cpu(),
        "int8": quantize_int8(random(24, 64, seed=2).cpu()),
        "int4": quantize_int4(random(24, 64, seed=3).cpu(), 32),
        "grouped_int8": _in_groups(24, 64, bits=8, group_size=16),
    }
    parts = [make[first], make[second]]
    rows = random(5, 64)
    options = {"dtype": torch.float32, "quantization": quantization, "group_size": 32}
    expected = ReferenceKernels().linear(parts, **options)(rows.cpu())
    torch.testing.assert_close(make_linear(parts, **options)(rows).cpu(), expected, rtol=1e-5, atol=1e-4)


def test_parts_in_groups_of_different_sizes() -> None:
    parts: list[Weight] = [quantize_int4(random(48, 128, seed=size).cpu(), size) for size in (128, 32, 64)]
    linear = make_linear(parts, dtype=torch.float32, quantization="int4", group_size=128)
    found = linear(torch.eye(128, device=DEVICE)).t().cpu()
    torch.testing.assert_close(found, torch.cat([dequantize(part) for part in parts]), rtol=1e-5, atol=1e-6)


def test_int4_takes_half_a_byte_for_each_weight() -> None:
    values = torch.arange(16, dtype=torch.uint8).repeat(3, 6)  # [3, 96]
    packed = triton_linear.pack_int4(values, 32)
    assert packed.shape == (3, 64)  # the last of three runs has a byte each, too
    runs = torch.stack([packed & 15, packed >> 4], dim=1).unflatten(2, (2, 32)).transpose(1, 2).flatten(1)
    assert torch.equal(runs[:, :96], values)


def test_no_rows_are_no_work() -> None:
    for quantization in ("none", "int8", "int4"):
        linear = make_linear([random(8, 128).cpu()], dtype=torch.float32, quantization=quantization)
        assert linear(random(0, 128)).shape == (0, 8)


def test_what_a_layer_cannot_take_is_refused() -> None:
    linear = make_linear([random(8, 32).cpu()], dtype=torch.float32)
    with pytest.raises(TypeError, match="float64"):
        linear(random(2, 32).double())
    with pytest.raises(ValueError, match="adjacent"):
        linear(random(2, 64)[:, ::2])
    with pytest.raises(ValueError, match="32 features to 8"):
        linear(random(2, 31))
    with pytest.raises(ValueError, match="32 features to 8"):
        linear(random(2, 32), out=random(2, 9))
    with pytest.raises(ValueError, match="groups of 24"):
        make_linear([_in_groups(8, 48, bits=4, group_size=24)], dtype=torch.float32)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("outputs", [64, 1000, 1024, 3072, 5120, 28672, 151936])
def test_one_tile_for_all_numbers_of_rows_up_to_a_power_of_two(
    dtype: torch.dtype, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then steps of powers of two compile the kernels of all others."""
    for module in (tiled_linear, tma_products):
        monkeypatch.setattr(module, "is_interpreted", False)
    chosen = set()
    for exponent in range(12):
        numbers = range((1 << exponent) + 1, (1 << exponent + 1) + 1)
        tiles = {tiled_linear.tile_of(number, 4096, outputs, dtype) for number in numbers}
        fetched = {tma_products.fetched_tile_of(number, outputs, dtype) for number in numbers}
        assert (len(tiles), len(fetched)) == (1, 1)
        chosen |= tiles | fetched
    assert len(chosen) > 4
