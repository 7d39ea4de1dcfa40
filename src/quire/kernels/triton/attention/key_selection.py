"""Which keys the tokens of prompts see, by the estimate of `KeySelection`, and which tiles attention visits.

Only products and the sums of their weights are kernels of their own; what is left of a query block is few
numbers. Each query block is estimated by itself, so its selection does not depend on the rest of the batch.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels import bounds
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.sparse_prefill import KeySelection, query_blocks
from quire.kernels.attention.step_arrays import HostArrays
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.attention.call import AttentionCall, SelectedKeys
from quire.kernels.triton.attention.items import padded_features
from quire.kernels.triton.attention.kernels import (
    ITEM_FIELDS,
    TILE,
    finite_or_zero,
    key_places,
    load_scales,
    load_vectors,
    log2_scores,
    product,
)
from quire.kernels.triton.attention.plan import TileClass
from quire.kernels.triton.device import (
    await_previous,
    has_large_tiles,
    has_little_shared_memory,
    loop_end,
)
from quire.kernels.triton.kernel import kernel

BLOCK_FIELDS = tl.constexpr(5)
"""Of a query block: its sequence, the first token, that one's place, tokens, and keys up to their end."""

_ROWS = 64  # of a program, unless one head has more; half of it where shared memory is little
_MANY_FEATURES = 512  # with which it is a quarter
_KEY_BLOCKS = tl.constexpr(16)  # of a program, and of a part of its sums
_UNITS = tl.constexpr(float(1 << 40))  # of mass in a row
_TILES = tl.constexpr(64)  # looked at together


