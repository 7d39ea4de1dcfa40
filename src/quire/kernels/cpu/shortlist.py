"""The output layer in floating point, with a copy in int8 that says which logits can be the largest.

The copy is read in place of the weights, and of these only the panels with such logits: a step of few
rows reads half the bytes or, in float32, a quarter (native/src/shortlist.h). Logits that are computed have
the bits that they have without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from quire.kernels.bounds import MIN_SHORTLISTED_BYTES
from quire.kernels.cpu import _native
from quire.kernels.cpu.linear import PackedLinear, PackedMatrix, linear_of, row_numbers
from quire.kernels.cpu.programs import refuse_recording
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.linear import Linear, quantization_of
from quire.kernels.layers.weights import Weight, in_features, num_rows

_PANEL = 32  # rows, see native/src/linear.h


def output_linear_of(parts: Sequence[Weight], bias: torch.Tensor | None, **options: Any) -> Linear:
    """Return the layer of `KernelSet.output_linear`."""
    size = sum(map(num_rows, parts)) * in_features(parts[0]) * options["dtype"].itemsize
    kind = quantization_of(parts, options.get("quantization", "none"), options.get("group_size", 128))
    if bias is None and kind == "none" and size >= MIN_SHORTLISTED_BYTES:
        return ShortlistedLinear(parts, **options)
    return linear_of(parts, bias, **options)


class ShortlistedLinear(PackedLinear):
    """A layer in floating point without bias, and its copy; the arguments are those of `KernelSet.linear`."""

    finds_largest = True

    def __init__(
        self,
        parts: Sequence[Weight],
        *,
        dtype: torch.dtype,
        memory: WeightMemory | None = None,
        **options: Any,
    ) -> None:
        memory = memory or WeightMemory()
        super().__init__(parts, dtype=dtype, memory=memory, **options)
        padded = -(-self.out_features // _PANEL) * _PANEL
        self._norms = memory.allocate(2 * padded * 4).view(torch.float32)
        if not memory.is_filled:
            self._norms.zero_()
        self._copy = PackedMatrix(parts, dtype=dtype, quantization="int8", memory=memory, norms=self._norms)
        self._shortlisted = _native.ShortlistedWeight(self._weight, self._copy.native, self._norms.data_ptr())

    @override
    def largest(self, rows: torch.Tensor, count: torch.Tensor | int, *, out: torch.Tensor) -> torch.Tensor:
        if isinstance(count, int):
            refuse_recording("a number that is not in a tensor")
            count = torch.tensor([count])
        row_type, stride, num_rows, _, out_stride = row_numbers(
            (rows.shape, rows.stride(), rows.dtype, rows.is_cpu),
            (out.shape, out.stride(), out.dtype, out.is_cpu),
            self.in_features,
            self.out_features,
        )
        if out.dtype is not torch.float32 or count.dtype is not torch.int64 or count.numel() != 1:
            raise TypeError(
                f"out is {out.dtype} and count {count.dtype} {list(count.shape)}; they must be float32 and "
                "int64 [1]"
            )
        self._shortlisted.largest(
            rows.data_ptr(), row_type, stride, num_rows, count.data_ptr(), out.data_ptr(), out_stride
        )
        return out
