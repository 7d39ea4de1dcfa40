"""Dense layers in float8 in Triton: the numbers that torch makes of rows, and products against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton_inputs import DEVICE, DTYPES, poisoned, random, strided

from float8_inputs import quantize_float8, random_blocks
from pairwise import pairwise
from quire.errors import ConfigError
from quire.kernels.layers.weights import Weight, dequantize, quantize_int8
from quire.kernels.triton.device import is_interpreted, nearest_float8
from quire.kernels.triton.kernel_set import TritonKernels
from quire.kernels.triton.linear import float8 as float8_linear
from quire.kernels.triton.linear import tma_products
from quire.kernels.triton.linear.float8 import quantize_float8_rows
from quire.kernels.triton.linear.tiled import Tile

make_linear = TritonKernels().linear
ROWS = 18  # more than a tile has
TILES = {"own_tile": None, "small_tile": Tile(32, 16, 32, 4, 2)}
# Half the last bit of float32; on Hopper, sums of float8 products have some 14 bits (DeepSeek-V3, 3.3.2).
ROUNDING = 2.0**-24 if is_interpreted else 2.0**-14


@pytest.fixture
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the tiles that layers have, or with one that cuts every shape into several."""
    if request.param is not None:
        monkeypatch.setattr(float8_linear, "tile_of", lambda *_: request.param)
        monkeypatch.setattr(tma_products, "fetched_tile_of", lambda *_: request.param)


def _octets(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().contiguous().view(torch.uint8)


@triton.jit
def convert_kernel(floats, values):
    place = tl.arange(0, 1024)
    tl.store(values + place, nearest_float8(tl.load(floats + place)))


def test_float8_is_the_nearest_and_448_stands_for_what_is_larger() -> None:
    """Every number of float8, what lies between two, and the float32 numbers beside all of these."""
    octets = torch.arange(127, dtype=torch.uint8)
    numbers = octets.view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    exact = torch.cat([numbers, between, torch.tensor([449.0, 464.0, 465.0, 1e30, torch.inf])])
    floats = torch.cat([exact, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(0.0))])
    floats = torch.cat([floats, -floats])
    floats = F.pad(floats, (0, 1024 - len(floats)), value=torch.nan)
    values = torch.empty(1024, dtype=torch.float8_e4m3fn, device=DEVICE)
    convert_kernel[(1,)](floats.to(DEVICE), values)
    expected = floats.clamp(-448, 448).to(torch.float8_e4m3fn)
    is_number = ~floats.isnan()
    assert torch.equal(_octets(values)[is_number], _octets(expected)[is_number])
    assert values.cpu().float()[~is_number].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "group"), [(100, 100), (200, 128), (96, 32)])
def test_rows_are_quantized_as_torch_does(dtype: torch.dtype, inputs: int, group: int) -> None:
    rows = random(ROWS, inputs, dtype=dtype)
    rows[3] = 0.0
    rows[4] = torch.finfo(dtype).max
    rows[5] *= 1024 * torch.finfo(dtype).tiny
    rows[6, 50:] = 0.0
    values, scales = quantize_float8_rows(strided(rows), group)
    assert values.dtype == torch.float8_e4m3fn
    for index, columns in enumerate(rows.cpu().float().split(group, dim=1)):
        found = values[:, index * group : (index + 1) * group]
        expected = quantize_float8(columns)
        assert torch.equal(scales[index].cpu(), expected.scales[:, 0])
        assert torch.equal(_octets(found), _octets(expected.values))
        assert found[[0, 4]].cpu().float().abs().amax(dim=1).tolist() == [448.0, 448.0]
    alone = quantize_float8_rows(rows[7:8], group)
    assert torch.equal(_octets(alone[0]), _octets(values[7:8]))


def test_a_number_is_off_by_half_a_step_of_float8() -> None:
    rows = random(30, 200) * random(30, 1, seed=2).exp()
    rows[3] = 0.0
    rows[4] = 3e38
    rows[5] = torch.finfo(torch.float32).smallest_normal / 4
    scales = quantize_float8_rows(rows, 200)[1][0].cpu().double()[:, None]
    error = (_multiplied(rows, 200) - rows.cpu().double()).abs()
    # 4 significant bits, or half of the steps of 2^-9 near 0; and the rounding of the scale's inverse.
    bound = torch.maximum(rows.cpu().double().abs() / 16, scales * 2**-10) * (1 + 2**-20)
    assert (error <= bound).all()


