"""Dense layers in torch, which hands them to oneDNN; the weights are laid out once, when the model is loaded.

Every kind gives a row the same bits whatever the other rows are and however many there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from typing_extensions import override

from quire.kernels.bounds import kernel_group
from quire.kernels.devices.torch_internals import int8_product, linear_pointwise, reorder_linear_weight
from quire.kernels.layers.weights import (
    Float8Weight,
    GroupedWeight,
    Int8Weight,
    Weight,
    WeightInGroups,
    dequantize,
    floats_of,
    in_features,
    is_reordered,
    num_rows,
    quantize_int4,
    quantize_int8,
)

ROWS_PER_PRODUCT = 32
"""Rows of every floating-point product. In what order oneDNN and BLAS add depends on their number."""


class Linear(ABC):
    """A weight matrix [out_features, in_features] with an optional bias, ready to be multiplied with rows."""

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None) -> None:
        check_order(parts)
        self.in_features = in_features(parts[0])
        self.out_features = sum(num_rows(part) for part in parts)
        self.bias = None if bias is None else bias.float()

    finds_largest: ClassVar[bool] = False
    """Whether `largest` may take less time than a call."""

    @property
    def kind(self) -> Hashable:
        """Equal for layers that the same kernels compute, as far as these are compiled for it."""
        return type(self), self.in_features, self.out_features

    @abstractmethod
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return `rows @ weight.T + bias`: [T, in_features] to [T, out_features].

        Args:
            rows: float32, bfloat16 or float16; the features of a row are adjacent.
            out: where to put the result, in any of these types; None: a new tensor of the rows' type.
        """

    def largest(self, rows: torch.Tensor, count: torch.Tensor | int, *, out: torch.Tensor) -> torch.Tensor:
        """Compute what a call does, with -inf for results that cannot be among the largest of their row.

        Args:
            rows: as in a call.
            count: how many of each row are wanted, with all that equal the last one; 0: all. In a tensor
                [1] int64 if the call is captured.
            out: [T, out_features] float32.
        """
        return self(rows, out=out)


class FloatLinear(Linear):
    """Weights in the type of the rows."""

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(parts, bias)
        self._weight = torch.cat([_float(part, dtype) for part in parts])
        self._bias = None if bias is None else bias.to(dtype)

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return _in_equal_products(lambda chunk: F.linear(chunk, self._weight, self._bias), rows, out)


class OneDnnLinear(Linear):
    """bfloat16 weights in the layout that oneDNN prefers.

    The two operators are those that torch's own compiler puts in place of linear layers.
    """

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None) -> None:
        super().__init__(parts, bias)
        weight = torch.cat([_float(part, torch.bfloat16) for part in parts])
        self._weight = reorder_linear_weight(weight)
        self._bias = None if bias is None else bias.to(torch.bfloat16)

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return _in_equal_products(
            lambda chunk: linear_pointwise(chunk, self._weight, self._bias),
            rows,
            out,
        )


class Int8Linear(Linear):
    """int8 weights, a scale per row of theirs, and rows that are quantized as they come, a scale for each.

    Sums are exact.
    """

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None) -> None:
        super().__init__(parts, bias)
        quantized = [
            part if isinstance(part, Int8Weight) else quantize_int8(dequantize(part)) for part in parts
        ]
        self._values = torch.cat([part.values for part in quantized]).t()
        self._scales = torch.cat([part.scales for part in quantized])

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        quantized = quantize_int8(rows)
        exact = int8_product(quantized.values, self._values).float()
        result = exact * (self._scales * quantized.scales[:, None])
        if self.bias is not None:
            result += self.bias
        return _result(result.to(rows.dtype), out)


class GroupedLinear(Linear):
    """Weights in groups, dequantized before they are multiplied, as are rows that are made int8."""

    def __init__(
        self, parts: Sequence[Weight], bias: torch.Tensor | None, group_size: int, activations: str
    ) -> None:
        super().__init__(parts, bias)
        self._has_int8_rows = activations == "int8"
        quantized = [
            part if isinstance(part, GroupedWeight) else quantize_int4(dequantize(part), group_size)
            for part in parts
        ]
        self._float = FloatLinear([dequantize(part) for part in quantized], bias, torch.float32)

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        rounded = dequantize(quantize_int8(rows)) if self._has_int8_rows else rows.bfloat16().float()
        return _result(self._float(rounded).to(rows.dtype), out)


class AdaptedLinear(Linear):
    """A layer with low-rank adapters, of each of which comes a part of its outputs (Hu et al. 2021, LoRA).

    Args:
        base: to what the adapters add.
        into: to the features of all adapters, one after the other, equally many of each.
        back: from an adapter's features to its outputs; together, they have all of them, in order.
    """

    def __init__(self, base: Linear, into: Linear, back: Sequence[Linear]) -> None:
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        self._base = base
        self._into = into
        self._back = back

    @property
    @override
    def kind(self) -> Hashable:
        return super().kind, self._base.kind, self._into.kind, *(each.kind for each in self._back)

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        result = self._base(rows, out=out)
        features = self._into(rows).chunk(len(self._back), dim=1)
        outputs = torch.split(result, [each.out_features for each in self._back], dim=1)
        for own, adapter, part in zip(features, self._back, outputs, strict=True):
            part.add_(adapter(own))
        return result


def check_order(parts: Sequence[Weight]) -> None:
    """Raise ValueError unless all inputs are in their own order."""
    if any(map(is_reordered, parts)):
        raise ValueError(
            "a weight has its inputs in another order; see quire.kernels.layers.act_order.take_order"
        )


def quantization_of(
    parts: Sequence[Weight],
    wanted: str,
    group_size: int,
    *,
    has_float8: bool = False,
    has_mxfp4: bool = False,
    has_int6: bool = False,
) -> str:
    """Return what a matrix of `parts` is held as: none, int8, int4, int6, grouped_int8, fp8 or mxfp4.

    Parts in groups stay so, in 8 bits unless all have 4, or all 6 or MXFP4 and kernels have that. Other
    parts of different kinds become floats first, and so do parts in float8 where kernels do not have it. A
    matrix whose inputs are not whole groups is held in int8 instead of int4 or int6.

    Raises:
        ValueError: float8 is wanted of kernels that do not have it.
    """
    if has_float8 and all(isinstance(part, Float8Weight) for part in parts):
        return "fp8"
    if wanted == "fp8" and not has_float8:
        raise ValueError("weights are to be fp8, which only the kernels for GPUs have")
    if all(isinstance(part, Int8Weight) for part in parts):
        return "int8"
    if has_mxfp4 and all(isinstance(part, WeightInGroups) and part.is_mxfp4 for part in parts):
        return "mxfp4"
    bits = {part.bits if isinstance(part, WeightInGroups) else 0 for part in parts}
    if 0 not in bits:
        return "int4" if bits == {4} else "int6" if bits == {6} and has_int6 else "grouped_int8"
    if wanted == "int6":
        return "int6" if has_int6 and kernel_group(in_features(parts[0])) else "int8"
    return "int8" if wanted == "int4" and in_features(parts[0]) % group_size else wanted


def _float(part: Weight, dtype: torch.dtype) -> torch.Tensor:
    return floats_of(part).to(dtype)


def _in_equal_products(
    product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Return `product` of all `rows`, always computed from the same number of them."""
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS_PER_PRODUCT))
    products = [product(chunk) for chunk in torch.split(padded, ROWS_PER_PRODUCT)]
    return _result(torch.cat(products)[: len(rows)], out)


def _result(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else out.copy_(result)
