"""Attention over the paged KV cache by the native kernel (native/src/attention.h).

Heads of up to 256 features, in multiples of 16; layers with other heads go to the reference kernel.
"""

from __future__ import annotations

import torch

from quire.kernels import attention as reference
from quire.kernels.batch import AttentionBatch
from quire.kernels.bounds import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from quire.kernels.cpu import _native
from quire.kernels.cpu.layers import native_layer
from quire.kernels.cpu.tensors import address, float_type
from quire.kernels.kv_layer import KVLayer

_NAME = "cpu attention"  # among a batch's plans


def paged_attention(
    query: torch.Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    key_scores: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of every token of the step; see `quire.kernels.attention.paged_attention`.

    Products are of bfloat16 numbers if the query is bfloat16, the cache bfloat16 or int8, and the CPU has
    AVX-512 BF16; sums, and everything else, are float32.

    Raises:
        TypeError: the query is not float32, bfloat16 or float16.
        ValueError: the numbers of a query's token are not adjacent, or `out` is not as it must be.
    """
    num_tokens, num_heads, head_dim = query.shape
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        return reference.paged_attention(
            query, kv, batch, scale=scale, window=window, softcap=softcap, sinks=sinks, key_scores=key_scores,
            out=out,
        )  # fmt: skip
    token_stride, head_stride, feature_stride = query.stride()
    if feature_stride != 1 or head_stride != head_dim:
        raise ValueError(f"the query's strides are {query.stride()}; the numbers of a token must be adjacent")
    query_type = float_type("the query", query)
    if out is None:
        out = query.new_empty((num_tokens, num_heads, head_dim))
    elif out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; it must be {query.dtype} "
            f"{tuple(query.shape)} and contiguous"
        )
    _plan(batch, window, num_heads // kv.keys.shape[1]).attend(
        native_layer(kv),
        query.data_ptr(),
        query_type,
        token_stride,
        out.data_ptr(),
        scale,
        softcap,
        address(sinks),
        address(key_scores),
    )
    return out


def _plan(batch: AttentionBatch, window: int, group: int) -> _native.AttentionPlan:
    """Return the step's plan for layers of this window and group, made once."""
    key = (_NAME, window, group)
    plan: _native.AttentionPlan | None = batch.plans.get(key)
    if plan is None:
        tables = batch.block_tables
        plan = batch.plans[key] = _native.AttentionPlan(
            batch.num_computed_tokens.ctypes.data,
            batch.num_tokens.ctypes.data,
            len(batch.num_tokens),
            tables.ctypes.data,
            tables.shape[1],
            batch.block_size,
            window,
            group,
        )
    return plan
