"""Dense layers on packed weights, at the speed of memory for one row, of vector or matrix units for many.

Where torch's oneDNN reaches the same rate, it does so from some tens of rows on; these kernels do from eight
(docs/benchmarks.md), and give a row the same bits for every number of rows in every type.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from typing_extensions import override

from quire.kernels.bounds import MIN_SHORTLISTED_BYTES, kernel_group
from quire.kernels.cpu import _native
from quire.kernels.cpu.programs import refuse_recording
from quire.kernels.cpu.tensors import (
    TYPE_NUMBERS,
    Form,
    address,
    check_on_cpu,
    checked_once,
    float_type,
    form_of,
    row_stride,
    written_row_stride,
)
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.linear import Linear, check_order, quantization_of
from quire.kernels.layers.weights import (
    BlockWeight,
    Float8Weight,
    GroupedWeight,
    Int8Weight,
    Weight,
    WeightInGroups,
    dequantize,
    in_features,
    num_rows,
)

GATED_COLUMNS = 16  # of gates, and then of what they are multiplied with, in a panel
_PANEL_ROWS = 2 * GATED_COLUMNS
MAX_INPUTS = 1 << 17  # int8 sums of more could overflow
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = ("none", "int8", "int4", "int6", "grouped_int8")  # of floats
_IN_GROUPS = ("int4", "int6", "grouped_int8", "mxfp4")
BLOCK_KINDS = frozenset(_native.GgmlBlock.__members__)
_GROUP_MULTIPLE = 16  # of inputs that share a scale, see native/src/linear.h


class PackedMatrix:
    """A weight matrix in panels, see native/src/linear.h.

    Args:
        parts: as for `KernelSet.linear`, and so are those not named here.
        norms: [2, rows, padded to whole panels] float32, to be filled with the norms of the rows of an int8
            matrix, and of what they lack of the floats that they are made of; None: they are not needed.
        gated_features: half of its rows, if these are gates and, below them, what they are multiplied with:
            both take turns in the panels, and zeros fill them up. 0: rows stay in order.

    Raises:
        TypeError: a type is not as it must be.
        ValueError: a shape is not as it must be, or there are no such groups in the kernels.
    """

    def __init__(
        self,
        parts: Sequence[Weight],
        *,
        dtype: torch.dtype,
        quantization: str = "none",
        group_size: int = 128,
        int4_activations: str = "int8",
        memory: WeightMemory | None = None,
        norms: torch.Tensor | None = None,
        gated_features: int = 0,
    ) -> None:
        check_order(parts)
        inputs = in_features(parts[0])
        if not 1 <= inputs <= MAX_INPUTS:
            raise ValueError(f"a layer has {inputs} input features; 1 to {MAX_INPUTS} are supported")
        memory = memory or WeightMemory()
        for part in parts:
            _check_part(part, inputs, is_read=not memory.is_filled)
        kind = quantization_of(parts, quantization, group_size, has_mxfp4=True, has_int6=True)
        if dtype not in _FLOATS or quantization not in _KINDS:
            raise TypeError(
                f"a layer is to be {dtype} and quantized by {quantization!r}; types are float32, bfloat16 "
                f"and float16, quantizations {', '.join(_KINDS)}"
            )
        wanted_size = kernel_group(inputs) if quantization == "int6" else group_size
        group_size = _checked_group_size(parts, wanted_size) if kind in _IN_GROUPS else 0
        sources = [_as_source(part, kind, group_size) for part in parts]
        weight_format = _native.WeightFormat[str(dtype).removeprefix("torch.") if kind == "none" else kind]
        outputs = sum(num_rows(part) for part in parts)
        if gated_features:
            outputs = -(-gated_features // GATED_COLUMNS) * 2 * GATED_COLUMNS
        self.layout = weight_format.value, outputs, inputs, group_size
        self._panels = memory.allocate(_native.packed_bytes(*self.layout))
        has_int8_rows = kind in _IN_GROUPS and int4_activations == "int8"
        self.native = _native.PackedWeight(*self.layout, self._panels.data_ptr(), has_int8_rows)
        if not memory.is_filled:
            is_finite = self.native.pack([_source(part) for part in sources], gated_features, address(norms))
            if not is_finite:
                _raise_of_blocks(parts)


class PackedLinear(Linear):
    """A dense layer on a packed matrix; the arguments are those of `KernelSet.linear`.

    Raises:
        TypeError, ValueError: see `PackedMatrix`; or the same of the bias.
    """

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None = None, **options: Any) -> None:
        if not parts:
            raise ValueError("a layer has no weights")
        super().__init__(parts, bias)
        if self.bias is not None:
            self.bias = self.bias.contiguous()
            _check_tensor("the bias", self.bias, _FLOATS, (self.out_features,))
        self._matrix = PackedMatrix(parts, **options)
        self._weight = self._matrix.native
        self._bias = address(self.bias)

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = rows.new_empty((len(rows), self.out_features))
        row_type, stride, count, out_type, out_stride = row_numbers(
            (rows.shape, rows.stride(), rows.dtype, rows.is_cpu),
            (out.shape, out.stride(), out.dtype, out.is_cpu),
            self.in_features,
            self.out_features,
        )
        self._weight.linear(
            rows.data_ptr(), row_type, stride, count, self._bias, out.data_ptr(), out_type, out_stride
        )
        return out


class LinearsSideBySide(Linear):
    """Layers of the same rows, for parts of a matrix that are held in different ways."""

    def __init__(self, runs: Sequence[Sequence[Weight]], bias: torch.Tensor | None, **options: Any) -> None:
        super().__init__([part for run in runs for part in run], bias)
        ends = list(itertools.accumulate(sum(map(num_rows, run)) for run in runs))
        self._columns = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._linears = [
            PackedLinear(run, None if bias is None else bias[columns], **options)
            for run, columns in zip(runs, self._columns, strict=True)
        ]

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = rows.new_empty((len(rows), self.out_features))
        for linear, columns in zip(self._linears, self._columns, strict=True):
            linear(rows, out=out[:, columns])
        return out


class ShortlistedLinear(PackedLinear):
    """A layer in floating point without bias, and a copy in int8 that says which results can be the largest.

    The copy is read in place of the weights, and of these only the panels with such results: a step of few
    rows reads half the bytes or, in float32, a quarter (native/src/shortlist.h). Results that are computed
    have the bits that they have without. The arguments are those of `KernelSet.linear`.
    """

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
        padded = -(-self.out_features // _PANEL_ROWS) * _PANEL_ROWS
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


def linear_of(parts: Sequence[Weight], bias: torch.Tensor | None, **options: Any) -> Linear:
    """Return the layer of `KernelSet.linear`; parts in groups of different numbers of bits are held apart."""
    in_groups = [part for part in parts if isinstance(part, WeightInGroups)]
    if len({part.bits for part in in_groups}) > 1 and len(in_groups) == len(parts):
        runs = [list(run) for _, run in itertools.groupby(in_groups, key=lambda part: part.bits)]
        return LinearsSideBySide(runs, bias, **options)
    return PackedLinear(parts, bias, **options)


def output_linear_of(parts: Sequence[Weight], bias: torch.Tensor | None, **options: Any) -> Linear:
    """Return the layer of `KernelSet.output_linear`."""
    size = sum(map(num_rows, parts)) * in_features(parts[0]) * options["dtype"].itemsize
    kind = quantization_of(parts, options.get("quantization", "none"), options.get("group_size", 128))
    if bias is None and kind == "none" and size >= MIN_SHORTLISTED_BYTES:
        return ShortlistedLinear(parts, **options)
    return linear_of(parts, bias, **options)


@checked_once
def row_numbers(rows: Form, out: Form, in_features: int, out_features: int) -> tuple[int, int, int, int, int]:
    """Return type, stride and number of rows, and type and stride of the result.

    Raises:
        TypeError: a type is not as it must be.
        ValueError: a shape or a stride is not as it must be.
    """
    shape, _, _, _ = rows
    count = shape[0] if shape else 0
    return (
        float_type("rows", rows),
        row_stride("rows", rows, (count, in_features)),
        count,
        float_type("out", out),
        written_row_stride("out", out, (count, out_features)),
    )


def _check_part(part: Weight, in_features: int, *, is_read: bool) -> None:
    """Raise unless `part` has consistent shapes and types, in memory that can be read if it will be."""
    rows = num_rows(part)
    tensors: list[tuple[str, torch.Tensor, tuple[torch.dtype, ...], tuple[int, ...]]]
    if isinstance(part, torch.Tensor):
        tensors = [("a weight", part, _FLOATS, (rows, in_features))]
    elif isinstance(part, Int8Weight):
        tensors = [
            ("an int8 weight", part.values, (torch.int8,), (rows, in_features)),
            ("an int8 weight's scales", part.scales, _FLOATS, (rows,)),
        ]
    elif isinstance(part, BlockWeight):
        tensors = [
            (
                "a weight in blocks",
                part.octets,
                (torch.uint8,),
                (rows, in_features // part.block_size, part.octets.shape[2]),
            )
        ]
    elif isinstance(part, Float8Weight):
        blocks = tuple(
            -(-size // of_one) for size, of_one in zip((rows, in_features), part.block, strict=True)
        )
        tensors = [
            ("a float8 weight", part.values, (torch.float8_e4m3fn,), (rows, in_features)),
            ("a float8 weight's scales", part.scales, _FLOATS, blocks),
        ]
    else:
        if part.bits not in (4, 6, 8):
            raise ValueError(f"a weight in groups has {part.bits} bits; it must have 4, 6 or 8")
        groups = part.scales.shape[-1]
        if not groups or in_features % groups:
            raise ValueError(
                f"a weight in groups has {groups} groups of {in_features} inputs; they must be equal"
            )
        tensors = [
            ("a weight in groups", part.values, (torch.uint8,), (rows, in_features)),
            ("its scales", part.scales, _FLOATS, (rows, groups)),
            ("its zeros", part.zeros, (*_FLOATS, torch.uint8), (rows, groups)),
        ]
    for name, tensor, types, shape in tensors:
        _check_tensor(name, tensor, types, shape, is_read=is_read)


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    types: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    *,
    is_read: bool = True,
) -> None:
    if tensor.dtype not in types:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, types))}")
    if tensor.shape != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; it must be {list(shape)}")
    if is_read:
        check_on_cpu(name, form_of(tensor))


def _checked_group_size(parts: Sequence[Weight], wanted: int) -> int:
    """Return the group size of parts in groups, the smallest if they differ; `wanted` if there are none."""
    inputs = in_features(parts[0])
    in_groups = [part for part in parts if isinstance(part, WeightInGroups)]
    size = min((part.group_size for part in in_groups), default=wanted)
    if size < 1 or size % _GROUP_MULTIPLE or inputs % size:
        raise ValueError(
            f"{inputs} inputs are in groups of {size}; a group must have a multiple of {_GROUP_MULTIPLE}, "
            "and groups be equal"
        )
    return size


_Source = torch.Tensor | Int8Weight | GroupedWeight | BlockWeight


def _as_source(part: Weight, kind: str, group_size: int) -> _Source:
    """Return `part` in a form that can be packed as `kind`."""
    if isinstance(part, BlockWeight) and (
        part.kind not in BLOCK_KINDS or part.group_size != group_size or part.is_mxfp4 != (kind == "mxfp4")
    ):
        part = part.decoded()
    if isinstance(part, WeightInGroups):
        fits = kind in ("int6", "grouped_int8", "mxfp4") or (kind == "int4" and part.bits == 4)
    else:
        fits = isinstance(part, torch.Tensor) or (isinstance(part, Int8Weight) and kind == "int8")
    if not fits:
        part = dequantize(part)
    if isinstance(part, torch.Tensor):
        return part.contiguous()
    if isinstance(part, Int8Weight):
        return Int8Weight(part.values.contiguous(), part.scales.float().contiguous())
    if isinstance(part, BlockWeight):
        return dataclasses.replace(part, octets=part.octets.contiguous())
    assert isinstance(part, GroupedWeight)
    repeats = part.group_size // group_size  # groups are powers of two
    scales, zeros = (table.float().repeat_interleave(repeats, dim=1) for table in (part.scales, part.zeros))
    return GroupedWeight(
        part.values.contiguous(), scales.contiguous(), zeros.contiguous(), part.bits, None, part.is_mxfp4
    )


def _source(part: _Source) -> tuple[int, int, int, int, int, int]:
    if isinstance(part, torch.Tensor):
        return address(part), TYPE_NUMBERS[part.dtype], num_rows(part), 0, 0, 0
    if isinstance(part, BlockWeight):
        kind = _native.GgmlBlock[part.kind].value
        return address(part.octets), TYPE_NUMBERS[torch.uint8], num_rows(part), 0, 0, kind
    zeros = part.zeros if isinstance(part, GroupedWeight) else None
    return (
        address(part.values),
        TYPE_NUMBERS[part.values.dtype],
        num_rows(part),
        address(part.scales),
        address(zeros),
        0,
    )


def _raise_of_blocks(parts: Sequence[Weight]) -> NoReturn:
    for part in parts:
        if isinstance(part, BlockWeight):
            part.decoded()
    raise ValueError("a weight in blocks has scales that are infinite or NaN")
