"""Dense layers on packed weights, at the speed of memory for one row, of vector or matrix units for many.

Where torch's oneDNN reaches the same rate, it does so from some tens of rows on; these kernels do from eight
(docs/benchmarks.md), and give a row the same bits for every number of rows in every type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from quire.kernels.cpu import _native
from quire.kernels.cpu.tensors import TYPE_NUMBERS, address, float_type, row_stride
from quire.kernels.linear import Linear, quantization_of
from quire.kernels.memory import WeightMemory
from quire.kernels.weights import Int4Weight, Int8Weight, Weight, dequantize, num_rows

MAX_INPUTS = 1 << 17  # int8 sums of more could overflow


class PackedLinear(Linear):
    """A weight matrix in panels, see native/src/linear.h; the arguments are those of `KernelSet.linear`.

    Calls raise TypeError unless tensors are float32, bfloat16 or float16, ValueError if a shape or stride is
    not as it must be.
    """

    def __init__(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        quantization: str = "none",
        group_size: int = 128,
        memory: WeightMemory | None = None,
    ) -> None:
        super().__init__(parts, bias)
        if self.in_features > MAX_INPUTS:
            raise ValueError(
                f"a layer has {self.in_features} input features; at most {MAX_INPUTS} are supported"
            )
        kind = quantization_of(parts, quantization, group_size)
        group_size = _group_size(parts, group_size) if kind == "int4" else 0
        parts = [_as_source(part, kind, group_size) for part in parts]
        weight_format = _native.WeightFormat[str(dtype).removeprefix("torch.") if kind == "none" else kind]
        layout = weight_format.value, self.out_features, self.in_features, group_size
        memory = memory or WeightMemory()
        self._panels = memory.allocate(_native.packed_bytes(*layout))
        self._weight = _native.PackedWeight(*layout, self._panels.data_ptr())
        self._bias = address(self.bias)
        if not memory.is_filled:
            self._weight.pack([_source(part) for part in parts])

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        count = len(rows)
        if out is None:
            out = rows.new_empty((count, self.out_features))
        self._weight.linear(
            rows.data_ptr(),
            float_type("rows", rows),
            row_stride("rows", rows, (count, self.in_features)),
            count,
            self._bias,
            out.data_ptr(),
            float_type("out", out),
            row_stride("out", out, (count, self.out_features)),
        )
        return out


def _group_size(parts: Sequence[Weight], wanted: int) -> int:
    """Return the group size of parts in 4 bits, the smallest if they differ; `wanted` if there are none."""
    return min((part.group_size for part in parts if isinstance(part, Int4Weight)), default=wanted)


def _as_source(part: Weight, kind: str, group_size: int) -> Weight:
    """Return `part` in a form that can be packed as `kind`."""
    fits = isinstance(part, torch.Tensor) or (kind == "int8") == isinstance(part, Int8Weight)
    if not fits or (kind == "none" and not isinstance(part, torch.Tensor)):
        part = dequantize(part)
    if isinstance(part, torch.Tensor):
        return part.contiguous()
    if isinstance(part, Int8Weight):
        return Int8Weight(part.values.contiguous(), part.scales.float().contiguous())
    repeats = part.group_size // group_size  # groups are powers of two
    scales, zeros = (table.float().repeat_interleave(repeats, dim=1) for table in (part.scales, part.zeros))
    return Int4Weight(part.values.contiguous(), scales.contiguous(), zeros.contiguous())


def _source(part: Weight) -> tuple[int, int, int, int, int]:
    if isinstance(part, torch.Tensor):
        return address(part), TYPE_NUMBERS[part.dtype], num_rows(part), 0, 0
    zeros = part.zeros if isinstance(part, Int4Weight) else None
    return (
        address(part.values),
        TYPE_NUMBERS[part.values.dtype],
        num_rows(part),
        address(part.scales),
        address(zeros),
    )
