"""Attention over rows of whole prompts: by kernels, and in float64 as in the textbook."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVOfRows
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.interface import KernelSet


def random_rows(
    lengths: list[int], heads: HeadLayout, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return queries, keys and values of each sequence, [length, width]."""
    generator = torch.Generator().manual_seed(1)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return [torch.randn(length, width, generator=generator).to(dtype) for length in lengths]


def attended(kernels: KernelSet, rows: list[torch.Tensor], heads: HeadLayout, **options: Any) -> torch.Tensor:
    """Return the attention of the rows of all sequences by `kernels`, [T, heads, head_dim]."""
    lengths = [len(each) for each in rows]
    batch = AttentionBatch.build(
        np.zeros(len(rows)), np.array(lengths), np.zeros((len(rows), max(lengths))), 1
    ).over_rows()
    qkv = torch.cat(rows).to(kernels.device)
    kv = KVOfRows.of(qkv, heads)
    query = kernels.rotary_and_write_kv(
        qkv, kv, batch, heads=heads, cos=None, sin=None, q_norm=None, k_norm=None, eps=0.0
    )
    return kernels.paged_attention(query, kv, batch, scale=heads.head_dim**-0.5, **options).cpu()


def random_bias(heads: HeadLayout, most: int) -> torch.Tensor:
    """Return what is added to scores by distances up to `most`."""
    return torch.randn(heads.num_heads, 2 * most + 1, generator=torch.Generator().manual_seed(2))


def naive(
    rows: torch.Tensor,
    heads: HeadLayout,
    window: int = 0,
    distance_bias: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Return the attention of the rows of one sequence, [length, heads, head_dim] float64."""
    sizes = [count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
    query, key, value = (
        part.double().view(len(rows), -1, heads.head_dim) for part in rows.split(sizes, dim=-1)
    )
    key, value = (part.repeat_interleave(heads.group, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * heads.head_dim**-0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(len(rows)) - torch.arange(len(rows))[:, None]
    if distance_bias is not None:
        most = distance_bias.shape[1] // 2
        scores += distance_bias.double()[:, distance.clamp(-most, most) + most]
    if window:
        scores.masked_fill_(distance.abs() >= window, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
