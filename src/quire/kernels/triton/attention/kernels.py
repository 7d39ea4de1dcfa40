"""Paged attention in Triton: query tiles against key tiles, span by span.

A row's keys are cut into tiles of `TILE` and spans of `SPAN_TILES` tiles at fixed places of its cache. The
softmax sums of a span are made tile by tile (online softmax, Milakov and Gimelshein 2018), and those of spans
are merged one by one in ascending order, either by the program that has made them or by `merge_parts`. So who
computes which spans changes no bit, and neither does a tile that a row does not see: it adds an exact zero.
What is written as two operations is never fused to one (`enable_fp_fusion`), because a compiler would do that
differently in every kernel.

Scores are in units of log2, so that weights are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import bounds
from quire.kernels.triton.device import INTERPRETED, await_previous, loop_end, rounded
from quire.kernels.triton.kernel import kernel

TILE = tl.constexpr(bounds.TILE)  # keys
SPAN_TILES = tl.constexpr(4)

ITEM_FIELDS = tl.constexpr(12)  # of an item of `attend`, see `attention_items.plan_arrays`
MERGE_FIELDS = tl.constexpr(4)  # of a tile of `merge_parts`

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(left, right, sums):
    """Return `sums` + `left` @ `right` in float32."""
    if INTERPRETED:  # its products of bfloat16 are wrong, and others' roundings depend on a row's place
        return sums + tl.dot(left.to(tl.float64), right.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    else:  # noqa: RET505 - the compiler sees no more than one branch
        return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def row_sums(weights):
    """Return the sums of rows [ROWS], added up by tensor cores.

    These add in the same order in tiles of any height. What threads have is added in an order that depends
    on how many of them share a row.
    """
    ones = tl.full([weights.shape[1], 16], 1.0, tl.float32).to(weights.dtype)
    sums = product(weights, ones, tl.zeros([weights.shape[0], 16], tl.float32))
    return tl.max(sums, 1)  # all are equal


@triton.jit
def log2_scores(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the scores of products of queries and keys, over the logarithm of 2."""
    scores = products * scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        power = tl.exp2(scores * (2.0 * _LOG2_E / softcap))
        scores = softcap * (1.0 - 2.0 / (1.0 + power))
    return scores * _LOG2_E


@triton.jit
def log2_bias(bias, head, distance, is_row, MAX_DISTANCE: tl.constexpr):
    """Return what scores get for distances [rows, TILE], over the logarithm of 2; `head` [rows] is theirs."""
    nearest = tl.minimum(tl.maximum(distance, -MAX_DISTANCE), MAX_DISTANCE)
    of_rows = bias + head * (2 * MAX_DISTANCE + 1) + MAX_DISTANCE
    return tl.load(of_rows[:, None] + nearest, mask=is_row[:, None], other=0.0) * _LOG2_E


