"""Compute primitives in plain torch on the CPU, one signature each.

Every function gives a row the same bits whatever the other rows are and however many there are. That rules
out torch's fused `silu` and `gelu`, whose last few elements take a scalar path with other roundings; `exp`,
`tanh` and `erf` do not have one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from quire.kernels.attention import paged_attention
from quire.kernels.batch import AttentionBatch

__all__ = [
    "apply_rotary", "gated_activation", "gelu", "gelu_tanh", "linear", "paged_attention", "rms_norm", "silu",
    "write_kv",
]  # fmt: skip

MIN_FLOAT32_ROWS = 12  # float32 products of fewer rows take paths whose sums have another order


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `rows @ weight.T + bias`: [T, in] with [out, in] and [out] to [T, out]."""
    num_rows = rows.shape[0]
    if rows.dtype != torch.float32 or num_rows >= MIN_FLOAT32_ROWS:
        return F.linear(rows, weight, bias)
    padded = F.pad(rows, (0, 0, 0, MIN_FLOAT32_ROWS - num_rows))
    return F.linear(padded, weight, bias)[:num_rows]


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Return the root-mean-square norm over the last dimension (Zhang and Sennrich 2019), in `rows`' type.

    Norm and product are in float32, and so must `weight` be: [n] for rows [..., n].
    """
    return F.rms_norm(rows.float(), weight.shape, weight, eps).to(rows.dtype)


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `2 * half` features of each head by the position's angles (Su et al. 2021).

    Args:
        states: [T, heads, head_dim]; feature i is paired with feature i + half.
        cos, sin: [T, half] float32.
    """
    half = cos.shape[-1]
    wide = states.float()
    first, second = wide[..., :half], wide[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = [first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :]]
    return torch.cat(rotated, dim=-1).to(states.dtype)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    batch: AttentionBatch,
) -> None:
    """Write the step's keys and values [T, kv_heads, head_dim] to their places, in place."""
    key_blocks.transpose(1, 2)[batch.slot_blocks, batch.slot_offsets] = key
    value_blocks.transpose(1, 2)[batch.slot_blocks, batch.slot_offsets] = value


def silu(values: torch.Tensor) -> torch.Tensor:
    """Return `x * sigmoid(x)` of a float32 tensor."""
    return values / torch.exp(-values).add_(1.0)


def gelu_tanh(values: torch.Tensor) -> torch.Tensor:
    """Return the tanh approximation of GELU (Hendrycks and Gimpel 2016) of a float32 tensor."""
    inner = (values * values * values).mul_(0.044715).add_(values).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(values).mul_(0.5)


def gelu(values: torch.Tensor) -> torch.Tensor:
    """Return the exact GELU of a float32 tensor."""
    return torch.erf(values * math.sqrt(0.5)).add_(1.0).mul_(values).mul_(0.5)


_ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu}


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return `activation(gate) * up` for `gate_up` [..., 2 * n], gate first; computed in float32.

    `activation` is silu, gelu_tanh or gelu.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate).mul_(up).to(gate_up.dtype)
