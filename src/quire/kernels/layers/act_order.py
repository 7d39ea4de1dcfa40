"""Matrices in groups that are not runs of inputs: what they multiply is put in their order first."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.linear import Linear
from quire.kernels.layers.weights import GroupedWeight, Weight, dequantize

if TYPE_CHECKING:
    from quire.kernels.interface import KernelSet

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 256  # bounds what rows in another order take


class ReorderedLinear(Linear):
    """A layer that takes its inputs in the order of `input_order`, [in_features] int64."""

    def __init__(self, linear: Linear, input_order: torch.Tensor) -> None:
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._linear = linear
        self._input_order = input_order

    @property
    @override
    def kind(self) -> Hashable:
        return super().kind, self._linear.kind

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = rows.new_empty(len(rows), self.out_features)
        for chunk, result in zip(
            torch.split(rows, _ROWS_AT_ONCE), torch.split(out, _ROWS_AT_ONCE), strict=True
        ):
            self._linear(chunk.index_select(1, self._input_order), out=result)
        return out


def in_one_order(parts: Sequence[Weight]) -> list[Weight]:
    """Return parts of a matrix as they are if their inputs are in one order, else as floats."""
    orders = [part.order if isinstance(part, GroupedWeight) else None for part in parts]
    first = orders[0]
    are_equal = all(
        order is first or (order is not None and first is not None and torch.equal(order, first))
        for order in orders
    )
    if are_equal:
        return list(parts)
    _warn_of_orders()
    return [part if order is None else dequantize(part) for part, order in zip(parts, orders, strict=True)]


@functools.cache
def _warn_of_orders() -> None:
    logger.warning(
        "matrices of the checkpoint that take the same inputs have them in orders that differ (desc_act); "
        "they are kept in floating point or quantized as EngineConfig.quantization says"
    )


def take_order(parts: Sequence[Weight], memory: WeightMemory) -> tuple[list[Weight], torch.Tensor | None]:
    """Return parts, which are in one order, without it; and that order, held in `memory`, if there is one."""
    order = parts[0].order if isinstance(parts[0], GroupedWeight) else None
    if order is None:
        return list(parts), None
    held = memory.allocate(order.nbytes).view(torch.int64)
    if not memory.is_filled:
        held.copy_(order)
    return [
        dataclasses.replace(part, order=None) if isinstance(part, GroupedWeight) else part for part in parts
    ], held


def linear_in_order(
    kernels: KernelSet,
    parts: Sequence[Weight],
    bias: torch.Tensor | None = None,
    *,
    memory: WeightMemory,
    is_output: bool = False,
    **options: Any,
) -> Linear:
    """Return the layer of `KernelSet.linear` for parts whose inputs may be in another order, all in one.

    `is_output`: that of `KernelSet.output_linear`.
    """
    parts, order = take_order(parts, memory)
    make = kernels.output_linear if is_output else kernels.linear
    linear = make(parts, bias, memory=memory, **options)
    return linear if order is None else ReorderedLinear(linear, order.to(kernels.device))
