"""Products of rows with the matrices of the experts that they are routed to, in Triton."""

from __future__ import annotations

import triton.language as tl

from quire.kernels.triton.device import await_previous, rounded
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.linear.float8_products import float8_tile_sums
from quire.kernels.triton.linear.products import grouped_tile_sums, store_products, tile_sums
from quire.kernels.triton.rows import activated, feature_by_turns


@kernel(do_not_specialize=["row_scales_stride"])
def expert_product_kernel(
    rows,
    row_scales,
    weights,
    weight_scales,
    zeros,
    biases,
    input_order,
    pairs,
    tiles,
    out,
    out_features,
    row_stride,
    row_scales_stride,
    weight_stride,
    out_stride,
    PAIRS_PER_ROW: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    OPERANDS: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OWN_ACTIVATION: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Multiply the row of each pair with its expert's matrix; a program has a tile of pairs, see `Routing`.

    Matrices are [experts, out, in]: in float8 if there are BLOCK_FEATURES, in groups if there are BITS, as in
    the kernels of `float8_products` and `products`. With an ACTIVATION, the first half of the outputs are
    gates of the second: a program's features are of both by turns, and it stores their gated activation. With
    an OWN_ACTIVATION it stores that of each output.
    """
    await_previous()
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    first = tl.load(tiles + num_tiles + tile)
    end = tl.load(tiles + 2 * num_tiles + tile)
    if first >= end:
        return
    expert = tl.load(tiles + tile).to(tl.int64)
    place = first + tl.arange(0, ROWS)
    pair = tl.load(pairs + tl.minimum(place, end - 1)).to(tl.int64)
    row = pair // PAIRS_PER_ROW
    first_feature = tl.program_id(0) * FEATURES
    feature = first_feature + tl.arange(0, FEATURES)
    if ACTIVATION != "":
        read_feature = feature_by_turns(feature, out_features // 2).to(tl.int64)
    else:
        read_feature = tl.minimum(feature, out_features - 1).to(tl.int64)
    begins_with_bias: tl.constexpr = HAS_BIAS and not (BLOCK_FEATURES or BITS or HAS_ROW_SCALES)
    feature_weights = weights + (expert * out_features + read_feature) * weight_stride
    if BLOCK_FEATURES:
        num_groups: tl.constexpr = tl.cdiv(IN_FEATURES, INPUTS) if GROUP else 1
        block = expert * tl.cdiv(out_features, BLOCK_FEATURES) + read_feature // BLOCK_FEATURES
        result = float8_tile_sums(
            feature_weights, weight_scales + block * num_groups,
            rows + row * row_stride, row_scales + row, place < end, row_scales_stride,
            IN_FEATURES, GROUP > 0, OPERANDS, FEATURES, ROWS, INPUTS,
        )  # fmt: skip
    elif BITS:
        table = expert * (IN_FEATURES // GROUP) * out_features + read_feature
        result = grouped_tile_sums(
            feature_weights, weight_scales + table, zeros + table, out_features,
            rows + row * row_stride, input_order + expert * IN_FEATURES if HAS_ORDER else None,
            IN_FEATURES, BITS, GROUP, OPERANDS, SUMS, HAS_ORDER, FEATURES, ROWS, INPUTS,
        )  # fmt: skip
        if HAS_ROW_SCALES:
            result *= tl.load(row_scales + row)[None, :]
    else:
        total = tl.zeros((FEATURES, ROWS), SUMS)
        if begins_with_bias:  # see `first_sums`
            total += tl.load(biases + expert * out_features + read_feature)[:, None]
        result = tile_sums(
            total, feature_weights, rows + row * row_stride, place < end, IN_FEATURES, OPERANDS, SUMS, INPUTS
        )
        if HAS_ROW_SCALES:
            feature_scales = tl.load(weight_scales + expert * out_features + read_feature)
            result *= feature_scales[:, None] * tl.load(row_scales + row)[None, :]
    if HAS_BIAS and not begins_with_bias:
        result += tl.load(biases + expert * out_features + read_feature)[:, None]
    if OWN_ACTIVATION != "":
        result = activated(rounded(result, out.dtype.element_ty).to(tl.float32), OWN_ACTIVATION)
    store_products(
        result, None, out, first_feature, pair, place < end, out_features, out_stride, False, ACTIVATION
    )


@kernel()
def add_results_kernel(results, weights, out, num_features, out_stride, K: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the weighted results of a row's pairs, from the first to the last."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = feature < num_features
    total = tl.zeros((BLOCK,), tl.float32)
    for pair in range(row * K, row * K + K):
        result = tl.load(results + pair * num_features + feature, mask=is_feature, other=0.0)
        total += result.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + row * out_stride + feature, rounded(total, out.dtype.element_ty), mask=is_feature)