@triton.jit
def key_places(tables, sequence, table_stride, key, is_held, BLOCK_SIZE: tl.constexpr):
    """Return page and place in it of a sequence's keys."""
    page = tl.load(tables + sequence.to(tl.int64) * table_stride + key // BLOCK_SIZE, mask=is_held, other=0)
    return page.to(tl.int64), key % BLOCK_SIZE


@triton.jit
def load_vectors(pages, offset, is_held, HEAD_DIM: tl.constexpr, FEATURES: tl.constexpr):
    """Load [TILE, FEATURES] of a head's pages; zero where nothing is held, which may be anything there."""
    feature = tl.arange(0, FEATURES)
    is_number = is_held[:, None]
    if HEAD_DIM != FEATURES:
        is_number &= (feature < HEAD_DIM)[None, :]
    vectors = tl.load(pages + (offset[:, None] + feature[None, :]), mask=is_number, other=0.0)
    if INTERPRETED:  # it converts integers to bfloat16 wrongly
        vectors = vectors.to(tl.float32)
    return vectors


@triton.jit
def scaled(vectors, scales, PRODUCT_TYPE: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Return vectors [TILE, features] as they are multiplied with weights; `scales` [TILE] are theirs."""
    if HAS_SCALES:
        vectors = rounded(vectors.to(tl.float32) * scales[:, None], PRODUCT_TYPE)
    return vectors.to(PRODUCT_TYPE)


@triton.jit
def load_scales(scales, offset, is_held):
    """Load the scales of vectors, [TILE]."""
    return tl.load(scales + offset, mask=is_held, other=0.0)


@triton.jit
def weights_of(top, scores, PRODUCT_TYPE: tl.constexpr):
    """Return the largest of `top` and scores, the factor of sums so far, and the weights of scores."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = finite_or_zero(new_top)
    return new_top, tl.exp2(top - base), rounded(tl.exp2(scores - base[:, None]), PRODUCT_TYPE)


@triton.jit
def finite_or_zero(top):
    """Return what to subtract from scores, of which `top` is the largest."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def merge(top, total, sums, other_top, other_total, other_sums):
    """Return the largest score, the sum of weights and the weighted sums of both."""
    new_top = tl.maximum(top, other_top)
    base = finite_or_zero(new_top)
    factor, other_factor = tl.exp2(top - base), tl.exp2(other_top - base)
    total = total * factor + other_total * other_factor
    sums = sums * factor[:, None] + other_sums * other_factor[:, None]
    return new_top, total, sums


@triton.jit
def finish(top, total, sums, sinks, query_head, is_row, HAS_SINKS: tl.constexpr):
    """Let the sinks take part. Return the largest score, the sum of weights and the attention.

    Rows without keys, for which `is_row` is false, have none.
    """
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=is_row, other=float("-inf")) * _LOG2_E
        new_top = tl.maximum(top, sink)
        base = finite_or_zero(new_top)
        factor = tl.exp2(top - base)
        total = total * factor + tl.exp2(sink - base)
        sums = sums * factor[:, None]
        top = new_top
    return top, total, sums / tl.where(is_row, total, 1.0)[:, None]


@triton.jit
def store_attended(attended, out, token, query_head, is_row, first_feature, num_heads, HEAD_DIM):
    """Write [rows, features] to their tokens and heads of [T, heads, head_dim]."""
    feature = first_feature + tl.arange(0, attended.shape[1])
    rows = out + (token.to(tl.int64) * num_heads + query_head) * HEAD_DIM
    tl.store(
        rows[:, None] + feature[None, :],
        rounded(attended, out.dtype.element_ty),
        mask=is_row[:, None] & (feature < HEAD_DIM)[None, :],
    )


@triton.jit
def store_statistics(statistics, top, total, token, query_head, is_row, num_heads):
    """Write the largest score and the sum of weights to [T, heads, 2]."""
    places = statistics + (token.to(tl.int64) * num_heads + query_head) * 2
    tl.store(places, top, mask=is_row)
    tl.store(places + 1, total, mask=is_row)


@triton.jit
def listed_visits(item, visits, num_visits, kv_head):
    """Return how many tiles are listed for an item and KV head, and where; -1: none are."""
    first = tl.load(item + 11)
    of_item = num_visits + kv_head * tl.num_programs(0) + tl.program_id(0)
    return tl.load(of_item, mask=first >= 0, other=-1), visits + first


@triton.jit
def tile_at(
    number,
    first_tile,
    gap_tile,
    num_skipped,
    listed,
    num_listed,
    HAS_GAPS: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
):
    """Return the tile that an item visits after `number` others, anything if there is none."""
    tile = first_tile + number
    if HAS_GAPS:
        tile += tl.where(tile >= gap_tile, num_skipped, 0)
    if HAS_SELECTION:
        tile = tl.where(num_listed >= 0, tl.load(listed + number, mask=number < num_listed, other=0), tile)
    return tile


@kernel(do_not_specialize=["table_stride", "seen_stride", "visit_stride"])
def attend(
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
    values,
    value_scales,
    items,
    tables,
    table_stride,
    seen,  # [query blocks, heads, key blocks] int32
    seen_stride,
    block_of_token,
    visits,  # [kv_heads, of all items]
    visit_stride,
    num_visits,  # [kv_heads, items]
    sinks,
    distance_bias,  # [heads, 2 * MAX_DISTANCE + 1]
    out,
    part_sums,  # [parts, kv_heads, ROWS, FEATURES + REST]
    part_statistics,  # [parts, kv_heads, 2, ROWS]
    statistics,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEEN_TILES: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
    PRODUCT_TYPE: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
):
    """Attend with one query tile of one KV head to the tiles of one item; grid (items, kv_heads).

    Values have the strides of keys, and their scales those of keys' scales. Features beyond FEATURES are the
    REST, computed beside the others.
    The rows of a query tile are tokens times the heads of the KV head's group. The result goes to `out`, or,
    of an item that has not all tiles of its rows, to its part.
    """
    await_previous()
    item = items + tl.program_id(0) * ITEM_FIELDS
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    sequence, first_token = tl.load(item), tl.load(item + 1)
    num_tokens, first_place = tl.load(item + 2), tl.load(item + 3)
    first_tile, end_tile = tl.load(item + 4), tl.load(item + 5)
    gap_tile, gap_end_tile = tl.load(item + 6), tl.load(item + 7)
    part = tl.load(item + 10)

    row = tl.arange(0, ROWS)
    feature = tl.arange(0, FEATURES)
    is_row = row // GROUP < num_tokens
    token = first_token + row // GROUP
    row_place = first_place + row // GROUP
    query_head = kv_head * GROUP + row % GROUP
    query_rows = query + token.to(tl.int64) * query_token_stride + query_head * query_head_stride
    queries = tl.load(
        query_rows[:, None] + feature[None, :],
        mask=is_row[:, None] & (feature < HEAD_DIM)[None, :],
        other=0.0,
    ).to(PRODUCT_TYPE)
    if REST:
        rest = FEATURES + tl.arange(0, REST)
        rest_queries = tl.load(
            query_rows[:, None] + rest[None, :],
            mask=is_row[:, None] & (rest < HEAD_DIM)[None, :],
            other=0.0,
        ).to(PRODUCT_TYPE)
        no_rest = tl.zeros([ROWS, REST], tl.float32)
        rest_sums, span_rest = no_rest, no_rest
    key_pages, value_pages = keys + kv_head * key_head_stride, values + kv_head * key_head_stride

    no_top = tl.full([ROWS], float("-inf"), tl.float32)
    no_total = tl.zeros([ROWS], tl.float32)
    no_sums = tl.zeros([ROWS, FEATURES], tl.float32)
    no_products = tl.zeros([ROWS, TILE], tl.float32)
    top, total, sums = no_top, no_total, no_sums
    span_top, span_total, span_sums = no_top, no_total, no_sums
    num_skipped = gap_end_tile - gap_tile
    num_tiles, num_listed, listed = end_tile - first_tile - num_skipped, -1, visits
    if HAS_SELECTION:
        num_listed, listed = listed_visits(item, visits + kv_head * visit_stride, num_visits, kv_head)
        num_tiles = tl.where(num_listed >= 0, num_listed, num_tiles)
        query_block = tl.load(block_of_token + token, mask=is_row, other=-1)
        of_row = seen + (query_block.to(tl.int64) * (num_kv_heads * GROUP) + query_head) * seen_stride
    for number in range(loop_end(num_tiles)):
        tile = tile_at(number, first_tile, gap_tile, num_skipped, listed, num_listed, HAS_GAPS, HAS_SELECTION)
        key = tile * TILE + tl.arange(0, TILE)
        is_held = key < first_place + num_tokens
        is_seen = key[None, :] <= row_place[:, None]
        if HAS_WINDOW:
            is_held &= key > first_place - window
            is_seen &= key[None, :] > row_place[:, None] - window
        if HAS_GAPS:
            is_held &= (key < tl.load(item + 8)) | (key >= tl.load(item + 9))
            is_seen &= is_held[None, :]
        if HAS_SELECTION:
            selects = (query_block >= 0) & (tile // SEEN_TILES < seen_stride)
            is_selected = tl.load(of_row + tile // SEEN_TILES, mask=selects, other=1) != 0
            is_seen &= is_selected[:, None]

        page, place = key_places(tables, sequence, table_stride, key, is_held, BLOCK_SIZE)
        offset = page * key_page_stride + place * key_place_stride
        tile_keys = load_vectors(key_pages, offset, is_held, HEAD_DIM, FEATURES).to(PRODUCT_TYPE)
        products = product(queries, tl.trans(tile_keys), no_products)
        if REST:
            rest_keys = load_vectors(key_pages + FEATURES, offset, is_held, HEAD_DIM - FEATURES, REST)
            rest_keys = rest_keys.to(PRODUCT_TYPE)
            products = product(rest_queries, tl.trans(rest_keys), products)
        if HAS_SCALES:
            scale_offset = page * key_scale_page_stride + place * key_scale_place_stride
            scale_offset += kv_head * key_scale_head_stride
            products *= load_scales(key_scales, scale_offset, is_held)[None, :]
        scores = log2_scores(products, scale, softcap, HAS_SOFTCAP)
        if HAS_BIAS:  # of two-sided attention, see `attention_items.plan_arrays`
            moved = window // 2 if HAS_WINDOW else tl.load(item + 8) - 1
            distance = key[None, :] - (row_place - moved)[:, None]
            scores += log2_bias(distance_bias, query_head, distance, is_row, MAX_DISTANCE)
        scores = tl.where(is_seen, scores, float("-inf"))

        span_top, factor, weights = weights_of(span_top, scores, PRODUCT_TYPE)
        if KEYS_ARE_VALUES:
            tile_values = tile_keys
        else:
            tile_values = load_vectors(value_pages, offset, is_held, HEAD_DIM, FEATURES)
        tile_scales = is_held  # anything, if there are none
        if HAS_SCALES:
            tile_scales = load_scales(value_scales, scale_offset, is_held)
        span_total = span_total * factor + row_sums(weights)
        tile_values = scaled(tile_values, tile_scales, PRODUCT_TYPE, HAS_SCALES)
        span_sums = product(weights, tile_values, span_sums * factor[:, None])
        if REST:
            if KEYS_ARE_VALUES:
                rest_values = rest_keys
            else:
                rest_values = load_vectors(value_pages + FEATURES, offset, is_held, HEAD_DIM - FEATURES, REST)
            rest_values = scaled(rest_values, tile_scales, PRODUCT_TYPE, HAS_SCALES)
            span_rest = product(weights, rest_values, span_rest * factor[:, None])

        next_tile = tile_at(
            number + 1, first_tile, gap_tile, num_skipped, listed, num_listed, HAS_GAPS, HAS_SELECTION
        )
        if (number + 1 >= num_tiles) | (next_tile // SPAN_TILES != tile // SPAN_TILES):
            if REST:
                _, _, rest_sums = merge(top, total, rest_sums, span_top, span_total, span_rest)
                span_rest = no_rest
            top, total, sums = merge(top, total, sums, span_top, span_total, span_sums)
            span_top, span_total, span_sums = no_top, no_total, no_sums

    if part < 0:
        has_keys = is_row & (num_tiles > 0)
        if REST:
            _, _, attended = finish(top, total, rest_sums, sinks, query_head, has_keys, HAS_SINKS)
            num_heads = num_kv_heads * GROUP
            store_attended(attended, out, token, query_head, is_row, FEATURES, num_heads, HEAD_DIM)
        top, total, attended = finish(top, total, sums, sinks, query_head, has_keys, HAS_SINKS)
        store_attended(attended, out, token, query_head, is_row, 0, num_kv_heads * GROUP, HEAD_DIM)
        if HAS_STATISTICS:
            store_statistics(statistics, top, total, token, query_head, is_row, num_kv_heads * GROUP)
    else:
        of_part = part.to(tl.int64) * num_kv_heads + kv_head
        part_rows = part_sums + (of_part * ROWS + row)[:, None] * (FEATURES + REST)
        tl.store(part_rows + feature[None, :], sums)
        if REST:
            tl.store(part_rows + rest[None, :], rest_sums)
        tl.store(part_statistics + of_part * 2 * ROWS + row, top)
        tl.store(part_statistics + (of_part * 2 + 1) * ROWS + row, total)


@kernel()
def merge_parts(
    part_sums,
    part_statistics,
    merges,
    sinks,
    out,
    statistics,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
):
    """Merge the parts of one query tile and KV head; grid (tiles, kv_heads, FEATURES / SHARE)."""
    await_previous()
    fields = merges + tl.program_id(0) * MERGE_FIELDS
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    first_token, num_tokens = tl.load(fields), tl.load(fields + 1)
    first_part, num_parts = tl.load(fields + 2), tl.load(fields + 3)
    row = tl.arange(0, ROWS)
    feature = tl.program_id(2) * SHARE + tl.arange(0, SHARE)
    is_row = row // GROUP < num_tokens
    token = first_token + row // GROUP
    query_head = kv_head * GROUP + row % GROUP

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, SHARE], tl.float32)
    for number in tl.range(0, loop_end(num_parts), num_stages=STAGES):
        of_part = (first_part + number).to(tl.int64) * num_kv_heads + kv_head
        part_top = tl.load(part_statistics + of_part * 2 * ROWS + row)
        part_total = tl.load(part_statistics + (of_part * 2 + 1) * ROWS + row)
        of_rows = tl.load(part_sums + ((of_part * ROWS + row)[:, None] * FEATURES + feature[None, :]))
        top, total, sums = merge(top, total, sums, part_top, part_total, of_rows)
    top, total, attended = finish(top, total, sums, sinks, query_head, is_row, HAS_SINKS)
    num_heads = num_kv_heads * GROUP
    store_attended(attended, out, token, query_head, is_row, tl.program_id(2) * SHARE, num_heads, HEAD_DIM)
    if HAS_STATISTICS:  # noqa: SIM102 - the compiler decides this one, and the program the other
        if tl.program_id(2) == 0:
            store_statistics(statistics, top, total, token, query_head, is_row, num_heads)
