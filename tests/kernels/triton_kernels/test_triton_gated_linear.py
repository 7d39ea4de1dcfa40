"""Layers whose products are gated before they are stored: the bits of two kernels one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton_inputs import DEVICE, poisoned, random, strided

from pairwise import pairwise
from quire.kernels.layers.gated_linear import GatedLinear
from quire.kernels.layers.weights import Float8Weight, Weight
from quire.kernels.triton.device import is_interpreted
from quire.kernels.triton.kernel_set import TritonKernels
from quire.kernels.triton.linear import dense as triton_linear
from quire.kernels.triton.linear import tiled as gated_linear
from quire.kernels.triton.linear import tma_products
from quire.kernels.triton.linear.tiled import FusedGatedLinear, Tile

INPUTS = 128
SIZE = 40  # gates
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "quantization": "int8"},
    "int4": {"dtype": torch.bfloat16, "quantization": "int4", "group_size": 32},
    "fp8": {"dtype": torch.bfloat16, "quantization": "fp8"},
}
kernels = TritonKernels()


@pytest.fixture(autouse=True)
def products_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a number of a product of float32 tiles not depend on how many rows and columns these have.

    It does not on a GPU; but on CPUs without AVX-512, numpy sums in an order of its own for each shape. What
    is summed in another order in float64 differs too little for float32 to show it.
    """
    if not is_interpreted:
        return
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return create_dot(self, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def layers(
    parts: list[Weight], activation: str, bias: torch.Tensor | None = None, **options: Any
) -> tuple[GatedLinear, GatedLinear]:
    """Return what computes with one kernel, and what does with two."""
    fused, apart = (kernels.linear(parts, bias, **options) for _ in range(2))
    fused(torch.zeros(20, fused.in_features, dtype=options["dtype"], device=DEVICE))
    return kernels.gated_linear(fused, activation), GatedLinear(kernels, apart, activation)


@pairwise(
    options=OPTIONS,
    has_bias=[False, True],
    activation=["silu", "gelu", "gelu_tanh"],
    tile={"own_tile": None, "small_tile": Tile(32, 16, 32, 4, 2)},
    most_rows_apart=[0, 64],
)
def test_bits_are_those_of_two_kernels(
    options: dict[str, Any],
    has_bias: bool,
    activation: str,
    tile: Tile | None,
    most_rows_apart: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gated_linear, "MAX_ROWS_APART", most_rows_apart)
    if tile is not None and DEVICE.type == "cpu":
        monkeypatch.setattr(triton_linear, "tile_of", lambda *_: tile)
        monkeypatch.setattr(tma_products, "fetched_tile_of", lambda *_: tile)
    parts = [random(SIZE, INPUTS, seed=seed) * 0.1 for seed in (1, 2)]
    bias = random(2 * SIZE, seed=3) if has_bias else None
    fused, apart = layers(parts, activation, bias, **options)
    assert isinstance(fused, FusedGatedLinear)
    assert not fused.keeps_products
    assert apart.keeps_products
    rows = random(35, INPUTS, seed=4).to(options["dtype"]).to(DEVICE)
    for count in (1, 16, 17, 35):
        expected = apart(rows[:count])
        out = strided(poisoned(count, SIZE, dtype=rows.dtype))
        assert fused(strided(rows[:count]), out=out) is out
        assert torch.equal(out, expected)
        assert torch.equal(fused(rows[:count]), expected)
    assert fused(rows[:0]).shape == (0, SIZE)


def test_blocks_that_share_a_scale_are_not_cut() -> None:
    scales = torch.rand(2, 2) + 0.5
    values = random(2 * 64, INPUTS, seed=1).to(torch.float8_e4m3fn)
    fused, apart = layers([Float8Weight(values, scales, (64, INPUTS // 2))], "silu", dtype=torch.bfloat16)
    assert type(fused) is GatedLinear
    rows = random(3, INPUTS, seed=2).bfloat16().to(DEVICE)
    assert torch.equal(fused(rows), apart(rows))


def test_features_that_cannot_take_turns() -> None:
    fused, apart = layers([random(12, INPUTS, seed=1)], "silu", dtype=torch.float32)
    assert type(fused) is GatedLinear
    rows = random(3, INPUTS, seed=2).to(DEVICE)
    assert torch.equal(fused(rows), apart(rows))


def test_what_is_wrong_is_said() -> None:
    layer = kernels.linear([random(2 * SIZE, INPUTS, seed=1)], dtype=torch.float32)
    with pytest.raises(ValueError, match="the activation is relu; it must be one of silu, gelu_tanh, gelu"):
        kernels.gated_linear(layer, "relu")
    gated = kernels.gated_linear(layer, "silu")
    for count, message in ((2, rf"must be \[2, {SIZE}\]"), (65, rf"takes {INPUTS} features to {SIZE}")):
        rows = torch.zeros(count, INPUTS, device=DEVICE)
        with pytest.raises(ValueError, match=message):
            gated(rows, out=torch.zeros(count, 2 * SIZE, device=DEVICE))
        with pytest.raises(TypeError, match=r"out is torch\.bfloat16; it must be torch\.float32"):
            gated(rows, out=torch.zeros(count, SIZE, dtype=torch.bfloat16, device=DEVICE))