def select_keys(call: AttentionCall, batch: AttentionBatch) -> SelectedKeys | None:
    """Return which key blocks a step's tokens see; None: all."""
    selection = batch.key_selection
    if selection is None or call.window:
        return None
    device = call.query.device
    blocks, block_of_token, rows = batch.on_device("triton query blocks", _query_blocks, device).arrays
    if not len(blocks):
        return None
    num_key_blocks = _num_key_blocks(batch, selection)
    bytes_per_block = bounds.gpu_estimate_bytes(
        call.query.shape[1], num_key_blocks, selection.block_size // selection.stride
    )
    per_slice = max(1, bounds.GPU_ESTIMATE_BYTES // bytes_per_block)
    seen = [
        _select(_masses(call, part, of_part, selection, num_key_blocks), part, selection)
        for part, of_part in zip(blocks.split(per_slice), rows.split(per_slice), strict=True)
    ]
    return SelectedKeys(torch.cat(seen), block_of_token, selection.block_size)


def _query_blocks(batch: AttentionBatch) -> HostArrays:
    """Return what is known of the query blocks that leave out keys, and which one each token is in.

    Returns:
        [Q, BLOCK_FIELDS] int32, see there; [T] int32 the block of each token, -1: it sees all keys; [Q, 2]
        int64 the first and the last row of the estimate that has one of the block's tokens.
    """
    selection = batch.key_selection
    assert selection is not None
    size, stride = selection.block_size, selection.stride
    of_token = np.full(batch.num_rows, -1, dtype=np.int32)
    fields: list[tuple[int, ...]] = []
    rows: list[tuple[int, int]] = []
    for block in query_blocks(selection, batch.num_cached_tokens, batch.num_tokens):
        of_token[block.first_row : block.first_row + block.num_tokens] = len(fields)
        num_keys = min(block.num_keys, (block.first_place // size + 1) * size)
        fields.append((block.sequence, block.first_row, block.first_place, block.num_tokens, num_keys))
        before = block.first_place % size
        rows.append((before // stride, (before + block.num_tokens - 1) // stride))
    return HostArrays(
        (
            np.array(fields, dtype=np.int32).reshape(-1, BLOCK_FIELDS.value),
            of_token,
            np.array(rows, dtype=np.int64).reshape(-1, 2),
        )
    )


def _num_key_blocks(batch: AttentionBatch, selection: KeySelection) -> int:
    """Return the key blocks of the longest sequence."""
    return -(-int((batch.num_cached_tokens + batch.num_tokens).max()) // selection.block_size)


def _masses(
    call: AttentionCall,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    selection: KeySelection,
    num_key_blocks: int,
) -> torch.Tensor:
    """Return the masses of key blocks for query blocks, [Q, heads, key blocks] int64, see `add_masses`."""
    num_rows, group = selection.block_size // selection.stride, next_power_of_2(call.heads.group)
    features = padded_features(call.heads.head_dim)
    is_large = features > 128 and not has_large_tiles()
    rows_of_program = _ROWS // 2 if is_large and has_little_shared_memory() else _ROWS
    if features > _MANY_FEATURES:
        is_large, rows_of_program = True, _ROWS // 4
    heads_of_program = min(group, max(1, rows_of_program // num_rows))
    shape = len(blocks), call.query.shape[1], num_key_blocks, num_rows
    log_sums = torch.empty(shape, dtype=torch.float32, device=call.query.device)
    grid = (
        len(blocks),
        call.heads.num_kv_heads * (group // heads_of_program),
        -(-num_key_blocks // _KEY_BLOCKS.value),
    )
    weigh_key_blocks[grid](
        call.query,
        *call.query.stride()[:2],
        *call.layer.keys,
        *call.layer.key_scales,
        blocks,
        call.tables,
        call.tables.stride(0),
        log_sums,
        num_key_blocks,
        call.how.scale,
        call.how.softcap,
        KV_HEADS=call.heads.num_kv_heads,
        GROUP=call.heads.group,
        HEADS=heads_of_program,
        HEAD_DIM=call.heads.head_dim,
        FEATURES=features,
        BLOCK_SIZE=call.layer.page_size,
        SIZE=selection.block_size,
        STRIDE=selection.stride,
        ROWS=max(16, heads_of_program * num_rows),
        COLUMNS=max(16, num_rows),
        PRODUCT_TYPE=call.layer.product_type(call.query.dtype),
        HAS_SCALES=call.layer.has_scales,
        HAS_SOFTCAP=call.how.softcap != 0.0,
        num_warps=4,
        num_stages=1 if is_large else 2,
        enable_fp_fusion=False,
    )
    masses = torch.zeros(shape[:3], dtype=torch.int64, device=call.query.device)
    add_masses[shape[:2]](
        log_sums,
        blocks,
        rows,
        masses,
        num_key_blocks,
        SIZE=selection.block_size,
        HEAD_ROWS=num_rows,
        ROWS=next_power_of_2(num_rows),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return masses


def _select(masses: torch.Tensor, blocks: torch.Tensor, selection: KeySelection) -> torch.Tensor:
    """Return which blocks are selected by masses as of `_masses`; see `KeySelection`.

    As int32: with a load of fewer bits than keys have, the compiler lets tensor cores take the numbers of a
    product in another order, and so attention to all keys would have other bits than without a selection.
    """
    own = (blocks[:, 2].long() // selection.block_size)[:, None, None]
    number = torch.arange(masses.shape[2], device=masses.device)
    is_choice = (number > 0) & (number < own)
    falling, order = masses.masked_fill(~is_choice, -1).sort(dim=2, descending=True, stable=True)
    of_others = masses[:, :, :1] + masses.gather(2, own.expand(-1, masses.shape[1], -1))
    falling = torch.cat([of_others, falling[:, :, :-1].clamp(min=0)], dim=2)
    enough = selection.threshold * masses.sum(dim=2, keepdim=True).double()
    is_selected = (falling.cumsum(dim=2).double() < enough) | (masses < 0).any(dim=2, keepdim=True)
    seen = torch.empty_like(masses, dtype=torch.bool).scatter_(2, order, is_selected)
    return ((seen & is_choice) | (number == 0) | (number == own)).to(torch.int32)


@kernel(do_not_specialize=["table_stride", "num_key_blocks"])
def weigh_key_blocks(
    query,
    query_token_stride,
    query_head_stride,
    keys,
    key_head_stride,
    key_page_stride,
    key_place_stride,
    key_scales,
    key_scale_head_stride,
    key_scale_page_stride,
    key_scale_place_stride,
    blocks,
    tables,
    table_stride,
    log_sums,  # [Q, heads, key blocks, rows of a head]
    num_key_blocks,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRODUCT_TYPE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Write the logarithms (of base 2) of the sums of weights of each row of the estimate in each key block.

    Grid (query blocks, KV heads x parts of their groups, parts of the key blocks). A row stands for `STRIDE`
    queries of a head, a column for as many keys; both are taken along antidiagonals.
    """
    await_previous()
    fields = blocks + tl.program_id(0) * BLOCK_FIELDS
    sequence, first_token = tl.load(fields), tl.load(fields + 1)
    first_place, num_tokens, num_keys = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    kv_head, part = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    own = first_place // SIZE

    HEAD_ROWS: tl.constexpr = SIZE // STRIDE
    row, column, feature = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, FEATURES)
    of_group = part * HEADS + row // HEAD_ROWS
    is_row = (row // HEAD_ROWS < HEADS) & (of_group < GROUP)
    query_head = kv_head * GROUP + of_group
    key_pages = keys + kv_head * key_head_stride
    log_sums_of_row = (tl.program_id(0).to(tl.int64) * (KV_HEADS * GROUP) + query_head) * num_key_blocks

    first_block = tl.program_id(2) * _KEY_BLOCKS
    end_block = tl.minimum(first_block + _KEY_BLOCKS, own + 1)
    for number in range(loop_end(tl.maximum(end_block - first_block, 0))):
        key_block = first_block + number
        products = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(STRIDE):
            query_place = own * SIZE + row % HEAD_ROWS * STRIDE + (STRIDE - 1 - step) - first_place
            is_query = is_row & (query_place >= 0) & (query_place < num_tokens)
            token = (first_token + query_place).to(tl.int64)
            query_rows = query + token * query_token_stride + query_head * query_head_stride
            queries = tl.load(
                query_rows[:, None] + feature[None, :],
                mask=is_query[:, None] & (feature < HEAD_DIM)[None, :],
                other=0.0,
            ).to(PRODUCT_TYPE)
            key = key_block * SIZE + column * STRIDE + step
            is_held = (column < HEAD_ROWS) & (key < num_keys)
            page, place = key_places(tables, sequence, table_stride, key, is_held, BLOCK_SIZE)
            offset = page * key_page_stride + place * key_place_stride
            tile_keys = load_vectors(key_pages, offset, is_held, HEAD_DIM, FEATURES).to(PRODUCT_TYPE)
            if HAS_SCALES:
                scale_offset = page * key_scale_page_stride + place * key_scale_place_stride
                scale_offset += kv_head * key_scale_head_stride
                of_step = product(queries, tl.trans(tile_keys), tl.zeros([ROWS, COLUMNS], tl.float32))
                products += of_step * load_scales(key_scales, scale_offset, is_held)[None, :]
            else:
                products = product(queries, tl.trans(tile_keys), products)
        scores = log2_scores(products * (1.0 / STRIDE), scale, softcap, HAS_SOFTCAP)
        last_column = (own - key_block) * HEAD_ROWS + row % HEAD_ROWS
        is_seen = (column < HEAD_ROWS)[None, :] & (column[None, :] <= last_column[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        top = tl.max(scores, 1)
        total = tl.sum(tl.exp2(scores - finite_or_zero(top)[:, None]), 1)
        at = log_sums + (log_sums_of_row + key_block) * HEAD_ROWS + row % HEAD_ROWS
        tl.store(at, top + tl.log2(total), mask=is_row)


@kernel(do_not_specialize=["num_key_blocks"])
def add_masses(
    log_sums,
    blocks,
    rows,
    masses,
    num_key_blocks,
    SIZE: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the masses of the key blocks that a query block's head sees; grid (query blocks, heads).

    They are in whole units of 2^-40 of a row, -1 for no number: torch adds up floats in an order that depends
    on how many there are, and so on the longest sequence of the step.
    """
    await_previous()
    own = tl.load(blocks + tl.program_id(0) * BLOCK_FIELDS + 2) // SIZE
    first_row, last_row = tl.load(rows + tl.program_id(0) * 2), tl.load(rows + tl.program_id(0) * 2 + 1)
    of_head = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * num_key_blocks
    row = tl.arange(0, ROWS)
    has_token = (row >= first_row) & (row <= last_row)
    num_parts = tl.cdiv(own + 1, _KEY_BLOCKS)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(loop_end(num_parts)):
        top = tl.maximum(top, tl.max(_part_of_log_sums(log_sums, of_head, part, own, row, HEAD_ROWS), 0))
    total = tl.zeros([ROWS], tl.float32)
    for part in range(loop_end(num_parts)):
        of_part = _part_of_log_sums(log_sums, of_head, part, own, row, HEAD_ROWS)
        total += tl.sum(tl.exp2(of_part - finite_or_zero(top)[None, :]), 0)
    for part in range(loop_end(num_parts)):
        of_part = _part_of_log_sums(log_sums, of_head, part, own, row, HEAD_ROWS)
        weights = tl.exp2(of_part - finite_or_zero(top)[None, :]) / total[None, :]
        mass = tl.sum(tl.where(has_token[None, :], weights, 0.0).to(tl.float64), 1)
        units = tl.where(mass == mass, tl.floor(mass * _UNITS + 0.5), -1.0).to(tl.int64)
        key_block = part * _KEY_BLOCKS + tl.arange(0, _KEY_BLOCKS)
        tl.store(masses + of_head + key_block, units, mask=key_block <= own)


@triton.jit
def _part_of_log_sums(log_sums, of_head, part, own, row, HEAD_ROWS: tl.constexpr):
    """Load [_KEY_BLOCKS, ROWS] of a head's sums, -inf for key blocks behind `own`."""
    key_block = part * _KEY_BLOCKS + tl.arange(0, _KEY_BLOCKS)
    at = (of_head + key_block)[:, None] * HEAD_ROWS + row[None, :]
    is_seen = (key_block <= own)[:, None] & (row < HEAD_ROWS)[None, :]
    return tl.load(log_sums + at, mask=is_seen, other=float("-inf"))


def list_visits(call: AttentionCall, tiles: TileClass) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the key tiles that items visit, and how many; (None, None): those of their plan.

    Returns:
        [kv_heads, all of a class's items'] int32; [kv_heads, N] int32.
    """
    selected, num_kv_heads = call.selected, call.heads.num_kv_heads
    if selected is None:
        return None, None
    counts = torch.empty(num_kv_heads, len(tiles.items), dtype=torch.int32, device=call.query.device)
    visits = torch.empty(num_kv_heads, tiles.num_visits, dtype=torch.int32, device=call.query.device)
    if not tiles.num_visits:  # no item has a list
        return visits, counts
    write_visits[len(tiles.items), num_kv_heads](
        tiles.items,
        selected.block_of_token,
        selected.seen,
        selected.seen.shape[2],
        visits,
        visits.stride(0),
        counts,
        GROUP=call.heads.group,
        TOKENS=next_power_of_2(max(1, tiles.rows // call.heads.group)),
        SEEN_TILES=selected.block_size // TILE.value,
        num_warps=4,
    )
    return visits, counts


@kernel(do_not_specialize=["num_key_blocks", "visit_stride"])
def write_visits(
    items,
    block_of_token,
    seen,
    num_key_blocks,
    visits,
    visit_stride,
    counts,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    SEEN_TILES: tl.constexpr,
):
    """Write which key tiles one item and KV head visits, in ascending order; grid (items, kv_heads)."""
    await_previous()
    item = items + tl.program_id(0) * ITEM_FIELDS
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    start = tl.load(item + 11)
    if start < 0:
        return
    first_token, num_tokens = tl.load(item + 1), tl.load(item + 2)
    first_tile, end_tile = tl.load(item + 4), tl.load(item + 5)
    gap_tile, gap_end_tile = tl.load(item + 6), tl.load(item + 7)
    token = tl.arange(0, TOKENS)
    block = tl.load(block_of_token + first_token + token, mask=token < num_tokens, other=0)
    sees_all = tl.min(tl.where(token < num_tokens, block, 0), 0) < 0
    last_block = tl.max(tl.where(token < num_tokens, block, -1), 0)
    first_block = tl.min(tl.where((token < num_tokens) & (block >= 0), block, last_block), 0)
    count = tl.zeros((), tl.int32)
    for number in range(loop_end(tl.cdiv(end_tile - first_tile, _TILES))):
        tile = first_tile + number * _TILES + tl.arange(0, _TILES)
        is_tile = (tile < end_tile) & ((tile < gap_tile) | (tile >= gap_end_tile))
        key_block = tile // SEEN_TILES
        is_visited = (tile < 0) | sees_all
        for block_number in range(loop_end(last_block - first_block + 1)):
            of_block = (first_block + block_number).to(tl.int64) * (num_kv_heads * GROUP) + kv_head * GROUP
            for head in range(GROUP):
                at = seen + (of_block + head) * num_key_blocks + key_block
                is_visited |= tl.load(at, mask=is_tile & (key_block < num_key_blocks), other=0) != 0
        is_visited &= is_tile
        place = count + tl.cumsum(is_visited.to(tl.int32), 0) - 1
        tl.store(visits + kv_head * visit_stride + start + place, tile, mask=is_visited)
        count += tl.sum(is_visited.to(tl.int32), 0)
    tl.store(counts + kv_head * tl.num_programs(0) + tl.program_id(0), count)
