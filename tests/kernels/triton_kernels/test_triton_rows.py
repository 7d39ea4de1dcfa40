"""Norms and activations in Triton: against the reference, and bit for bit in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from triton_inputs import DTYPES, RELATIVE, assert_close, poisoned, random, strided

from pairwise import pairwise
from quire.kernels.reference import ReferenceKernels
from quire.kernels.triton.kernel_set import TritonKernels

# The interpreter computes in numpy, which warns of numbers that become infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow")

kernels, reference = TritonKernels(), ReferenceKernels()


@pairwise(dtype=DTYPES, size=[1, 15, 64, 100, 896], count=[1, 3])
def test_rms_norm(dtype: torch.dtype, size: int, count: int) -> None:
    rows, weight = random(count, size, dtype=dtype), random(size, seed=1)
    expected = reference.rms_norm(rows, weight, eps=1e-5)
    assert_close(kernels.rms_norm(rows, weight, eps=1e-5), expected)
    out = strided(poisoned(count, size, dtype=dtype))
    assert kernels.rms_norm(strided(rows), weight, eps=1e-5, out=out) is out
    assert_close(out, expected)
    in_place = rows.clone()
    kernels.rms_norm(in_place, weight, eps=1e-5, out=in_place)
    assert torch.equal(in_place, out)


@pairwise(dtype=DTYPES, size=[1, 24, 100], count=[1, 3], scale=[1.0, 0.22])
def test_add_rms_norm(dtype: torch.dtype, size: int, count: int, scale: float) -> None:
    before, delta = random(count, size, dtype=dtype), random(count, size, dtype=dtype, seed=1)
    weight = random(size, seed=2)
    expected_residual = before.clone()
    expected = reference.add_rms_norm(expected_residual, delta, weight, eps=1e-6, scale=scale)
    residual, out = strided(before), poisoned(count, size, dtype=dtype)
    assert kernels.add_rms_norm(residual, strided(delta), weight, eps=1e-6, scale=scale, out=out) is out
    assert_close(residual, expected_residual)
    assert_close(out, expected)
    if scale == 1.0:
        assert torch.equal(residual, expected_residual)
    alone = before.clone()
    assert kernels.add_rms_norm(alone, delta, None, eps=1e-6, scale=scale) is alone
    assert torch.equal(alone, residual)


@pairwise(dtype=DTYPES, size=[1, 24, 100], count=[1, 3])
def test_layer_norm(dtype: torch.dtype, size: int, count: int) -> None:
    rows, delta = random(count, size, dtype=dtype) + 2, random(count, size, dtype=dtype, seed=1)
    weight, bias = random(size, seed=2), random(size, seed=3)
    expected = reference.rms_norm(rows, weight, eps=1e-2, bias=bias).float()
    out = strided(poisoned(count, size, dtype=dtype))
    assert kernels.rms_norm(strided(rows), weight, eps=1e-2, bias=bias, out=out) is out
    torch.testing.assert_close(out.float(), expected, rtol=4 * RELATIVE[dtype], atol=4 * RELATIVE[dtype])
    normed = kernels.add_rms_norm(rows, delta, weight, eps=1e-2, bias=bias)
    assert torch.equal(normed, kernels.rms_norm(rows, weight, eps=1e-2, bias=bias))


@pairwise(activation=["silu", "gelu_tanh", "gelu", "relu2"], dtype=DTYPES, size=[1, 31, 64, 1100])
def test_gated_activation(activation: str, dtype: torch.dtype, size: int) -> None:
    rows = random(3, 2 * size, dtype=dtype) * 4
    expected = reference.gated_activation(rows, activation)
    out = strided(poisoned(3, size, dtype=dtype))
    assert kernels.gated_activation(strided(rows), activation, out=out) is out
    gate, up = rows.float().chunk(2, dim=1)
    # Where 1 + erf is close to 0, it may be off by an ulp of 1 in either kernel; so may 1 + tanh.
    cancelled = 0.0 if activation == "silu" else 2**-23 * (gate * up).abs()
    error = (out.float() - expected.float()).abs()
    assert out.dtype == expected.dtype
    assert (error <= RELATIVE[dtype] * expected.float().abs() + 2e-6 + cancelled).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_activations_over_the_whole_range(activation: str) -> None:
    steps = torch.cat(
        [torch.linspace(-12, 12, 4001), torch.tensor([-1e30, -1e4, -90.0, 0.0, 90.0, 1e4, 1e30])]
    )
    wide = steps.double()
    exact = {
        "silu": lambda: wide * torch.sigmoid(wide),
        "gelu": lambda: 0.5 * wide * (1 + torch.erf(wide * 0.5**0.5)),
        "gelu_tanh": lambda: torch.nn.functional.gelu(wide, approximate="tanh"),
    }[activation]()
    rows = torch.cat([steps, torch.ones_like(steps)])[None]
    actual = kernels.gated_activation(rows.to(random(1).device), activation)[0].double().cpu()
    assert ((actual - exact).abs() <= 1e-6 * exact.abs() + 5e-7 * wide.abs().clamp(max=1.0)).all()


@pairwise(dtype=DTYPES, size=[100, 896])
def test_rows_keep_their_bits_in_any_company(dtype: torch.dtype, size: int) -> None:
    rows, weight = random(9, size, dtype=dtype), random(size, seed=1)
    delta = random(9, size, dtype=dtype, seed=2)

    def added(part: slice) -> torch.Tensor:
        residual = rows[part].clone()
        normed = kernels.add_rms_norm(residual, delta[part], weight, eps=1e-6, scale=0.3)
        return torch.cat([residual, normed], dim=1)

    computed: list[Callable[[slice], torch.Tensor]] = [
        lambda part: kernels.rms_norm(rows[part], weight, eps=1e-6),
        added,
        lambda part: kernels.gated_activation(rows[part], "silu"),
    ]
    for kernel in computed:
        together = kernel(slice(None))
        for part in (slice(0, 1), slice(8, 9), slice(3, 8)):
            assert torch.equal(kernel(part), together[part])


def test_no_rows_are_no_work() -> None:
    rows = random(0, 8)
    assert kernels.rms_norm(rows, random(8), eps=1e-6).shape == (0, 8)
    assert kernels.gated_activation(rows, "silu").shape == (0, 4)


def test_what_the_kernels_cannot_take_is_refused() -> None:
    rows, weight = random(3, 8), random(8)
    with pytest.raises(TypeError, match="float64"):
        kernels.rms_norm(rows.double(), weight, eps=1e-6)
    with pytest.raises(ValueError, match="adjacent"):
        kernels.rms_norm(random(8, 3).T, weight, eps=1e-6)
    with pytest.raises(ValueError, match="weight"):
        kernels.rms_norm(rows, weight[:7], eps=1e-6)
    with pytest.raises(ValueError, match="out is"):
        kernels.rms_norm(rows, weight, eps=1e-6, out=rows[:2])
    with pytest.raises(TypeError, match="bfloat16"):
        kernels.rms_norm(rows, weight, eps=1e-6, out=rows.bfloat16())
    with pytest.raises(ValueError, match="delta"):
        kernels.add_rms_norm(rows, rows[:2], weight, eps=1e-6)
    with pytest.raises(ValueError, match="7 columns"):
        kernels.gated_activation(rows[:, :7], "silu")
    with pytest.raises(ValueError, match="relu"):
        kernels.gated_activation(rows, "relu")
