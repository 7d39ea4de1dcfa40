"""Paged attention in Triton: ragged, grouped, windowed, over a cache of floats, int8 or float8.

The bits of a row do not depend on the rest of the batch, see `attention_kernels`.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from quire.kernels.attention.batch import AttentionBatch, check_distance_bias
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.paged import Scores
from quire.kernels.attention.step_arrays import HostArrays
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.triton.attention.call import AttentionCall
from quire.kernels.triton.attention.items import feature_parts
from quire.kernels.triton.attention.kernels import attend, merge_parts
from quire.kernels.triton.attention.key_scores import write_key_scores
from quire.kernels.triton.attention.key_selection import list_visits, select_keys
from quire.kernels.triton.attention.layer import TritonLayer, triton_layer, with_groups
from quire.kernels.triton.attention.plan import AttentionPlan, TileClass, attention_plan
from quire.kernels.triton.device import MULTIPROCESSORS, has_large_tiles, has_little_shared_memory
from quire.kernels.triton.tensors import FLOAT_TYPES

_MERGED_FEATURES = 64  # of a program
_FEW_ROWS = 16  # of a tile


def paged_attention(
    query: torch.Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `KernelSet.paged_attention`.

    Raises:
        ConfigError: the kernels cannot read the cache's numbers.
        TypeError: the query's type is none that they have.
        ValueError: a shape or stride is not as it must be.
        IndexError: a block table is too short, or names a block that the cache does not have.
    """
    layer = triton_layer(kv)
    _check_query(query, layer, batch)
    if sinks is not None:
        _check_sinks(sinks, query)
    if distance_bias is not None:
        check_distance_bias(distance_bias, query.shape[1], batch)
    if out is None:
        out = query.new_empty(query.shape)
    else:
        _check_out(out, query)
    window = batch.effective_window(window)
    if batch.is_two_sided and window:
        window = 2 * window - 1
    layer = with_groups(layer, query.shape[1])
    heads = HeadLayout(query.shape[1], layer.num_kv_heads, query.shape[2])
    how = Scores(scale, softcap, sinks)
    tables = _block_tables(batch, layer.num_pages, query.device)
    call = AttentionCall(query, layer, tables, heads, how, window, distance_bias)
    call = dataclasses.replace(call, selected=select_keys(call, batch))
    plan = attention_plan(
        batch, heads, window, is_float32=call.is_float32, is_converted=call.is_converted, device=query.device
    )
    statistics = None
    if batch.key_scores is not None:
        statistics = torch.empty(*query.shape[:2], 2, dtype=torch.float32, device=query.device)
    for tiles in plan.classes:
        _attend(call, plan, tiles, out, statistics)
        if tiles.merges.shape[0]:
            _merge(call, tiles, out, statistics)
    if statistics is not None:
        write_key_scores(call, batch, statistics)
    return out


def _attend(
    call: AttentionCall,
    plan: AttentionPlan,
    tiles: TileClass,
    out: torch.Tensor,
    statistics: torch.Tensor | None,
) -> None:
    features, rest = feature_parts(call.heads.head_dim)
    num_items = tiles.items.shape[0]
    num_warps, num_stages = _warps_and_stages(call, tiles.rows, features + rest, num_items)
    visits, num_visits = list_visits(call, tiles)
    bias = call.distance_bias
    attend[num_items, call.heads.num_kv_heads](
        call.query,
        *call.query.stride()[:2],
        *call.layer.keys,
        *call.layer.key_scales,
        call.layer.values,
        call.layer.value_scales,
        tiles.items,
        call.tables,
        call.tables.stride(0),
        *call.seen_blocks,
        visits,
        0 if visits is None else visits.stride(0),
        num_visits,
        call.how.sinks,
        bias,
        out,
        tiles.part_sums,
        tiles.part_statistics,
        statistics,
        call.how.scale,
        call.how.softcap,
        call.window,
        GROUP=call.heads.group,
        HEAD_DIM=call.heads.head_dim,
        FEATURES=features,
        REST=rest,
        ROWS=tiles.rows,
        MAX_DISTANCE=0 if bias is None else bias.shape[1] // 2,
        KEYS_ARE_VALUES=call.layer.keys_are_values,
        HAS_SINKS=call.how.sinks is not None,
        HAS_BIAS=bias is not None,
        HAS_GAPS=plan.has_gaps,
        HAS_STATISTICS=statistics is not None,
        num_warps=num_warps,
        num_stages=num_stages,
        **call.options,
    )


