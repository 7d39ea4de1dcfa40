"""Products of rows with a weight matrix, both in float8; see `quire.kernels.triton.linear.products`."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device import await_previous, larger, largest_magnitude, nearest_float8
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.linear.products import store_products

LARGEST = tl.constexpr(448.0)  # number of float8
MIN_SCALE = tl.constexpr(2.0**-120)  # its inverse is a number, too; zeros have this scale


@kernel(do_not_specialize=["num_rows"])
def quantize_float8_kernel(
    rows,
    values,
    scales,
    num_rows,
    num_features,
    row_stride,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Make rows [T, n] float8, and a scale for each GROUP of their features, [groups, T] float32.

    The largest magnitude of a group becomes 448; the scale of one with NaN is NaN. GROUPS groups have all
    features.
    """
    await_previous()
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    group = tl.arange(0, GROUPS)[None, :, None]
    feature = group * GROUP + tl.arange(0, GROUP)[None, None, :]
    is_number = (row < num_rows) & (feature < num_features)
    wide = tl.load(rows + row * row_stride + feature, mask=is_number, other=0.0).to(tl.float32)
    largest = largest_magnitude(wide, axis=2, keep_dims=True)
    scale = larger(tl.math.div_rn(largest, LARGEST), MIN_SCALE)
    narrow = nearest_float8(wide * tl.math.div_rn(1.0, scale))
    tl.store(values + row * num_features + feature, narrow, mask=is_number)
    has_scale = (row < num_rows) & (group * GROUP < num_features)
    tl.store(scales + group * num_rows + row, scale, mask=has_scale)


@triton.jit
def float8_tile_sums(
    weight_rows,
    weight_scales,
    rows,
    row_scales,
    is_row,
    group_stride,
    IN_FEATURES: tl.constexpr,
    IN_GROUPS: tl.constexpr,
    OPERANDS: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Return the sums of products of float8 numbers, scaled, [FEATURES, ROWS] float32.

    `weight_rows` [FEATURES] and `rows` [ROWS] are where the weights of a feature and the numbers of a row
    begin; rows for which `is_row` [ROWS] is false are zeros, and not read. `weight_scales`, [FEATURES] or [1]
    for all of them, and `row_scales` [ROWS] are where their scales do: with IN_GROUPS one for each INPUTS
    inputs, the next of weights adjacent, that of rows `group_stride` further on; else one for all.
    Tensor cores add float8 products with some 14 bits. With scales for groups they add those of INPUTS inputs
    only, and these sums are added in float32. Else they add all: with 14,336 inputs results are off by 0.3 %
    on an H200, and by 3.7 % because numbers are rounded to float8.
    """
    place = tl.arange(0, INPUTS)
    weight_at = weight_rows[:, None] + place[None, :]
    rows_at = rows[None, :] + place[:, None]
    total = tl.zeros((FEATURES, ROWS), tl.float32)
    for start in range(0, IN_FEATURES, INPUTS):
        if IN_FEATURES % INPUTS == 0:
            left = tl.load(weight_at)
            right = tl.load(rows_at, mask=is_row[None, :], other=0.0)
        else:
            is_input = place < IN_FEATURES - start
            left = tl.load(weight_at, mask=is_input[None, :], other=0.0)
            right = tl.load(rows_at, mask=is_input[:, None] & is_row[None, :], other=0.0)
        left, right = left.to(OPERANDS), right.to(OPERANDS)
        if IN_GROUPS:
            part = tl.dot(left, right, input_precision="ieee", out_dtype=tl.float32)
            total += part * (tl.load(weight_scales)[:, None] * tl.load(row_scales)[None, :])
            weight_scales += 1
            row_scales += group_stride
        else:
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=tl.float32)
        weight_at += INPUTS
        rows_at += INPUTS
    if not IN_GROUPS:
        total *= tl.load(weight_scales)[:, None] * tl.load(row_scales)[None, :]
    return total


@triton.jit
def block_scales(
    scales,
    first_feature,
    out_features,
    IN_FEATURES: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Return where the scales of features' blocks begin, [FEATURES] or [1], in [blocks, groups].

    Where blocks are as large as tiles, all features of a program share a scale.
    """
    SCALES: tl.constexpr = 1 if BLOCK_FEATURES % FEATURES == 0 else FEATURES
    block = tl.minimum(first_feature + tl.arange(0, SCALES), out_features - 1) // BLOCK_FEATURES
    return scales + block * tl.cdiv(IN_FEATURES, INPUTS)


@kernel(do_not_specialize=["num_rows"])
def float8_linear_kernel(
    rows,
    row_scales,
    weight,
    weight_scales,
    bias,
    out,
    num_rows,
    out_features,
    out_stride,
    IN_FEATURES: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    IN_GROUPS: tl.constexpr,
    OPERANDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Multiply rows [T, in] with a matrix [out, in], both in float8.

    Without IN_GROUPS, a row has one scale, and so has a feature. With it, INPUTS inputs of a row share a
    scale, [groups, T], and so do those of BLOCK_FEATURES features, [blocks, groups].
    """
    await_previous()
    first_feature = tl.program_id(0) * FEATURES
    feature = first_feature + tl.arange(0, FEATURES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    read_feature = tl.minimum(feature, out_features - 1).to(tl.int64)
    read_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    weight_scales_at = weight_scales + read_feature
    if IN_GROUPS:
        weight_scales_at = block_scales(
            weight_scales, first_feature, out_features, IN_FEATURES, BLOCK_FEATURES, FEATURES, INPUTS
        )
    result = float8_tile_sums(
        weight + read_feature * IN_FEATURES, weight_scales_at,
        rows + read_row * IN_FEATURES, row_scales + read_row, row < num_rows, num_rows,
        IN_FEATURES, IN_GROUPS, OPERANDS, FEATURES, ROWS, INPUTS,
    )  # fmt: skip
    store_products(
        result, bias, out, first_feature, row, row < num_rows, out_features, out_stride, HAS_BIAS, ACTIVATION
    )
