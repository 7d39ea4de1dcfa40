"""Norms, activations and rotary embedding by the native kernels (native/src/elementwise.h).

The functions have the signatures of those in `quire.kernels.reference`, for rows [T, n] of float32, bfloat16
or float16 whose numbers are adjacent.
"""

from __future__ import annotations

import torch

from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu import _native
from quire.kernels.cpu.layers import native_layer
from quire.kernels.cpu.tensors import address, float_type, row_stride
from quire.kernels.kv_layer import KVLayer
from quire.kernels.tiles import HeadLayout

_NAME = "cpu rotary"  # among a layer's handles and a batch's plans
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}  # Activation in native/src/elementwise.h


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the root-mean-square norm of each row; see `quire.kernels.reference.rms_norm`.

    Raises:
        TypeError: a type is not as it must be.
        ValueError: a shape or stride is not as it must be.
    """
    num_rows, num_features = rows.shape
    if out is None:
        out = rows.new_empty((num_rows, num_features))
    _check_weight(weight, num_features)
    _native.norm(
        rows.data_ptr(),
        0,
        weight.data_ptr(),
        out.data_ptr(),
        _type_of(rows, out),
        num_rows,
        num_features,
        row_stride("rows", rows),
        0,
        row_stride("out", out, (num_rows, num_features)),
        1.0,
        eps,
    )
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
    """Add to the residual stream in place and return its norm; see `quire.kernels.reference.add_rms_norm`.

    Raises:
        TypeError: a type is not as it must be.
        ValueError: a shape or stride is not as it must be.
    """
    shape = num_rows, num_features = residual.shape
    if weight is None:
        out = residual
    else:
        _check_weight(weight, num_features)
        if out is None:
            out = residual.new_empty(shape)
    dtype = _type_of(residual, out)
    if delta.dtype is not residual.dtype:
        raise TypeError(f"delta is {delta.dtype}; it must be {residual.dtype}, as the residual")
    _native.norm(
        residual.data_ptr(),
        delta.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        dtype,
        num_rows,
        num_features,
        row_stride("residual", residual),
        row_stride("delta", delta, shape),
        row_stride("out", out, shape),
        scale,
        eps,
    )
    return out


def gated_activation(
    gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `activation(gate) * up`; see `quire.kernels.reference.gated_activation`.

    Raises:
        TypeError: a type is not as it must be.
        ValueError: a shape or stride is not as it must be.
    """
    num_rows, twice = gate_up.shape
    num_features = twice // 2
    shape = num_rows, num_features
    if out is None:
        out = gate_up.new_empty(shape)
    _native.gated_activation(
        gate_up.data_ptr(),
        out.data_ptr(),
        _type_of(gate_up, out),
        _ACTIVATIONS[activation],
        num_rows,
        num_features,
        row_stride("gate_up", gate_up),
        row_stride("out", out, shape),
    )
    return out


def rotary_and_write_kv(
    qkv: torch.Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    *,
    heads: HeadLayout,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Normalize and rotate queries and keys, and write keys and values to the cache.

    See `quire.kernels.reference.rotary_and_write_kv`.

    Raises:
        TypeError: a type is not as it must be.
        ValueError: a shape or stride is not as it must be.
    """
    step = batch.plans.get((_NAME, id(cos)))
    if step is None or step.sin is not sin:
        step = _Step(batch, heads, cos, sin)
        batch.plans[_NAME, id(cos)] = step
    layer = kv.handles.get(_NAME)
    if layer is None or not layer.is_of(heads, q_norm, k_norm):
        layer = kv.handles[_NAME] = _Layer(kv, heads, q_norm, k_norm)
    qkv_stride = row_stride("qkv", qkv, (step.num_rows, layer.width))
    _native.rotary_and_write_kv(
        layer.native,
        qkv.data_ptr(),
        float_type("qkv", qkv),
        step.num_rows,
        qkv_stride,
        heads.num_heads,
        step.cos_address,
        step.sin_address,
        step.half,
        layer.q_norm_address,
        layer.k_norm_address,
        layer.q_norm_size,
        layer.k_norm_size,
        eps,
        step.blocks_address,
        step.offsets_address,
    )
    return qkv.as_strided((step.num_rows, heads.num_heads, heads.head_dim), (qkv_stride, heads.head_dim, 1))


class _Step:
    """What of a call depends on the step and the angles only; holds these, so that their id stays theirs."""

    def __init__(
        self, batch: AttentionBatch, heads: HeadLayout, cos: torch.Tensor | None, sin: torch.Tensor | None
    ) -> None:
        self.num_rows = batch.slot_blocks.shape[0]
        self.cos, self.sin = cos, sin
        self.half, self.cos_address, self.sin_address = 0, address(cos), address(sin)
        if cos is not None and sin is not None:
            self.half = cos.shape[1]
            for angles in (cos, sin):
                _check_angles(angles, (self.num_rows, self.half), heads.head_dim)
        self.blocks_address = batch.slot_blocks.data_ptr()
        self.offsets_address = batch.slot_offsets.data_ptr()


class _Layer:
    """What of a call depends on the layer only."""

    def __init__(
        self,
        kv: KVLayer,
        heads: HeadLayout,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        self.native = native_layer(kv)
        self.width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        self.heads, self.q_norm, self.k_norm = heads, q_norm, k_norm
        self.q_norm_address, self.k_norm_address = address(q_norm), address(k_norm)
        self.q_norm_size = _norm_size("q_norm", q_norm, heads.num_heads, heads.head_dim)
        self.k_norm_size = _norm_size("k_norm", k_norm, heads.num_kv_heads, heads.head_dim)
        if kv.keys.shape[1] != heads.num_kv_heads or kv.keys.shape[3] != heads.head_dim:
            raise ValueError(f"the cache's keys are {tuple(kv.keys.shape)}; they do not fit {heads}")

    def is_of(self, heads: HeadLayout, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None) -> bool:
        """Return whether it was made of these very objects."""
        return self.heads is heads and self.q_norm is q_norm and self.k_norm is k_norm


# -- checks, cheap enough for every layer of every step -----------------------------------------------------


def _type_of(rows: torch.Tensor, out: torch.Tensor) -> int:
    """Return the number of the type that both have."""
    if out.dtype is not rows.dtype:
        raise TypeError(f"the rows are {rows.dtype} and out is {out.dtype}; both must have the same type")
    return float_type("rows", rows)


def _check_weight(weight: torch.Tensor, num_features: int) -> None:
    if weight.dtype is not torch.float32 or weight.numel() != num_features or not weight.is_contiguous():
        raise ValueError(
            f"a norm's weight is {weight.dtype} {tuple(weight.shape)}; it must be float32 [{num_features}]"
        )


def _check_angles(angles: torch.Tensor, shape: tuple[int, int], head_dim: int) -> None:
    if angles.dtype is not torch.float32 or angles.shape != shape or 2 * shape[1] > head_dim:
        raise ValueError(
            f"cos or sin is {angles.dtype} {tuple(angles.shape)}; both must be float32 [{shape[0]}, at most "
            f"{head_dim // 2}]"
        )
    if not angles.is_contiguous():
        raise ValueError(f"cos or sin has strides {angles.stride()}; both must be contiguous")


def _norm_size(name: str, norm: torch.Tensor | None, num_heads: int, head_dim: int) -> int:
    """Return how many features are normalized together."""
    if norm is None:
        return 0
    size = norm.numel()
    if size not in (head_dim, num_heads * head_dim):
        raise ValueError(f"{name} is [{size}]; it must be [{head_dim}] or [{num_heads * head_dim}]")
    _check_weight(norm, size)
    return size