def _merge(call: AttentionCall, tiles: TileClass, out: torch.Tensor, statistics: torch.Tensor | None) -> None:
    features, rest = feature_parts(call.heads.head_dim)
    share = min(features, rest or features, _MERGED_FEATURES)
    features += rest
    num_merges = tiles.merges.shape[0]
    merge_parts[num_merges, call.heads.num_kv_heads, features // share](
        tiles.part_sums,
        tiles.part_statistics,
        tiles.merges,
        call.how.sinks,
        out,
        statistics,
        GROUP=call.heads.group,
        HEAD_DIM=call.heads.head_dim,
        FEATURES=features,
        SHARE=share,
        ROWS=tiles.rows,
        STAGES=3 if has_little_shared_memory() else 4,
        HAS_SINKS=call.how.sinks is not None,
        HAS_STATISTICS=statistics is not None,
        num_warps=_warps_and_stages(call, tiles.rows, share, num_merges)[0],
        enable_fp_fusion=False,
    )


def _warps_and_stages(call: AttentionCall, rows: int, features: int, num_tiles: int) -> tuple[int, int]:
    """Return how many warps hold two tiles of sums, and of float32 the operands, too; and how many stages.

    For few rows, two are enough where several programs share a multiprocessor; one that has it alone computes
    and fetches as much at a time as it can. Measured on an H200. One stage of more than 128 features, or of
    many rows in float32, fills the shared memory of smaller GPUs, and one of more than 256 that of all.
    """
    if features > 256:
        return 8, 1
    if call.is_float32 and rows > _FEW_ROWS:
        return 8, 3 if has_large_tiles() else 1
    if call.is_float32 or rows * features > 64 * 128:
        return 8, 1 if features > 128 and has_little_shared_memory() else 3
    if rows > _FEW_ROWS:
        return 4, 3
    if num_tiles * call.heads.num_kv_heads > MULTIPROCESSORS:
        return 2, 3
    return (8, 5) if features == 128 and has_large_tiles() else (4, 3)


def _check_query(query: torch.Tensor, layer: TritonLayer, batch: AttentionBatch) -> None:
    if query.dtype not in FLOAT_TYPES:
        raise TypeError(f"the query is {query.dtype}; it must be float32, bfloat16 or float16")
    num_tokens, num_heads, head_dim = query.shape
    if (
        num_tokens != batch.num_rows
        or num_heads % layer.num_kv_heads
        or head_dim != layer.head_dim
        or query.stride(2) != 1
    ):
        raise ValueError(
            f"the query is {list(query.shape)} with strides {query.stride()}; it must be "
            f"[{batch.num_rows}, a multiple of {layer.num_kv_heads}, {layer.head_dim}] for this "
            "step and cache, and a head's features adjacent"
        )
    if batch.block_size != layer.page_size:
        raise ValueError(
            f"the cache has blocks of {layer.page_size} tokens, and the batch of {batch.block_size}"
        )


def _check_sinks(sinks: torch.Tensor, query: torch.Tensor) -> None:
    if sinks.dtype is not torch.float32 or sinks.shape != query.shape[1:2] or not sinks.is_contiguous():
        raise ValueError(f"sinks is {sinks.dtype} {list(sinks.shape)}; it must be float32 [{query.shape[1]}]")


def _check_out(out: torch.Tensor, query: torch.Tensor) -> None:
    if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} with strides {out.stride()}; it must be {query.dtype} "
            f"{list(query.shape)} and contiguous"
        )


def _block_tables(batch: AttentionBatch, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Return the step's block tables [S or more, max_blocks or more] int32 on a device, checked once.

    Raises:
        IndexError: they end before a sequence does, or name a block that `num_blocks` do not include.
    """
    make = functools.partial(_padded_tables, num_blocks)
    return batch.on_device(("triton block tables", num_blocks), make, device).arrays[0]


def _padded_tables(num_blocks: int, batch: AttentionBatch) -> HostArrays:
    _check_tables(batch, num_blocks)
    num_sequences, width = batch.block_tables.shape
    shape = batch.sizes.rows(num_sequences), batch.sizes.rows(width)
    tables = np.zeros(shape, dtype=np.int32)
    tables[:num_sequences, :width] = batch.block_tables
    return HostArrays((tables,))


def _check_tables(batch: AttentionBatch, num_blocks: int) -> None:
    tables = batch.block_tables
    num_entries = -(-(batch.num_cached_tokens + batch.num_tokens) // batch.block_size)
    most = int(num_entries.max(initial=0))
    if most > tables.shape[1]:
        raise IndexError(f"a sequence fills {most} blocks; the step's tables have room for {tables.shape[1]}")
    highest = tables.view(np.uint32).max(initial=0)  # what is negative counts as large
    if highest >= num_blocks:  # which is no error where it is not read
        highest = tables.view(np.uint32)[np.arange(tables.shape[1]) < num_entries[:, None]].max(initial=0)
        if highest >= num_blocks:
            raise IndexError(f"the step names block {highest}; the cache has {num_blocks} blocks")
