"""Dense layers: against products in float64, and bit for bit whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from native_settings import on_instruction_sets, threads

from pairwise import pairwise
from quire.kernels.cpu import _native
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.cpu.linear import MAX_INPUTS, PackedLinear, PackedMatrix
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.devices.torch_internals import has_onednn_bfloat16
from quire.kernels.layers.linear import FloatLinear, Linear, OneDnnLinear
from quire.kernels.layers.weights import (
    INT6_ZERO,
    GroupedWeight,
    Int8Weight,
    Weight,
    as_held,
    dequantize,
    quantize_int4,
    quantize_int8,
)
from quire.kernels.reference import ReferenceKernels

reference_linear = ReferenceKernels().linear
ROWS = 70
COUNTS = [*range(1, 18), 24, 25, 31, 64, 69]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 384), (72, 100), (256, 769), (333, 1000), (40, 6), (1, 33)]  # inputs, outputs
# Relative to the sum of magnitudes of a sum's terms: what sums in float32, or bfloat16 results, may be off.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _in_groups(outputs: int, inputs: int, *, bits: int, group_size: int) -> GroupedWeight:
    """Random steps and zeros, and scales that kernels can hold, for weights of up to 4."""
    generator = torch.Generator().manual_seed(0)
    tables = (outputs, inputs // group_size)
    return GroupedWeight(
        torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8),
        as_held(torch.rand(tables, generator=generator) * 4 / (1 << bits)),
        torch.full(tables, INT6_ZERO)
        if bits == 6
        else torch.randint(0, 1 << bits, tables, generator=generator).float(),
        bits,
    )


def _assert_rows_keep_their_bits(linear: Linear, rows: torch.Tensor) -> None:
    expected = linear(rows)
    for count in COUNTS:
        for start in (0, len(rows) - count):
            part = linear(rows[start : start + count].clone())
            assert torch.equal(part, expected[start : start + count]), (count, start)


def _assert_close(
    linear: Linear, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    wide, matrix = rows.double(), weight.double()
    expected = F.linear(wide, matrix, None if bias is None else bias.double())
    magnitude = F.linear(wide.abs(), matrix.abs(), None if bias is None else bias.double().abs())
    error = (linear(rows).double() - expected).abs()
    assert (error <= magnitude * ROUNDING[rows.dtype] + 1e-6).all()


@on_instruction_sets(dtype=DTYPES, shape=SHAPES, biased=[False, True])
def test_floats(instruction_set: str, dtype: torch.dtype, shape: tuple[int, int], biased: bool) -> None:
    inputs, outputs = shape
    weight, rows = _random(outputs, inputs, dtype=dtype, seed=1), _random(ROWS, inputs, dtype=dtype)
    bias = _random(outputs, seed=2) if biased else None
    linear = PackedLinear([weight[:5], weight[5:]], bias, dtype=dtype)
    _assert_close(linear, rows, weight, bias)
    _assert_rows_keep_their_bits(linear, rows)


@pytest.mark.formats
@pytest.mark.first_case
@pairwise(dtype=DTYPES, shape=SHAPES)
def test_the_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    weight, rows = _random(outputs, inputs, dtype=dtype, seed=1), _random(ROWS, inputs, dtype=dtype)
    linear = reference_linear([weight], dtype=dtype)
    uses_onednn = dtype == torch.bfloat16 and has_onednn_bfloat16()
    assert isinstance(linear, OneDnnLinear if uses_onednn else FloatLinear)
    _assert_close(linear, rows, weight, None)
    if dtype != torch.float16:  # for which the reference is not batch-invariant, see docs/cpu.md
        _assert_rows_keep_their_bits(linear, rows)


@on_instruction_sets(dtype=DTYPES, shape=[(72, 100), (333, 1000), (2048, 40)])
def test_int8(instruction_set: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    weight, rows = _random(outputs, inputs, dtype=dtype, seed=1), _random(ROWS, inputs, dtype=dtype)
    bias = _random(outputs, seed=2)
    linear = PackedLinear([weight], bias, dtype=dtype, quantization="int8")
    # Exact sums of the same quantized numbers, but one just between two steps may go to either.
    expected = reference_linear([weight], bias, dtype=dtype, quantization="int8")(rows).double()
    difference = (linear(rows).double() - expected).abs()
    assert (difference <= expected.abs() * ROUNDING[dtype] + 0.02 * inputs**0.5).all()
    if dtype == torch.float32:
        assert (difference > 1e-4).float().mean() < 0.01
    _assert_rows_keep_their_bits(linear, rows)


@on_instruction_sets(dtype=DTYPES, group_size=[32, 128], shape=[(128, 100), (384, 1000)])
def test_int4_times_int8(
    instruction_set: str, dtype: torch.dtype, group_size: int, shape: tuple[int, int]
) -> None:
    inputs, outputs = shape
    rows, bias = _random(ROWS, inputs, dtype=dtype), _random(outputs, seed=2)
    weight = quantize_int4(_random(outputs, inputs, seed=1), group_size)
    zeros = (_random(*weight.zeros.shape, seed=3).abs() * 8).half().float()
    weight = GroupedWeight(weight.values, weight.scales, zeros, bits=4)
    linear = PackedLinear([weight], bias, dtype=dtype)
    expected = reference_linear([weight], bias, dtype=torch.float32)(rows.float())
    difference = (linear(rows).float() - expected).abs()
    # Exact sums of the same quantized numbers, but one just between two steps may go to either.
    step = rows.float().abs().amax(dim=1, keepdim=True) / 127 * dequantize(weight).abs().max()
    assert (difference <= expected.abs() * ROUNDING[dtype] + 3 * step + 1e-3).all()
    if dtype == torch.float32:
        assert (difference > 1e-4 * inputs**0.5).float().mean() < 0.01
    _assert_rows_keep_their_bits(linear, rows)


@on_instruction_sets(dtype=DTYPES, group_size=[16, 32, 128], activations=["int8", "bfloat16"], bits=[6, 8])
def test_6_and_8_bits_in_groups(
    instruction_set: str, dtype: torch.dtype, group_size: int, activations: str, bits: int
) -> None:
    rows, bias = _random(ROWS, 384, dtype=dtype), _random(100, seed=2)
    weight = _in_groups(100, 384, bits=bits, group_size=group_size)
    linear = PackedLinear([weight], bias, dtype=dtype, int4_activations=activations)
    reference = reference_linear([weight], bias, dtype=torch.float32, int4_activations=activations)
    expected = reference(rows.float())
    difference = (linear(rows).float() - expected).abs()
    # As above: in int8, a number just between two steps may go to either.
    step = rows.float().abs().amax(dim=1, keepdim=True) / 127 * dequantize(weight).abs().max()
    bound = expected.abs() * ROUNDING[dtype] + 0.02 + 3 * step * (activations == "int8")
    assert (difference <= bound).all()
    if dtype == torch.float32:
        assert (difference > 0.02).float().mean() < 0.01
    _assert_rows_keep_their_bits(linear, rows)


def _in_mxfp4(outputs: int, inputs: int) -> GroupedWeight:
    """Every number of E2M1, by scales of 2^-9 to 2^-1."""
    generator = torch.Generator().manual_seed(0)
    doubles = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12]) + 128
    values = doubles[torch.randint(0, len(doubles), (outputs, inputs), generator=generator)]
    exponents = torch.randint(-10, -1, (outputs, inputs // 32), generator=generator)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents)
    return GroupedWeight(values.to(torch.uint8), scales, torch.full_like(scales, 128), bits=8, is_mxfp4=True)


@on_instruction_sets(dtype=DTYPES, activations=["int8", "bfloat16"], shape=[(32, 16), (96, 100), (384, 70)])
def test_mxfp4(instruction_set: str, dtype: torch.dtype, activations: str, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    weight, rows = _in_mxfp4(outputs, inputs), _random(ROWS, inputs, dtype=dtype)
    linear = PackedLinear([weight], dtype=dtype, int4_activations=activations)
    matrix = dequantize(weight)
    multiplied = dequantize(quantize_int8(rows)) if activations == "int8" else rows.bfloat16()
    exact = multiplied.double() @ matrix.double().t()
    magnitude = multiplied.double().abs() @ matrix.double().abs().t()
    rounding, error = magnitude * ROUNDING[dtype], (linear(rows).double() - exact).abs()
    # In int8, a number of a row just between two steps may go to either; nothing else is beyond rounding.
    step = rows.float().abs().amax(dim=1, keepdim=True) / 127 * matrix.abs().max()
    assert (error <= rounding + 2 * step * (activations == "int8")).all()
    if dtype == torch.float32:
        assert (error > rounding).double().mean() < 0.01
    _assert_rows_keep_their_bits(linear, rows)


def test_mxfp4_is_held_exactly(instruction_set: str) -> None:
    weight = _in_mxfp4(70, 64)
    exponents = torch.arange(140).view(70, 2) * 251 // 139 - 127  # with more, doubles are infinite
    scales = torch.ldexp(torch.ones(70, 2), exponents - 1)
    weight = GroupedWeight(weight.values, scales, weight.zeros, bits=8, is_mxfp4=True)
    linear = PackedLinear([weight], dtype=torch.float32, int4_activations="bfloat16")
    assert torch.equal(linear(torch.eye(64)).t(), dequantize(weight))
    assert _native.packed_bytes(_native.WeightFormat.mxfp4.value, 96, 64, 32) == 96 * (64 // 2 + 2)


@pytest.mark.formats
@pytest.mark.first_case
@on_instruction_sets(dtype=DTYPES, group_size=[32, 128], shape=[(128, 100), (384, 1000)])
def test_int4_times_bfloat16(
    instruction_set: str, dtype: torch.dtype, group_size: int, shape: tuple[int, int]
) -> None:
    inputs, outputs = shape
    rows = _random(ROWS, inputs, dtype=dtype)
    quantized = quantize_int4(_random(outputs, inputs, seed=1), group_size)
    linear = PackedLinear([quantized], dtype=dtype, int4_activations="bfloat16")
    exact = reference_linear([quantized], dtype=torch.float32, int4_activations="bfloat16")(rows.float())
    error = (linear(rows).float() - exact).abs()
    assert (error <= exact.abs() * ROUNDING[dtype] + 1e-3 * inputs**0.5).all()
    _assert_rows_keep_their_bits(linear, rows)


@pytest.mark.parametrize("inputs", [256, 192])
def test_packing_quantizes_like_the_reference(instruction_set: str, inputs: int) -> None:
    weight = _random(100, inputs, seed=3)
    identity = torch.eye(inputs)
    group_size = 128 if inputs == 256 else 64
    for quantization, quantized, num_steps in (
        ("int8", dequantize(quantize_int8(weight)), 127),
        ("int6", _in_6_bits(weight, group_size), 31),
        ("int4", dequantize(quantize_int4(weight, group_size)), 8),
    ):
        linear = PackedLinear([weight], dtype=torch.float32, quantization=quantization, group_size=group_size)
        # A row of the identity shows a column of the weights; of its own steps int8 makes exactly 127.
        difference = (linear(identity).t() - quantized).abs()
        assert (difference > 1e-5).float().mean() < 1e-3  # numbers just between two steps
        assert difference.max() <= weight.abs().max() / num_steps * 1.01


def _in_6_bits(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """Round to multiples of a 31st of the largest magnitude of a group."""
    groups = weight.reshape(len(weight), -1, group_size)
    scales = as_held(groups.abs().amax(dim=2) / 31).unsqueeze(2)
    return ((groups / scales).round().clamp(-32, 31) * scales).flatten(1)


@pytest.mark.parametrize(
    ("inputs", "kind", "group_size"), [(384, "int6", 128), (48, "int6", 16), (40, "int8", 0)]
)
def test_6_bits_are_in_the_largest_groups_that_fit(inputs: int, kind: str, group_size: int) -> None:
    matrix = PackedMatrix([_random(40, inputs)], dtype=torch.float32, quantization="int6", group_size=32)
    assert matrix.layout == (_native.WeightFormat[kind].value, 40, inputs, group_size)


def test_6_bits_are_not_for_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bits in (("avx2", 6), ("avx512bf16", 6), ("amx", 8)):
        monkeypatch.setattr(_native, "instruction_set", lambda name=name: name)
        assert NativeKernels().output_bits() == bits


KINDS = ["float", "int8", "int4", "int6", "grouped_int8", "mxfp4"]


@pairwise(first=KINDS, second=KINDS)
def test_parts_of_any_kinds(first: str, second: str) -> None:
    make: dict[str, Weight] = {
        "float": _random(48, 64, seed=1),
        "int8": quantize_int8(_random(48, 64, seed=2)),
        "int4": quantize_int4(_random(48, 64, seed=3), 32),
        "int6": _in_groups(48, 64, bits=6, group_size=16),
        "grouped_int8": _in_groups(48, 64, bits=8, group_size=16),
        "mxfp4": _in_mxfp4(48, 64),
    }
    parts = [make[first], make[second]]
    rows = _random(5, 64)
    expected = torch.cat([F.linear(rows, dequantize(part)) for part in parts], dim=1)
    for linear_of in (PackedLinear, NativeKernels().linear, reference_linear):
        linear = linear_of(parts, dtype=torch.float32)
        torch.testing.assert_close(linear(rows), expected, atol=0.5, rtol=0.02)


@pytest.mark.parametrize("first", ["float", "int8", "int4-64", "int4-128"])
def test_parts_in_groups_of_another_size_than_asked_for(first: str) -> None:
    make: dict[str, Weight] = {
        "float": _random(48, 256, seed=1),
        "int8": quantize_int8(_random(48, 256, seed=1)),
        "int4-64": quantize_int4(_random(48, 256, seed=1), 64),
        "int4-128": quantize_int4(_random(48, 256, seed=1), 128),
    }
    kept = quantize_int4(_random(48, 256, seed=2), 32)
    linear = PackedLinear([make[first], kept], dtype=torch.float32, quantization="int4", group_size=128)
    found = linear(torch.eye(256)).t()
    expected = torch.cat([dequantize(make[first]), dequantize(kept)])
    exact = slice(0 if first.startswith("int4") else 48, None)
    torch.testing.assert_close(found[exact], expected[exact], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.4)


def test_asymmetric_int4() -> None:
    weight = _in_groups(40, 128, bits=4, group_size=32)
    rows = _random(7, 128, dtype=torch.bfloat16)
    linear = PackedLinear([weight], dtype=torch.bfloat16, int4_activations="bfloat16")
    expected = F.linear(rows.double(), dequantize(weight).double())
    torch.testing.assert_close(linear(rows).double(), expected, rtol=2**-7, atol=0.05)


def test_int8_from_a_checkpoint_keeps_its_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (33, 96), generator=generator, dtype=torch.int8)
    weight = Int8Weight(values, torch.rand(33, generator=generator))
    linear = PackedLinear([weight], dtype=torch.float32)
    torch.testing.assert_close(linear(torch.eye(96)).t(), dequantize(weight), rtol=1e-6, atol=0)


@pairwise(dtype=DTYPES)
def test_strided_rows_and_results_of_another_type(dtype: torch.dtype) -> None:
    weight, wide = _random(50, 64, dtype=dtype, seed=1), _random(9, 200, dtype=dtype)
    rows = wide[:, 10:74]
    linear = PackedLinear([weight], dtype=dtype)
    out = torch.full((9, 70), torch.nan)[:, 3:53]
    assert linear(rows, out=out) is out
    torch.testing.assert_close(out, F.linear(rows.float(), weight.float()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_any_number_of_threads_gives_the_same_bits(quantization: str) -> None:
    linear = PackedLinear([_random(300, 128)], dtype=torch.bfloat16, quantization=quantization)
    rows = _random(40, 128, dtype=torch.bfloat16)
    results = []
    for num_threads in (1, 2, 5):
        with threads(num_threads):
            results.append(linear(rows))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_row_of_zeros_and_one_of_nan_stay_what_they_are() -> None:
    weight = _random(20, 64)
    for quantization in ("none", "int8", "int4"):
        linear = PackedLinear([weight], dtype=torch.float32, quantization=quantization, group_size=32)
        rows = torch.zeros(3, 64)
        rows[1, 5] = torch.nan
        result = linear(rows)
        assert (result[[0, 2]] == 0).all()
        assert result[1].isnan().all(), quantization


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_no_rows_give_none(quantization: str) -> None:
    linear = PackedLinear([_random(20, 128)], dtype=torch.float32, quantization=quantization)
    assert linear(torch.empty(0, 128)).shape == (0, 20)


def test_what_the_kernel_cannot_take_is_refused() -> None:
    linear = PackedLinear([_random(20, 64)], dtype=torch.float32)
    rows = _random(3, 64)
    with pytest.raises(ValueError, match=r"rows is \(3, 63\)"):
        linear(rows[:, 1:])
    with pytest.raises(ValueError, match="numbers adjacent"):
        linear(_random(64, 3).t())
    with pytest.raises(ValueError, match=r"out is \(3, 21\)"):
        linear(rows, out=torch.empty(3, 21))
    with pytest.raises(TypeError, match=r"torch\.float64"):
        linear(rows.double())


def test_too_many_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=str(MAX_INPUTS)):
        PackedLinear([torch.empty(1, MAX_INPUTS + 1)], dtype=torch.float32)


def test_buffers_do_not_overlap_and_are_aligned() -> None:
    memory = WeightMemory()
    buffers = [memory.allocate(size) for size in (1, 100, 1 << 26, 64, (1 << 26) + 1, 7)]
    for number, buffer in enumerate(buffers):
        assert buffer.data_ptr() % 64 == 0
        buffer.fill_(number)
    for number, buffer in enumerate(buffers):
        assert (buffer == number).all()
