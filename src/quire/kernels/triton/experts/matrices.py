"""One matrix of every expert, in tensors of all of them."""

from __future__ import annotations

import torch

from quire.kernels.triton.device import kernel_device
from quire.kernels.triton.experts.products import expert_product_kernel
from quire.kernels.triton.experts.routing import Routing
from quire.kernels.triton.linear.dense import quantize_rows
from quire.kernels.triton.linear.float8 import quantize_float8_rows
from quire.kernels.triton.linear.tiled import ProductFormat, Tile, TiledLinear, tile_of


class ExpertMatrices:
    """What layers of `quire.kernels.triton.linear.dense` hold, [experts, out, in] in place of [out, in].

    Args:
        num_experts: that there will be.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._biases: torch.Tensor | None = None  # [experts, out] float32
        self._orders: torch.Tensor | None = None  # [experts, in] int32: which input each weight is for

    def set(self, expert: int, layer: TiledLinear, order: torch.Tensor | None) -> None:
        """Copy the weights of an expert, whose inputs are in an order [in], or in their own; 0 is the first.

        Raises:
            ValueError: they differ from those of the first expert in shape, in how they are held, or in
                whether there is a bias.
        """
        if expert == 0:
            self.in_features, self.out_features = layer.in_features, layer.out_features
            self._format = layer.format
            self._tables = [table.new_empty(self._num_experts, *table.shape) for table in layer.tables]
            if layer.bias is not None:
                self._biases = layer.bias.new_empty(self._num_experts, self.out_features)
        found = layer.format, layer.bias is None, [(table.dtype, table.shape) for table in layer.tables]
        held = [(table.dtype, table.shape[1:]) for table in self._tables]
        wanted = self._format, self._biases is None, held
        if found != wanted:
            raise ValueError(
                f"expert {expert} is held as {found}, expert 0 as {wanted}; the kernels in Triton need all "
                "experts of a layer to have one shape and one quantization, and all a bias or none"
            )
        for table, part in zip(self._tables, layer.tables, strict=True):
            table[expert].copy_(part)
        if self._biases is not None:
            assert layer.bias is not None
            self._biases[expert].copy_(layer.bias)
        if order is not None:
            if self._orders is None:
                own = torch.arange(self.in_features, dtype=torch.int32, device=kernel_device())
                self._orders = own.repeat(self._num_experts, 1)
            self._orders[expert].copy_(order)

    def tile(self, num_rows: int) -> Tile:
        """Return the tile of products for experts with about `num_rows` rows each."""
        num_features = self._num_experts * self.out_features
        return tile_of(num_rows, self.in_features, num_features, self._tables[0].dtype)

    def multiply(
        self,
        rows: torch.Tensor,
        routing: Routing,
        tile: Tile,
        out: torch.Tensor,
        *,
        pairs_per_row: int = 1,
        activation: str = "",
        is_gated: bool = False,
    ) -> None:
        """Write the product of each pair's row with its expert's matrix to `out`.

        Args:
            rows: [pairs / pairs_per_row, in].
            routing: in tiles of `tile.rows`.
            tile: what a program computes.
            out: [pairs, out], or half of that with gates.
            pairs_per_row: one after the other.
            activation: as for `Mixture`; empty: none.
            is_gated: whether it is that of gates, the first half of the outputs.
        """
        how = self._format
        rows, row_scales = _as_multiplied(rows, how)
        weights, scales, zeros = (*self._tables, None, None)[:3]
        expert_product_kernel[-(-self.out_features // tile.features), routing.num_tiles](
            rows,
            row_scales,
            weights,
            scales,
            zeros,
            self._biases,
            self._orders,
            routing.pairs,
            routing.tiles,
            out,
            self.out_features,
            rows.stride(0),
            len(rows),
            self._tables[0].stride(1),
            out.stride(0),
            PAIRS_PER_ROW=pairs_per_row,
            IN_FEATURES=self.in_features,
            BITS=how.bits,
            GROUP=how.group_size,
            BLOCK_FEATURES=how.block_features,
            OPERANDS=how.operands,
            SUMS=how.sums,
            HAS_ROW_SCALES=row_scales is not None,
            HAS_BIAS=self._biases is not None,
            HAS_ORDER=self._orders is not None,
            ACTIVATION=activation if is_gated else "",
            OWN_ACTIVATION="" if is_gated else activation,
            FEATURES=tile.features,
            ROWS=tile.rows,
            INPUTS=how.run or tile.inputs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def _as_multiplied(rows: torch.Tensor, how: ProductFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows as they are multiplied, and their scales, if they have any."""
    if how.row_type == torch.int8:
        return quantize_rows(rows)
    if how.block_features:
        return quantize_float8_rows(rows, how.group_size or rows.shape[1])
    return rows.to(how.row_type), None
