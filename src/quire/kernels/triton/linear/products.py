"""Products of rows with a weight matrix, in Triton.

A program computes a tile of output features by rows, with the weights as the left operand: few rows are then
few columns, and cost little more than reading the weights. Each number is one sum over all inputs in their
order. How many inputs are multiplied at once may follow from the number of rows only where the order of
additions does not depend on it; see `tiled_linear.tile_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device import await_previous, largest_magnitude, nearest_int, rounded
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.rows import gated_products


@kernel(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    rows, values, scales, num_rows, num_features, row_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Make rows [T, n] int8 and a scale for each, [T] float32: the largest magnitude becomes 127.

    The scale of a row with NaN is NaN.
    """
    await_previous()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, BLOCK)
    is_row = row < num_rows
    is_number = is_row[:, None] & (feature < num_features)[None, :]
    at = row[:, None] * row_stride + feature[None, :]
    wide = tl.load(rows + at, mask=is_number, other=0.0).to(tl.float32)
    largest = largest_magnitude(wide, axis=1)
    inverse = tl.math.div_rn(127.0, tl.where(largest > 0.0, largest, 1.0))
    inverse = tl.where(largest > 0.0, inverse, 0.0)
    narrow = nearest_int(wide * inverse[:, None]).to(tl.int8)
    tl.store(values + row[:, None] * num_features + feature[None, :], narrow, mask=is_number)
    tl.store(scales + row, tl.math.div_rn(largest, 127.0), mask=is_row)


