"""Kernels that work row by row: against torch, and bit for bit whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from caches import make_cache
from pairwise import pairwise
from quire.kernels.interface import apply_rotary
from quire.kernels.layers.activations import XIELU, gelu, gelu_tanh, silu
from quire.kernels.reference import ReferenceKernels

reference = ReferenceKernels()
ROWS = 300
COUNTS = [*range(1, 18), 31, 64, 100, 299]
Rows = Callable[[torch.Tensor], torch.Tensor]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_rows_keep_their_bits(kernel: Rows, rows: torch.Tensor) -> None:
    expected = kernel(rows)
    for count in COUNTS:
        for start in (0, 1, ROWS - count):
            part = kernel(rows[start : start + count].clone())
            assert torch.equal(part, expected[start : start + count]), (count, start)


@pairwise(dtype=[torch.float32, torch.bfloat16], size=[24, 64, 100, 896])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    rows, weight = _random(ROWS, size, dtype=dtype), _random(size, seed=1)
    _assert_rows_keep_their_bits(lambda part: reference.rms_norm(part, weight, eps=1e-5), rows)
    wide = rows.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(
        reference.rms_norm(rows, weight, eps=1e-5).double(), expected, atol=tolerance, rtol=0
    )


def test_layer_norm_and_xielu_keep_the_bits_of_rows() -> None:
    weight, bias, numbers = _random(100, seed=1), _random(100, seed=2), torch.tensor([0.8])
    xielu = XIELU(numbers, numbers - 0.5, torch.tensor(0.5), torch.tensor(-1e-6))
    _assert_rows_keep_their_bits(
        lambda part: reference.rms_norm(part, weight, eps=1e-5, bias=bias), _random(ROWS, 100)
    )
    _assert_rows_keep_their_bits(xielu, _random(ROWS, 111) * 4)


def test_rms_norm_over_heads_is_the_norm_of_each_head() -> None:
    states, weight = _random(5, 3, 16), _random(16, seed=1)
    together = reference.rms_norm(states, weight, eps=1e-6)
    for head in range(3):
        assert torch.equal(together[:, head], reference.rms_norm(states[:, head], weight, eps=1e-6))


EXACT: dict[str, Rows] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda values: F.gelu(values, approximate="tanh"),
    "relu2": lambda values: F.relu(values).square(),
}


@pairwise(name=list(EXACT), dtype=[torch.float32, torch.bfloat16])
def test_gated_activation(name: str, dtype: torch.dtype) -> None:
    rows = _random(ROWS, 2 * 111, dtype=dtype) * 4
    _assert_rows_keep_their_bits(lambda part: reference.gated_activation(part, name), rows)
    gate, up = rows.double().chunk(2, dim=-1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.5
    actual = reference.gated_activation(rows, name).double()
    torch.testing.assert_close(actual, EXACT[name](gate) * up, atol=tolerance, rtol=1e-2)


def test_activations_of_extreme_values_are_finite() -> None:
    values = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    for name, activation in [
        ("silu", silu),
        ("gelu", gelu),
        ("tanh", gelu_tanh),
    ]:
        torch.testing.assert_close(activation(values), values.clamp(min=0.0), atol=1e-6, rtol=0, msg=name)


def test_apply_rotary_turns_pairs_of_features() -> None:
    states = _random(7, 2, 10)
    angles = _random(7, 4, seed=1)
    turned = apply_rotary(states, angles.cos(), angles.sin())
    pairs = torch.complex(states[..., :4], states[..., 4:8])
    expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(turned[..., :4], expected.real)
    torch.testing.assert_close(turned[..., 4:8], expected.imag)
    assert torch.equal(turned[..., 8:], states[..., 8:])
    _assert_rows_keep_their_bits(
        lambda part: apply_rotary(part[:, 8:].view(-1, 2, 10), part[:, :4].cos(), part[:, 4:8].sin()),
        _random(ROWS, 28, seed=3),
    )


def test_kv_cache_layout_is_block_major() -> None:
    cache = make_cache(5, 3, 2, 4, 8, torch.bfloat16)
    assert cache.tensor.shape == (5, 3, 2, 2, 4, 8)
    assert cache.bytes_per_block == 3 * 2 * 2 * 4 * 8 * 2 == cache.tensor[0].nbytes
    assert cache.nbytes == cache.tensor.nbytes
    view = cache.views[1]
    assert view.key_pages.shape == view.value_pages.shape == (2, 5, 4, 8)
    view.key_pages.fill_(1.0)
    view.value_pages.fill_(2.0)
    assert (cache.tensor[:, 1, 0] == 1).all()
    assert (cache.tensor[:, 1, 1] == 2).all()
