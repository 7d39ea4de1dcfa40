"""Products of many rows with a weight matrix, in Triton, whose tiles a GPU's memory accelerator fetches.

The sums are those of `quire.kernels.triton.linear.products` and `float8_products`, bit for bit.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import (
    MULTIPROCESSORS,
    await_previous,
    has_large_tiles,
    is_interpreted,
)
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.linear.float8_products import block_scales
from quire.kernels.triton.linear.products import first_sums, store_products
from quire.kernels.triton.linear.tiled import Tile, TiledLinear

MIN_ROWS = 17  # for fewer, weights are fetched as fast without it
_ALIGNMENT = 16  # bytes, of what is fetched and of its rows
_STAGE_BYTES = 200 << 10  # of shared memory, for tiles that are on their way
_MAX_STAGES = 6
_SIZES = (64, 64), (64, 128), (128, 64), (128, 128), (128, 256)  # features and rows of tiles
_TILES_BESIDE = tl.constexpr(8)  # tiles of rows that are computed with the same weights, one after the other


@kernel(do_not_specialize=["num_rows"])
def tma_linear_kernel(
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
    SUMS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Multiply rows [T, in] with a matrix [out, in]; both are descriptors of tensors.

    Scales are as for `float8_linear_kernel` in float8, else as for `linear_kernel`. Tiles are computed in an
    order in which those at one time share rows and features, which are then in the cache.
    """
    await_previous()
    num_feature_tiles = tl.cdiv(out_features, FEATURES)
    num_beside = _TILES_BESIDE * num_feature_tiles
    first_tile = tl.program_id(0) // num_beside * _TILES_BESIDE
    count = tl.minimum(tl.cdiv(num_rows, ROWS) - first_tile, _TILES_BESIDE)
    place = tl.program_id(0) % num_beside
    first_feature = place // count * FEATURES
    first_row = (first_tile + place % count) * ROWS
    feature = first_feature + tl.arange(0, FEATURES)
    row = first_row + tl.arange(0, ROWS)
    read_feature = tl.minimum(feature, out_features - 1)
    read_row = tl.minimum(row, num_rows - 1)
    if IN_GROUPS:
        weight_scales_at = block_scales(
            weight_scales, first_feature, out_features, IN_FEATURES, BLOCK_FEATURES, FEATURES, INPUTS
        )
        row_scales_at = row_scales + read_row
    begins_with_bias: tl.constexpr = HAS_BIAS and not HAS_SCALES
    total = first_sums(bias, first_feature, out_features, begins_with_bias, SUMS, FEATURES, ROWS)
    for start in range(0, IN_FEATURES, INPUTS):  # beyond the last input, both are zero
        left = weight.load([first_feature, start]).to(OPERANDS)
        right = rows.load([first_row, start]).to(OPERANDS).T
        if IN_GROUPS:
            part = tl.dot(left, right, input_precision="ieee", out_dtype=SUMS)
            total += part * (tl.load(weight_scales_at)[:, None] * tl.load(row_scales_at)[None, :])
            weight_scales_at += 1
            row_scales_at += num_rows
        else:
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=SUMS)
    result = total.to(tl.float32)
    if HAS_SCALES and not IN_GROUPS:
        result *= tl.load(weight_scales + read_feature)[:, None] * tl.load(row_scales + read_row)[None, :]
    adds_bias: tl.constexpr = HAS_BIAS and HAS_SCALES
    store_products(
        result, bias, out, first_feature, row, row < num_rows, out_features, out_stride, adds_bias, ACTIVATION
    )


def can_fetch(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether there are enough rows to fetch tiles, and the GPU can."""
    return (
        rows.shape[0] >= MIN_ROWS
        and has_large_tiles()
        and rows.dtype.itemsize <= 2  # others are multiplied without tensor cores
        and all(
            part.data_ptr() % _ALIGNMENT == 0 and part.stride(0) * part.dtype.itemsize % _ALIGNMENT == 0
            for part in (rows, weight)
        )
    )


def multiply_fetched(
    layer: TiledLinear,
    rows: torch.Tensor,
    row_scales: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
) -> None:
    """Write the products of rows, as they are multiplied, for which `can_fetch` is true, to `out`.

    With an `activation`, write what these become; see `TiledLinear.gated`.
    """
    weight, *scales = layer.tables
    num_rows = rows.shape[0]
    tile = fetched_tile_of(num_rows, layer.out_features, weight.dtype)
    how = layer.format
    inputs = how.run or tile.inputs
    num_feature_tiles, num_row_tiles = layer.grid(num_rows, tile)
    fetched = tile.features, inputs
    if fetched not in layer.descriptors:
        layer.descriptors[fetched] = TensorDescriptor.from_tensor(weight, list(fetched))
    tma_linear_kernel[num_feature_tiles * num_row_tiles,](
        TensorDescriptor.from_tensor(rows, [tile.rows, inputs]),
        row_scales,
        layer.descriptors[fetched],
        scales[0] if scales else None,
        layer.bias,
        out,
        num_rows,
        layer.out_features,
        out.stride(0),
        IN_FEATURES=layer.in_features,
        BLOCK_FEATURES=how.block_features,
        IN_GROUPS=how.block_features > 0 and how.group_size > 0,
        OPERANDS=how.operands,
        SUMS=how.sums,
        HAS_SCALES=row_scales is not None,
        HAS_BIAS=layer.bias is not None,
        ACTIVATION=activation,
        FEATURES=tile.features,
        ROWS=tile.rows,
        INPUTS=inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def fetched_tile_of(num_rows: int, out_features: int, dtype: torch.dtype) -> Tile:
    """Return the smallest tile with which all programs run at once, or else the largest for these rows.

    Rows are rounded up to a power of two, so that few tiles are compiled; see `profile_run`. Measured on an
    H200 with the layers of Qwen3-0.6B and Llama-3-8B.
    """
    if is_interpreted:
        return Tile(256, 16, 128, 4, 1)
    num_rows = max(64, next_power_of_2(num_rows))
    for features, rows in _SIZES:
        if rows > num_rows:
            continue
        chosen = features, rows
        if -(-out_features // features) * -(-num_rows // rows) <= MULTIPROCESSORS:
            break
    features, rows = chosen
    if (features, rows) == _SIZES[-1] and dtype.itemsize == 2:
        return Tile(features, rows, 64, 8, 4 if num_rows <= 512 else 3)
    inputs = 64 if dtype.itemsize == 2 and features == rows == 128 else 128
    num_stages = min(_STAGE_BYTES // ((features + rows) * inputs * dtype.itemsize), _MAX_STAGES)
    return Tile(features, rows, inputs, 8 if features == 128 else 4, num_stages)
