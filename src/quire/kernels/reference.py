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
from quire.kernels.kv_layer import KVLayer
from quire.kernels.tiles import HeadLayout

__all__ = [
    "add_rms_norm", "apply_rotary", "gated_activation", "gelu", "gelu_tanh", "paged_attention",
    "rms_norm", "rotary_and_write_kv", "silu", "write_kv",
]  # fmt: skip


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the root-mean-square norm over the last dimension (Zhang and Sennrich 2019), in `rows`' type.

    Norm and product are in float32, and so must `weight` be: [n] for rows [..., n]. With `out` the result
    goes there, which may be `rows` itself.
    """
    return _into(out, F.rms_norm(rows.float(), weight.shape, weight, eps).to(rows.dtype))


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add `scale * delta` to `residual` in place, and return the norm of the sum.

    Args:
        residual, delta: [T, n] of one type; the sum is computed in float32 and rounded to it.
        weight: [n] float32, of the norm; None: `residual` itself is returned.
        eps: as for `rms_norm`.
        scale: of `delta`.
        out: [T, n], for the norm.
    """
    residual.copy_(residual.float() + delta.float() * scale)
    return residual if weight is None else rms_norm(residual, weight, eps=eps, out=out)


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)


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


def write_kv(key: torch.Tensor, value: torch.Tensor, kv: KVLayer, batch: AttentionBatch) -> None:
    """Write the step's keys and values [T, kv_heads, head_dim] to their places, in place.

    A layer with scales gets each head's numbers of a token as int8: 127 stands for the largest magnitude.
    """
    places = batch.slot_blocks, batch.slot_offsets
    for states, blocks, scales in ((key, kv.keys, kv.key_scales), (value, kv.values, kv.value_scales)):
        if scales is None:
            blocks.transpose(1, 2)[places] = states.to(blocks.dtype)
        else:
            numbers, scale = quantize_heads(states)
            blocks.transpose(1, 2)[places] = numbers
            scales.transpose(1, 2)[places] = scale


def quantize_heads(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states [..., head_dim] as int8 [..., head_dim] times scales [...] float32, ties to even."""
    wide = states.float()
    limit = wide.abs().amax(-1)
    inverse = torch.where(limit > 0.0, 127.0 / limit, 0.0)
    return (wide * inverse.unsqueeze(-1)).round_().to(torch.int8), limit / 127.0


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

    Args:
        qkv: [T, (heads + 2 * kv_heads) * head_dim]: queries, keys, values; changed in place.
        kv: the layer's cache.
        batch: where each token goes.
        heads: what `qkv` consists of.
        cos, sin: [T, half] float32, see `apply_rotary`; None: no rotation.
        q_norm, k_norm: float32 weights of a norm over each head, [head_dim], or over all of them,
            [heads * head_dim] and [kv_heads * head_dim]; None: no norm.
        eps: of the norms.

    Returns:
        The queries [T, heads, head_dim], a view of `qkv`.
    """
    sizes = [heads.num_heads * heads.head_dim, *[heads.num_kv_heads * heads.head_dim] * 2]
    query, key, value = torch.split(qkv, sizes, dim=-1)
    for states, norm in ((query, q_norm), (key, k_norm)):
        if norm is not None:
            grouped = states.view(len(states), -1, len(norm))
            rms_norm(grouped, norm, eps=eps, out=grouped)
    query, key, value = (states.view(len(states), -1, heads.head_dim) for states in (query, key, value))
    if cos is not None and sin is not None:
        for states in (query, key):
            states.copy_(apply_rotary(states, cos, sin))
    write_kv(key, value, kv, batch)
    return query


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


def gated_activation(
    gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `activation(gate) * up` for `gate_up` [..., 2 * n], gate first; computed in float32.

    `activation` is silu, gelu_tanh or gelu. With `out` [..., n] the result goes there.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return _into(out, _ACTIVATIONS[activation](gate).mul_(up).to(gate_up.dtype))
