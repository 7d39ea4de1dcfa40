"""Norms and activations, row by row: a program for each row, or for a part of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.device import await_previous, rounded
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.tensors import check_norm_weight, check_rows

_ELEMENTS_PER_THREAD = 16
_ACTIVATION_BLOCK = 1024


@kernel()
def _rms_norm_kernel(
    rows,
    delta,
    weight,
    out,
    num_features,
    row_stride,
    delta_stride,
    out_stride,
    scale,
    eps,
    HAS_DELTA: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    is_feature = feature < num_features
    row_at = rows + row * row_stride + feature
    values = tl.load(row_at, mask=is_feature, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + row * delta_stride + feature, mask=is_feature, other=0.0)
        total = rounded(values + added.to(tl.float32) * scale, rows.dtype.element_ty)
        tl.store(row_at, total, mask=is_feature)
        values = total.to(tl.float32)
    if HAS_WEIGHT:
        mean_square = tl.sum(values * values, axis=0) / num_features
        normed = values * tl.rsqrt(mean_square + eps) * tl.load(weight + feature, mask=is_feature, other=0.0)
        tl.store(out + row * out_stride + feature, rounded(normed, out.dtype.element_ty), mask=is_feature)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """Return the activation of float32 numbers."""
    if ACTIVATION == "silu":
        values = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu_tanh":
        # x * (1 + tanh(u)) / 2 is x * sigmoid(2u), where u is sqrt(2 / pi) * (x + 0.044715 x^3).
        twice = (gate + 0.044715 * gate * gate * gate) * 1.5957691216057308
        values = gate / (1.0 + tl.exp(-twice))
    else:
        tl.static_assert(ACTIVATION == "gelu")
        values = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return values


@kernel()
def _gated_activation_kernel(
    gate_up,
    out,
    num_features,
    row_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = feature < num_features
    gate_at = gate_up + row * row_stride + feature
    gate = tl.load(gate_at, mask=is_feature, other=0.0).to(tl.float32)
    up = tl.load(gate_at + num_features, mask=is_feature, other=0.0).to(tl.float32)
    product = rounded(activated(gate, ACTIVATION) * up, out.dtype.element_ty)
    tl.store(out + row * out_stride + feature, product, mask=is_feature)


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what `KernelSet.rms_norm` says."""
    out = rows.new_empty(rows.shape) if out is None else out
    _norm(rows, None, weight, out, scale=1.0, eps=eps)
    return out


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `KernelSet.add_rms_norm` says."""
    if weight is None:
        out = residual
    elif out is None:
        out = residual.new_empty(residual.shape)
    _norm(residual, delta, weight, out, scale=scale, eps=eps)
    return out


def _norm(
    rows: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float,
    eps: float,
) -> None:
    num_rows, num_features = rows.shape
    check_rows("rows", rows)
    check_rows("out", out, rows)
    if delta is not None:
        check_rows("delta", delta, rows)
    if weight is not None:
        check_norm_weight(weight, num_features)
    if not num_rows:
        return
    block = triton.next_power_of_2(num_features)
    _rms_norm_kernel[(num_rows,)](
        rows,
        delta,
        weight,
        out,
        num_features,
        rows.stride(0),
        0 if delta is None else delta.stride(0),
        out.stride(0),
        scale,
        eps,
        HAS_DELTA=delta is not None,
        HAS_WEIGHT=weight is not None,
        BLOCK=block,
        num_warps=min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), 16),
    )


def gated_activation(
    gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what `KernelSet.gated_activation` says."""
    num_rows, twice = gate_up.shape
    num_features = twice // 2
    if out is None:
        out = gate_up.new_empty(num_rows, num_features)
    check_rows("gate_up", gate_up)
    check_rows("out", out, gate_up[:, :num_features])
    if twice % 2 or activation not in ("silu", "gelu_tanh", "gelu"):
        raise ValueError(
            f"gate_up has {twice} columns and the activation is {activation}; there must be as many for gate "
            "as for up, and the activation one of silu, gelu_tanh, gelu"
        )
    if num_rows:
        block = min(triton.next_power_of_2(num_features), _ACTIVATION_BLOCK)
        _gated_activation_kernel[(num_rows, triton.cdiv(num_features, block))](
            gate_up,
            out,
            num_features,
            gate_up.stride(0),
            out.stride(0),
            ACTIVATION=activation,
            BLOCK=block,
        )
    return out
