"""Weights in float8: their blocks, their parts, and layers on CPUs, where they become floats."""

from __future__ import annotations

import pytest
import torch

from float8_inputs import quantize_float8, random_blocks
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.interface import KernelSet
from quire.kernels.layers.weights import (
    Float8Weight,
    dequantize,
    part_of,
    quantize_int4,
    quantize_int8,
    scales_of_blocks,
)
from quire.kernels.reference import ReferenceKernels


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [(128, 128), (32, 64), (300, 400), (1, 200), (7, 33)])
def test_every_number_has_the_scale_of_its_block(block: tuple[int, int]) -> None:
    weight = random_blocks(300, 200, block)
    rows, inputs = torch.arange(300) // block[0], torch.arange(200) // block[1]
    assert torch.equal(dequantize(weight), weight.values.float() * weight.scales[rows][:, inputs])
    assert torch.equal(scales_of_blocks(weight, (1, 1)), weight.scales[rows][:, inputs])


RANGES = [
    (0, [range(128, 256)]),
    (0, [range(200, 300)]),
    (0, [range(300), range(8)]),
    (0, [range(64), range(128, 136), range(5)]),
    (0, [range(0, 64, 2), range(1, 64, 2), range(64, 300)]),
    (1, [range(128, 200)]),
    (1, [range(64, 128)]),
    (1, [range(32), range(64, 160)]),
]


@pytest.mark.parametrize("block", [(128, 128), (300, 200), (1, 200), (300, 64)])
@pytest.mark.parametrize(("axis", "ranges"), RANGES)
def test_a_part_has_the_numbers_of_the_whole(block: tuple[int, int], axis: int, ranges: list[range]) -> None:
    weight = random_blocks(300, 200, block)
    chosen = torch.tensor([number for part in ranges for number in part])
    part = part_of(weight, axis, ranges)
    assert isinstance(part, Float8Weight)
    assert torch.equal(dequantize(part), dequantize(weight).index_select(axis, chosen))


@pytest.mark.parametrize("kind", ["float", "int8", "int4"])
def test_rows_in_another_order_keep_their_numbers(kind: str) -> None:
    plain = _random(24, 64)
    weight = {"float": lambda: plain, "int8": lambda: quantize_int8(plain)}.get(
        kind, lambda: quantize_int4(plain, 16)
    )()
    ranges = [range(0, 16, 2), range(1, 16, 2), range(16, 24)]
    chosen = torch.tensor([number for part in ranges for number in part])
    part = part_of(weight, 0, ranges)
    wanted = plain if kind == "float" else dequantize(weight)
    assert torch.equal(part if kind == "float" else dequantize(part), wanted[chosen])


def test_a_part_along_blocks_keeps_them_whole() -> None:
    weight = random_blocks(300, 512, (128, 128))
    for axis, ranges in ((0, [range(128, 300)]), (1, [range(128, 384)])):
        part = part_of(weight, axis, ranges)
        assert isinstance(part, Float8Weight)
        assert part.block == (128, 128)
        assert part.scales.shape == tuple(-(-size // 128) for size in part.values.shape)


def test_blocks_cut_too_small_for_any_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 128, which cannot be divided at 8 and 200"):
        part_of(random_blocks(300, 200, (128, 128)), 1, [range(8, 200)])


KERNELS = pytest.mark.parametrize(
    "kernels", [NativeKernels(), ReferenceKernels()], ids=["native", "reference"]
)


@KERNELS
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_on_cpus_float8_is_what_its_numbers_would_be(kernels: KernelSet, quantization: str) -> None:
    parts = [random_blocks(40, 128, (128, 128)), quantize_float8(_random(24, 128, seed=3))]
    rows = _random(5, 128, seed=4)
    options = {"dtype": torch.float32, "quantization": quantization, "group_size": 64}
    found, expected = (
        kernels.linear(weights, **options)(rows) for weights in (parts, [dequantize(part) for part in parts])
    )
    assert torch.equal(found, expected)


@KERNELS
def test_on_cpus_float8_beside_weights_of_other_kinds(kernels: KernelSet) -> None:
    weight = _random(24, 128, seed=3)
    parts = [quantize_float8(weight), quantize_int8(weight), quantize_int4(weight, 64), weight]
    found = kernels.linear(parts, dtype=torch.float32)(torch.eye(128)).t()
    torch.testing.assert_close(found, torch.cat([dequantize(part) for part in parts]), rtol=1e-6, atol=1e-6)


@KERNELS
def test_on_cpus_floats_do_not_become_float8(kernels: KernelSet) -> None:
    with pytest.raises(ValueError, match="only the kernels for GPUs have"):
        kernels.linear([_random(8, 64)], dtype=torch.float32, quantization="fp8")


def test_wrong_tensors_are_refused_before_native_code_reads_them() -> None:
    weight = random_blocks(40, 128, (128, 64))
    with pytest.raises(ValueError, match=r"float8 weight's scales is \[1, 1\]; it must be \[1, 2\]"):
        PackedLinear([Float8Weight(weight.values, weight.scales[:, :1], (128, 64))], dtype=torch.float32)
    wrong = Float8Weight(weight.values.view(torch.uint8), weight.scales, (128, 64))
    with pytest.raises(TypeError, match=r"float8 weight is torch\.uint8; it must be torch\.float8_e4m3fn"):
        PackedLinear([wrong], dtype=torch.float32)
