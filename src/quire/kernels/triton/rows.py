"""Norms and activations, row by row: a program for each row, or for a part of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.layers.experts import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import await_previous, rounded
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.tensors import check_norm_weight, check_rows

FEATURES_BY_TURNS = 8
"""Gates, and then as many of what they are multiplied with, among the features of fused products: on tensor
cores, a thread has numbers of both then."""

_TURN = tl.constexpr(FEATURES_BY_TURNS)
_CLAMPED_SWIGLU = tl.constexpr(CLAMPED_SWIGLU)
_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)
_ACTIVATIONS = "silu", "gelu_tanh", "gelu", "relu2"
_ELEMENTS_PER_THREAD = 16
_ACTIVATION_BLOCK = 1024


@kernel()
def _rms_norm_kernel(
    rows,
    delta,
    weight,
    bias,
    out,
    num_features,
    row_stride,
    delta_stride,
    out_stride,
    scale,
    eps,
    HAS_DELTA: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    is_feature = feature < num_features
    row_at = rows + row * row_stride + feature
    values = tl.load(row_at, mask=is_feature, other=0.0).to(tl.float32)
    if HAS_WEIGHT:  # read before anything is stored: the compiler does not know that these do not overlap
        weights = tl.load(weight + feature, mask=is_feature, other=0.0)
    if HAS_BIAS:
        biases = tl.load(bias + feature, mask=is_feature, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + row * delta_stride + feature, mask=is_feature, other=0.0)
        total = rounded(values + added.to(tl.float32) * scale, rows.dtype.element_ty)
        tl.store(row_at, total, mask=is_feature)
        values = total.to(tl.float32)
    if HAS_WEIGHT:
        if HAS_BIAS:
            values = tl.where(is_feature, values - tl.sum(values, axis=0) / num_features, 0.0)
        mean_square = tl.sum(values * values, axis=0) / num_features
        normed = values * tl.rsqrt(mean_square + eps) * weights
        if HAS_BIAS:
            normed += biases
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
    elif ACTIVATION == "relu2":
        positive = tl.where(gate < 0.0, 0.0, gate)
        values = positive * positive
    else:
        tl.static_assert(ACTIVATION == "gelu")
        values = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return values


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return the gated activation of float32 numbers."""
    if ACTIVATION == _CLAMPED_SWIGLU:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)  # NaN stays
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        values = (up + 1.0) * gate / (1.0 + tl.exp(gate * -_ALPHA))
    else:
        values = activated(gate, ACTIVATION) * up
    return values


@triton.jit
def feature_by_turns(feature, half):
    """Return which of 2 * `half` features, gates first, is the one at a place where they take turns.

    Beyond the features, it is the last one of its half.
    """
    gate = feature // (2 * _TURN) * _TURN + feature % _TURN
    return tl.minimum(gate, half - 1) + feature // _TURN % 2 * half


@triton.jit
def gated_products(products, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the gated activations [n, ROWS] of products [2 * n, ROWS] float32 of features by turns.

    Products are rounded to `dtype` first, as those that are stored are.
    """
    features: tl.constexpr = products.shape[0]
    num_rows: tl.constexpr = products.shape[1]
    by_turns = rounded(products, dtype).to(tl.float32).reshape(features // (2 * _TURN), 2, _TURN, num_rows)
    gate, up = tl.split(by_turns.permute(0, 2, 3, 1))
    return gated(gate, up, ACTIVATION).reshape(features // 2, num_rows)


@kernel()
def _gated_activation_kernel(
    gate_up,
    out,
    num_features,
    row_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    BY_TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = feature < num_features
    gate_at = gate_up + row * row_stride
    if BY_TURNS:
        gate_at += feature // _TURN * (2 * _TURN) + feature % _TURN
        up_at = gate_at + _TURN
    else:
        gate_at += feature
        up_at = gate_at + num_features
    gate = tl.load(gate_at, mask=is_feature, other=0.0).to(tl.float32)
    up = tl.load(up_at, mask=is_feature, other=0.0).to(tl.float32)
    product = rounded(gated(gate, up, ACTIVATION), out.dtype.element_ty)
    tl.store(out + row * out_stride + feature, product, mask=is_feature)


def rms_norm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `KernelSet.rms_norm` says."""
    out = rows.new_empty(rows.shape) if out is None else out
    _norm(rows, None, weight, bias, out, scale=1.0, eps=eps)
    return out


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `KernelSet.add_rms_norm` says."""
    if weight is None:
        out = residual
    elif out is None:
        out = residual.new_empty(residual.shape)
    _norm(residual, delta, weight, bias, out, scale=scale, eps=eps)
    return out


def _norm(
    rows: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
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
    if bias is not None:
        check_norm_weight(bias, num_features)
    if not num_rows:
        return
    block = next_power_of_2(num_features)
    _rms_norm_kernel[(num_rows,)](
        rows,
        delta,
        weight,
        bias,
        out,
        num_features,
        rows.stride(0),
        0 if delta is None else delta.stride(0),
        out.stride(0),
        scale,
        eps,
        HAS_DELTA=delta is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), 16),
    )


def check_activation(activation: str) -> None:
    """Raise ValueError for an activation that the kernels do not have."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"the activation is {activation}; it must be one of {', '.join(_ACTIVATIONS)}")


def gated_activation(
    gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None, by_turns: bool = False
) -> torch.Tensor:
    """Do what `KernelSet.gated_activation` says, with `by_turns` for features that lie so."""
    num_rows, twice = gate_up.shape
    num_features = twice // 2
    if out is None:
        out = gate_up.new_empty(num_rows, num_features)
    check_rows("gate_up", gate_up)
    check_rows("out", out, gate_up[:, :num_features])
    check_activation(activation)
    if twice % 2:
        raise ValueError(f"gate_up has {twice} columns; there must be as many for gate as for up")
    if num_rows:
        block = min(next_power_of_2(num_features), _ACTIVATION_BLOCK)
        _gated_activation_kernel[(num_rows, -(-num_features // block))](
            gate_up,
            out,
            num_features,
            gate_up.stride(0),
            out.stride(0),
            ACTIVATION=activation,
            BY_TURNS=by_turns,
            BLOCK=block,
        )
    return out
