"""The key scores of a step in Triton: weights once more, from the statistics that attention leaves."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.key_scores import KeyScores
from quire.kernels.bounds import SCORE_UNIT
from quire.kernels.devices.device import array_to_device
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.attention.call import AttentionCall
from quire.kernels.triton.attention.items import numbered, padded_features
from quire.kernels.triton.attention.kernels import (
    TILE,
    finite_or_zero,
    key_places,
    load_scales,
    load_vectors,
    log2_scores,
    product,
)
from quire.kernels.triton.device import await_previous
from quire.kernels.triton.kernel import kernel
from quire.step import Int64Array

_ROWS = 64  # of a program, unless one token has more
_FEW_ROWS = 16  # in float32, or with more features than these
_MANY_FEATURES = 512
_FIELDS = tl.constexpr(9)
_UNITS = tl.constexpr(1.0 / SCORE_UNIT)
_NAME = "triton key scores"  # among a batch's plans


def write_key_scores(call: AttentionCall, batch: AttentionBatch, statistics: torch.Tensor) -> None:
    """Overwrite the step's key scores of a layer.

    Args:
        call: what attention was asked for.
        batch: the step, with key scores where the query is.
        statistics: [T, heads, 2] float32: of each row's scores the largest, over the logarithm of 2, and the
            sum of weights.

    Raises:
        ValueError: the key scores are on another device.
    """
    scores, device = batch.key_scores, call.query.device
    assert scores is not None
    if scores.layer_rows.device != device:
        raise ValueError(f"the key scores are on {scores.layer_rows.device}, and the query on {device}")
    group = next_power_of_2(call.heads.group)
    features = padded_features(call.heads.head_dim)
    has_few_rows = call.is_float32 or features > _MANY_FEATURES
    tokens = max(1, (_FEW_ROWS if has_few_rows else _ROWS) // group)
    key = _NAME, tokens, call.window
    if key not in batch.plans:
        blocks = _score_blocks(batch, scores, tokens, call.window)
        max_tiles = int((blocks[:, 5] - blocks[:, 4]).max())
        batch.plans[key] = array_to_device(blocks, device), max_tiles
    blocks, max_tiles = batch.plans[key]
    scores.clear()
    score_keys[len(blocks), max_tiles](
        call.query,
        *call.query.stride()[:2],
        *call.layer.keys,
        *call.layer.key_scales,
        blocks,
        call.tables,
        call.tables.stride(0),
        *call.seen_blocks,
        statistics,
        scores.rows,
        scores.sums,
        call.how.scale,
        call.how.softcap,
        call.window,
        KV_HEADS=call.heads.num_kv_heads,
        GROUP=call.heads.group,
        PADDED_GROUP=group,
        TOKENS=tokens,
        HEAD_DIM=call.heads.head_dim,
        FEATURES=features,
        **call.options,
        num_warps=8 if call.is_float32 else 4,
        num_stages=1,
    )


def _score_blocks(batch: AttentionBatch, scores: KeyScores, tokens: int, window: int) -> Int64Array:
    """Return the blocks of up to `tokens` scoring tokens of a sequence, [N, _FIELDS]; see `score_keys`."""
    sequence, number = numbered(-(-scores.num_scoring_tokens // tokens))
    first = number * tokens
    num_tokens = np.minimum(scores.num_scoring_tokens[sequence] - first, tokens)
    first_place = (scores.num_keys - scores.num_scoring_tokens)[sequence] + first
    first_token = (np.cumsum(batch.num_tokens) - scores.num_scoring_tokens)[sequence] + first
    tile = TILE.value
    oldest = np.maximum(first_place - window + 1, 0) if window else np.zeros_like(first_place)
    stride = -(-scores.num_keys[sequence] // tile) * tile
    is_summed = scores.num_rows[sequence] == 0
    start = np.where(is_summed, scores.first_sum[sequence], scores.first_row[sequence] + first * stride)
    fields = (
        sequence,
        first_token,
        num_tokens,
        first_place,
        oldest // tile,
        (first_place + num_tokens - 1) // tile + 1,
        start,
        stride,
        is_summed,
    )
    return np.stack([field.astype(np.int64) for field in fields], axis=1)


@kernel(do_not_specialize=["table_stride", "seen_stride"])
def score_keys(
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
    seen,  # [query blocks, heads, key blocks] int32
    seen_stride,
    block_of_token,
    statistics,
    rows,
    sums,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEEN_TILES: tl.constexpr,
    PRODUCT_TYPE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
):
    """Write the scores of one tile of keys to the rows of a block's tokens, or add to their sums.

    Grid (blocks, most tiles). A row adds the heads of each group, then the groups in ascending order.
    """
    await_previous()
    block = blocks + tl.program_id(0) * _FIELDS
    sequence, first_token = tl.load(block), tl.load(block + 1)
    num_tokens, first_place = tl.load(block + 2), tl.load(block + 3)
    tile = tl.load(block + 4) + tl.program_id(1)
    if tile < tl.load(block + 5):
        start, stride, is_summed = tl.load(block + 6), tl.load(block + 7), tl.load(block + 8)
        row = tl.arange(0, TOKENS * PADDED_GROUP)
        feature = tl.arange(0, FEATURES)
        token = first_token + row // PADDED_GROUP
        row_place = first_place + row // PADDED_GROUP
        is_row = (row // PADDED_GROUP < num_tokens) & (row % PADDED_GROUP < GROUP)
        key = tile * TILE + tl.arange(0, TILE)
        is_held = key < first_place + num_tokens
        is_seen = (key[None, :] <= row_place[:, None]) & is_row[:, None]
        if HAS_WINDOW:
            is_held &= key > first_place - window
            is_seen &= key[None, :] > row_place[:, None] - window
        page, place = key_places(tables, sequence, table_stride, key, is_held, BLOCK_SIZE)
        offset = page * key_page_stride + place * key_place_stride
        scale_offset = page * key_scale_page_stride + place * key_scale_place_stride
        shares = tl.zeros([TOKENS, TILE], tl.float32)
        units = tl.zeros([TILE], tl.int64)
        for kv_head in range(KV_HEADS):
            query_head = kv_head * GROUP + row % PADDED_GROUP
            query_rows = query + token * query_token_stride + query_head * query_head_stride
            queries = tl.load(
                query_rows[:, None] + feature[None, :],
                mask=is_row[:, None] & (feature < HEAD_DIM)[None, :],
                other=0.0,
            ).to(PRODUCT_TYPE)
            tile_keys = load_vectors(
                keys + kv_head * key_head_stride, offset, is_held, HEAD_DIM, FEATURES
            ).to(PRODUCT_TYPE)
            no_products = tl.zeros([TOKENS * PADDED_GROUP, TILE], tl.float32)
            products = product(queries, tl.trans(tile_keys), no_products)
            if HAS_SCALES:
                products *= load_scales(key_scales + kv_head * key_scale_head_stride, scale_offset, is_held)[
                    None, :
                ]
            scores = log2_scores(products, scale, softcap, HAS_SOFTCAP)
            of_head = token * (KV_HEADS * GROUP) + query_head
            is_visible = is_seen
            if HAS_SELECTION:
                query_block = tl.load(block_of_token + token, mask=is_row, other=-1)
                of_row = seen + (query_block * (KV_HEADS * GROUP) + query_head) * seen_stride
                selects = (query_block >= 0) & (tile // SEEN_TILES < seen_stride)
                is_selected = tl.load(of_row + tile // SEEN_TILES, mask=selects, other=1)
                is_visible = is_seen & (is_selected != 0)[:, None]
            top = tl.load(statistics + of_head * 2, mask=is_row, other=0.0)
            total = tl.load(statistics + of_head * 2 + 1, mask=is_row, other=0.0)
            weights = tl.exp2(tl.where(is_visible, scores, float("-inf")) - finite_or_zero(top)[:, None])
            is_finite = total > 0.0
            weights = weights / tl.where(is_finite, total, 1.0)[:, None]
            weights = tl.where(is_finite[:, None], weights, 0.0)
            if is_summed != 0:
                units += tl.sum((weights * _UNITS).to(tl.int64), 0)
            else:
                shares += tl.sum(tl.reshape(weights, [TOKENS, PADDED_GROUP, TILE]), 1)
        if is_summed != 0:
            tl.atomic_add(sums + start + key, units, sem="relaxed")
        else:
            of_token = tl.arange(0, TOKENS)
            tl.store(
                rows + start + (of_token * stride)[:, None] + key[None, :],
                shares,
                mask=(of_token < num_tokens)[:, None],
            )