@triton.jit
def first_sums(
    bias,
    first_feature,
    out_features,
    HAS_BIAS: tl.constexpr,
    SUMS: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the bias, with which sums that are not scaled begin, [FEATURES, ROWS].

    If it were added last, the compiler would add it first after a loop of one step, and how many steps there
    are depends on the number of rows.
    """
    total = tl.zeros((FEATURES, ROWS), SUMS)
    if HAS_BIAS:
        feature = tl.minimum(first_feature + tl.arange(0, FEATURES), out_features - 1)
        total += tl.load(bias + feature)[:, None]
    return total


@triton.jit
def tile_sums(
    total,
    weight_rows,
    rows,
    is_row,
    IN_FEATURES: tl.constexpr,
    OPERANDS: tl.constexpr,
    SUMS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Return the sums of products [FEATURES, ROWS] float32, which begin with `total`.

    `weight_rows` [FEATURES] and `rows` [ROWS] are where the weights of a feature and the numbers of a row
    begin; rows for which `is_row` [ROWS] is false are zeros, and not read. OPERANDS is the type that is
    multiplied, SUMS that of sums.
    """
    place = tl.arange(0, INPUTS)
    weight_at = weight_rows[:, None] + place[None, :]
    rows_at = rows[None, :] + place[:, None]
    for start in range(0, IN_FEATURES, INPUTS):
        if IN_FEATURES % INPUTS == 0:
            left = tl.load(weight_at)
            right = tl.load(rows_at, mask=is_row[None, :], other=0)
        else:
            is_input = place < IN_FEATURES - start
            left = tl.load(weight_at, mask=is_input[None, :], other=0)
            right = tl.load(rows_at, mask=is_input[:, None] & is_row[None, :], other=0)
        total = tl.dot(left.to(OPERANDS), right.to(OPERANDS), total, input_precision="ieee", out_dtype=SUMS)
        weight_at += INPUTS
        rows_at += INPUTS
    return total.to(tl.float32)


@triton.jit
def grouped_tile_sums(
    values,
    scales,
    zeros,
    group_stride,
    rows,
    input_order,
    IN_FEATURES: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OPERANDS: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Return the sums of products with weights (value - zero) * scale, [FEATURES, ROWS] float32.

    `values`, `scales` and `zeros` [FEATURES] are where those of a feature begin, `rows` [ROWS] where the
    numbers of a row do. Values are INPUTS bytes for each 8 / BITS runs of INPUTS inputs: a byte has one of
    each run, the first in its lowest bits. INPUTS divides GROUP, so that a run has one scale and one zero;
    those of the next group are `group_stride` further on. With HAS_ORDER, value i is for the number of a row
    that `input_order` [in] says. Values are multiplied as they are, exactly; only sums are scaled.
    """
    place = tl.arange(0, INPUTS)
    values_at = values[:, None] + place[None, :]
    total = tl.zeros((FEATURES, ROWS), tl.float32)
    for start in range(0, IN_FEATURES, INPUTS * (8 // BITS)):
        packed = tl.load(values_at)
        for run in tl.static_range(8 // BITS):
            first = start + run * INPUTS
            left = packed
            if BITS == 4:
                left = (packed >> (4 * run)) & 15
            is_input = place < IN_FEATURES - first
            source = first + place
            if HAS_ORDER:
                source = tl.load(input_order + source, mask=is_input, other=0)
            right = tl.load(rows[None, :] + source[:, None], mask=is_input[:, None], other=0)
            # A run beyond the last input is multiplied with zeros; its group must only be one that there is.
            table = tl.minimum(first // GROUP, IN_FEATURES // GROUP - 1) * group_stride
            exact = tl.dot(left.to(OPERANDS), right.to(OPERANDS), input_precision="ieee", out_dtype=SUMS).to(
                tl.float32
            )
            of_zeros = tl.load(zeros + table)[:, None] * tl.sum(right.to(tl.float32), axis=0)[None, :]
            total += (exact - of_zeros) * tl.load(scales + table)[:, None]
        values_at += INPUTS
    return total


@triton.jit
def store_products(
    products,
    bias,
    out,
    first_feature,
    row,
    is_row,
    out_features,
    out_stride,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Write products [FEATURES, ROWS] float32, and a bias added to them, to rows of `out`.

    With an ACTIVATION, they are of features by turns, and their gated activations are written. Nothing is of
    features beyond the last one, and of those of `row` [ROWS] for which `is_row` [ROWS] is false.
    """
    feature = first_feature + tl.arange(0, products.shape[0])
    if HAS_BIAS:
        products += tl.load(bias + tl.minimum(feature, out_features - 1))[:, None]
    if ACTIVATION != "":
        products = gated_products(products, out.dtype.element_ty, ACTIVATION)
        feature = first_feature // 2 + tl.arange(0, products.shape[0])
        out_features = out_features // 2
    out_at = out + row.to(tl.int64)[None, :] * out_stride + feature[:, None]
    is_stored = (feature < out_features)[:, None] & is_row[None, :]
    tl.store(out_at, rounded(products, out.dtype.element_ty), mask=is_stored)


@kernel(do_not_specialize=["num_rows"])
def linear_kernel(
    rows,
    row_scales,
    weight,
    weight_scales,
    bias,
    out,
    num_rows,
    out_features,
    row_stride,
    out_stride,
    IN_FEATURES: tl.constexpr,
    OPERANDS: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Multiply rows [T, in] with a matrix [out, in], in floating point or in int8 with a scale for each row.

    OPERANDS is the type that is multiplied, SUMS that of sums.
    """
    await_previous()
    first_feature = tl.program_id(0) * FEATURES
    feature = first_feature + tl.arange(0, FEATURES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # What is beyond the last feature is computed from the last one, and not stored.
    read_feature = tl.minimum(feature, out_features - 1).to(tl.int64)
    read_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    begins_with_bias: tl.constexpr = HAS_BIAS and not HAS_SCALES
    result = tile_sums(
        first_sums(bias, first_feature, out_features, begins_with_bias, SUMS, FEATURES, ROWS),
        weight + read_feature * IN_FEATURES, rows + read_row * row_stride, row < num_rows,
        IN_FEATURES, OPERANDS, SUMS, INPUTS,
    )  # fmt: skip
    if HAS_SCALES:
        result *= tl.load(weight_scales + read_feature)[:, None] * tl.load(row_scales + read_row)[None, :]
    adds_bias: tl.constexpr = HAS_BIAS and HAS_SCALES
    store_products(
        result, bias, out, first_feature, row, row < num_rows, out_features, out_stride, adds_bias, ACTIVATION
    )


@kernel(do_not_specialize=["num_rows"])
def grouped_linear_kernel(
    rows,
    row_scales,
    values,
    scales,
    zeros,
    bias,
    out,
    num_rows,
    out_features,
    row_stride,
    values_stride,
    out_stride,
    IN_FEATURES: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OPERANDS: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Multiply rows [T, in] with a matrix of weights (value - zero) * scale of their group of GROUP inputs.

    A row of `values` is as `grouped_tile_sums` reads it; `scales` and `zeros` are [groups, out].
    """
    await_previous()
    first_feature = tl.program_id(0) * FEATURES
    feature = first_feature + tl.arange(0, FEATURES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    read_feature = tl.minimum(feature, out_features - 1).to(tl.int64)
    read_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    total = grouped_tile_sums(
        values + read_feature * values_stride, scales + read_feature, zeros + read_feature, out_features,
        rows + read_row * row_stride, None,
        IN_FEATURES, BITS, GROUP, OPERANDS, SUMS, False, FEATURES, ROWS, INPUTS,
    )  # fmt: skip
    if HAS_ROW_SCALES:
        total *= tl.load(row_scales + read_row)[None, :]
    store_products(
        total, bias, out, first_feature, row, row < num_rows, out_features, out_stride, HAS_BIAS, ACTIVATION
    )
