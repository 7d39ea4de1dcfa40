"""Layers whose products are gated before they are stored: the bits of two kernels one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_inputs import DEVICE, poisoned, random, strided

from quire.kernels.gated_linear import GatedLinear
from quire.kernels.triton import linear as triton_linear
from quire.kernels.triton import tma_products
from quire.kernels.triton.gated_linear import FusedGatedLinear
from quire.kernels.triton.kernel_set import TritonKernels
from quire.kernels.triton.tiled_linear import Tile
from quire.kernels.weights import Float8Weight, Weight

INPUTS = 128
SIZE = 40  # gates
kernels = TritonKernels()


def layers(
    parts: list[Weight], activation: str, bias: torch.Tensor | None = None, **options: Any
) -> tuple[GatedLinear, GatedLinear]:
    """Return what computes with one kernel, and what does with two."""
    fused, apart = (kernels.linear(parts, bias, **options) for _ in range(2))
    return kernels.gated_linear(fused, activation), GatedLinear(kernels, apart, activation)


@pytest.mark.parametrize("tile", [None, Tile(32, 16, 32, 4, 2)], ids=["own_tile", "small_tile"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "quantization": "int8"},
        {"dtype": torch.bfloat16, "quantization": "int4", "group_size": 32},
        {"dtype": torch.bfloat16, "quantization": "fp8"},
    ],
    ids=lambda options: options.get("quantization", str(options["dtype"])),
)
def test_bits_are_those_of_two_kernels(
    options: dict[str, Any],
    has_bias: bool,
    activation: str,
    tile: Tile | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    with pytest.raises(ValueError, match=f"the layer takes {INPUTS} features to {SIZE}"):
        gated(torch.zeros(2, INPUTS, device=DEVICE), out=torch.zeros(2, 2 * SIZE, device=DEVICE))