def _multiplied(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Return what rows are once they are float8 and scales, [T, n] float64."""
    values, scales = quantize_float8_rows(rows, group)
    wide = scales.cpu().double().t().repeat_interleave(group, dim=1)[:, : rows.shape[1]]
    return values.cpu().double() * wide


def _assert_close(parts: list[Weight], rows: torch.Tensor, group: int, bias: torch.Tensor | None) -> None:
    """Compare a layer with products in float64, and the bits of rows in any company.

    A product of two float8 numbers is exact in float32. A sum of n of them in any order is off by at most
    n roundings of the sum of their magnitudes; each sum is scaled and added to the others, which takes three
    more, and there are roundings of scales, of the bias, and of numbers beside that bound.
    """
    linear = make_linear(parts, bias, dtype=torch.float32)
    weight = torch.cat([dequantize(part).double() for part in parts])
    multiplied = _multiplied(rows, group)
    wide_bias = None if bias is None else bias.double()
    expected = F.linear(multiplied, weight, wide_bias)
    magnitudes = F.linear(multiplied.abs(), weight.abs(), None if wide_bias is None else wide_bias.abs())
    out = strided(poisoned(len(rows), linear.out_features, dtype=torch.float32))
    assert linear(strided(rows), out=out) is out
    roundings = linear.in_features + 3 * -(-linear.in_features // 32) + 4
    assert ((out.cpu().double() - expected).abs() <= roundings * ROUNDING * magnitudes).all()
    found = linear(rows)
    assert torch.equal(found, out.to(rows.dtype))
    for part in (slice(17, 18), slice(3, 5)):
        assert torch.equal(linear(rows[part].clone()), found[part]), part


@pairwise(
    indirect=["tile"],
    tile=TILES,
    dtype=DTYPES,
    shape=[(64, 96), (200, 40), (1, 6)],
    biased=[False, True],
)
def test_a_scale_for_each_row(tile: None, dtype: torch.dtype, shape: tuple[int, int], biased: bool) -> None:
    inputs, outputs = shape
    rows = random(ROWS, inputs, dtype=dtype)
    rows[3] = 0.0
    bias = random(outputs, seed=2).cpu() if biased else None
    weight = quantize_float8(random(outputs, inputs, seed=1).cpu())
    whole = random_blocks(outputs, inputs, (outputs, inputs), seed=3)
    _assert_close([weight, whole], rows, inputs, None if bias is None else torch.cat([bias, bias]))


@pairwise(
    indirect=["tile"],
    tile=TILES,
    dtype=[torch.float32, torch.bfloat16],
    block=[(128, 128), (32, 64), (50, 96), (128, 256)],
    outputs=[(70,), (32, 64, 10)],
)
def test_a_scale_for_each_block(
    tile: None, dtype: torch.dtype, block: tuple[int, int], outputs: tuple[int, ...]
) -> None:
    inputs = block[1] + 40
    rows = random(ROWS, inputs, dtype=dtype)
    rows[3] = 0.0
    parts = [random_blocks(each, inputs, block, seed=index) for index, each in enumerate(outputs)]
    group = {96: 32, 256: 128}.get(block[1], block[1])
    _assert_close([*parts], rows, group, random(sum(outputs), seed=2).cpu())


def test_parts_with_scales_for_rows_and_for_blocks_of_several_sizes() -> None:
    parts: list[Weight] = [
        random_blocks(48, 256, (128, 128)),
        quantize_float8(random(20, 256, seed=5).cpu()),
        random_blocks(64, 256, (32, 64)),
        random_blocks(9, 256, (9, 256)),
    ]
    _assert_close(parts, random(ROWS, 256), 64, None)


def test_huge_rows_stay_finite_and_zeros_stay_zeros() -> None:
    weight = torch.eye(64)
    weight[5] = 0.0
    rows = torch.full((2, 64), 3e38, device=DEVICE)
    rows[1] = 0.0
    found = make_linear([weight], dtype=torch.float32, quantization="fp8")(rows).cpu()
    expected = torch.full((64,), 3e38)
    expected[5] = 0.0
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=0.0)
    assert not found[1].any()


def test_floats_become_float8_with_a_scale_for_each_row() -> None:
    weight = random(100, 128, seed=3).cpu()
    linear = make_linear([weight[:30], weight[30:]], dtype=torch.float32, quantization="fp8")
    found = linear(torch.eye(128, device=DEVICE)).t().cpu()
    torch.testing.assert_close(found, dequantize(quantize_float8(weight)), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_parts_of_other_kinds_beside_float8_are_not_lost(quantization: str) -> None:
    weight = random(24, 64, seed=3).cpu()
    parts: list[Weight] = [weight, quantize_float8(weight), quantize_int8(weight)]
    found = make_linear(parts, dtype=torch.float32, quantization=quantization)(torch.eye(64, device=DEVICE))
    torch.testing.assert_close(found.t().cpu(), weight.repeat(3, 1), rtol=0.1, atol=0.05)


def test_float8_stays_whatever_else_is_wanted() -> None:
    weight = random_blocks(130, 256, (128, 128))
    rows = random(3, 256)
    results = [
        make_linear([weight], dtype=torch.bfloat16, quantization=wanted)(rows)
        for wanted in ("none", "int8", "int4", "fp8")
    ]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_blocks_that_kernels_do_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 16 inputs; a group must have a multiple of 32"):
        make_linear([random_blocks(8, 96, (8, 48))], dtype=torch.float32)


def test_gpus_that_do_not_multiply_float8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_linear, "compute_capability", lambda: 80)
    with pytest.raises(ConfigError, match=r"from compute capability 8\.9 on, and this one has 8\.0; set Eng"):
        make_linear([random_blocks(8, 64, (8, 32))], dtype=torch.float32)


def test_no_rows_are_no_work() -> None:
    assert make_linear([random_blocks(8, 64, (8, 32))], dtype=torch.float32)(random(0, 64)).shape == (0, 8)
