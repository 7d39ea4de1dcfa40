"""Weight matrices as checkpoints hold them, and what quantization makes of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from quire.kernels.bounds import FLOAT8_INPUTS, KERNEL_GROUPS, MXFP4_GROUP

INT4_ZERO = 8.0  # the step that stands for 0 where quantization is symmetric
INT6_ZERO = 32.0
MAX_ZERO = 60_000.0  # kernels hold zeros in float16
INT4_RANGE_SHARES = (1.0, 0.9, 0.8)  # of a group's range that 16 steps may span
INT8_STEPS = 127  # the largest magnitude of a row, in steps


@dataclasses.dataclass(slots=True, frozen=True)
class Int8Weight:
    """Rows of a matrix in int8: weight = value * scale of its row."""

    values: torch.Tensor  # [rows, in_features] int8
    scales: torch.Tensor  # [rows] float32


@dataclasses.dataclass(slots=True, frozen=True)
class GroupedWeight:
    """Rows of a matrix in few bits: weight = (value - zero) * scale of its group of `group_size` values."""

    values: torch.Tensor  # [rows, in_features] uint8, less than 2^bits
    scales: torch.Tensor  # [rows, in_features / group_size] float32
    zeros: torch.Tensor  # like scales; whole numbers unless the checkpoint has others
    bits: int  # 4, 6 or 8; of 6, all zeros are `INT6_ZERO`
    order: torch.Tensor | None = None  # [in_features] int64: which input each value is for; None: its own
    is_mxfp4: bool = False
    """Whether 4 bits hold each of 8: values less zeros are twice a number of E2M1, scales powers of two, and
    groups of 32.
    """

    @property
    def group_size(self) -> int:
        """Inputs that share a scale and a zero."""
        return self.values.shape[1] // self.scales.shape[1]


@dataclasses.dataclass(slots=True, frozen=True)
class Float8Weight:
    """Rows of a matrix in float8: weight = value * scale of its block of rows and inputs.

    Blocks begin at the first row and input; the last of them may go beyond the matrix.
    """

    values: torch.Tensor  # [rows, in_features] float8_e4m3fn
    scales: torch.Tensor  # [blocks of rows, blocks of inputs] float32
    block: tuple[int, int]  # rows and inputs that share a scale


@dataclasses.dataclass(slots=True, frozen=True)
class BlockWeight:
    """Rows of a matrix in the blocks of a GGUF file, for kernels that take these apart themselves."""

    octets: torch.Tensor  # [rows, blocks, block_bytes] uint8
    kind: str  # of the blocks, by ggml's name
    block_size: int  # numbers of a block
    bits: int  # this and the others: as of what `decode` returns
    group_size: int
    is_mxfp4: bool
    decode: Callable[[torch.Tensor], Weight]  # raises if scales are infinite or NaN

    def decoded(self) -> GroupedWeight:
        """Return the same rows with a number in each byte; raise what `decode` raises."""
        weight = self.decode(self.octets)
        assert isinstance(weight, GroupedWeight)
        return weight


WeightInGroups = GroupedWeight | BlockWeight
"""What has bits, a group size, and is MXFP4 or not."""

Weight = torch.Tensor | Int8Weight | GroupedWeight | BlockWeight | Float8Weight
"""Some rows of a matrix, [rows, in_features]; a tensor is of a floating-point type."""


def num_rows(weight: Weight) -> int:
    """Return the output features that `weight` makes."""
    if isinstance(weight, BlockWeight):
        return len(weight.octets)
    return len(weight) if isinstance(weight, torch.Tensor) else len(weight.values)


def in_features(weight: Weight) -> int:
    """Return the input features that `weight` takes."""
    if isinstance(weight, BlockWeight):
        return weight.octets.shape[1] * weight.block_size
    return weight.shape[1] if isinstance(weight, torch.Tensor) else weight.values.shape[1]


def is_reordered(weight: Weight) -> bool:
    """Return whether the inputs of `weight` are not in their own order."""
    return isinstance(weight, GroupedWeight) and weight.order is not None


def part_of(weight: Weight, axis: int, ranges: Sequence[range]) -> Weight:
    """Return some rows (axis 0) or inputs (axis 1) of `weight`, one range after the other; no copy of one.

    Ranges of rows may have steps.

    Raises:
        ValueError: inputs that share a scale would be cut apart into groups that no kernel has.
    """
    if isinstance(weight, Float8Weight):
        return _part_of_float8(weight, axis, ranges)
    if isinstance(weight, BlockWeight):
        if axis == 0:
            return dataclasses.replace(weight, octets=_slices(weight.octets, 0, ranges))
        weight = weight.decoded()
    if isinstance(weight, Int8Weight):
        scales = _slices(weight.scales, 0, ranges) if axis == 0 else weight.scales
        return Int8Weight(_slices(weight.values, axis, ranges), scales)
    if isinstance(weight, GroupedWeight) and weight.order is not None and axis == 1:
        weight = dequantize(weight)  # some inputs of every group
    if isinstance(weight, torch.Tensor):
        return _slices(weight, axis, ranges)
    tables: tuple[torch.Tensor, ...] = (weight.scales, weight.zeros)
    if axis == 1:
        group = math.gcd(weight.group_size, *(edge for part in ranges for edge in (part.start, part.stop)))
        if group not in KERNEL_GROUPS:
            raise _indivisible(weight.group_size, ranges)
        repeats = weight.group_size // group
        tables = tuple(table.repeat_interleave(repeats, dim=1) for table in tables)
        of_tables = [range(part.start // group, part.stop // group) for part in ranges]
    else:
        of_tables = list(ranges)
    scales, zeros = (_slices(table, axis, of_tables) for table in tables)
    values = _slices(weight.values, axis, ranges)
    is_mxfp4 = weight.is_mxfp4 and values.shape[1] == scales.shape[1] * MXFP4_GROUP
    return GroupedWeight(values, scales, zeros, weight.bits, weight.order, is_mxfp4)


def _part_of_float8(weight: Float8Weight, axis: int, ranges: Sequence[range]) -> Float8Weight:
    """See `part_of`: blocks become so small that none is cut."""
    values = _slices(weight.values, axis, ranges)
    *edges, _ = (edge for part in ranges for edge in (part.start, part.stop))  # the last block may be cut
    if any(part.step > 1 for part in ranges):
        edges.append(1)
    sizes = list(weight.block)
    if weight.scales.shape[axis] == 1:
        sizes[axis] = max(sizes[axis], values.shape[axis])
        return Float8Weight(values, weight.scales, (sizes[0], sizes[1]))
    sizes[axis] = size = math.gcd(sizes[axis], *edges)
    if axis == 1 and size % FLOAT8_INPUTS:
        raise _indivisible(weight.block[1], ranges)
    scales = scales_of_blocks(weight, (sizes[0], sizes[1]))
    of_scales = [range(part.start // size, -(-part.stop // size), part.step) for part in ranges]
    return Float8Weight(values, _slices(scales, axis, of_scales), (sizes[0], sizes[1]))


def scales_of_blocks(weight: Float8Weight, block: tuple[int, int]) -> torch.Tensor:
    """Return the scales of smaller blocks, each within one block of `weight`."""
    scales = weight.scales
    for axis, (size, old) in enumerate(zip(block, weight.block, strict=True)):
        starts = torch.arange(0, weight.values.shape[axis], size, device=scales.device)
        scales = scales.index_select(axis, starts // old)
    return scales


def _indivisible(group_size: int, ranges: Sequence[range]) -> ValueError:
    return ValueError(
        f"its inputs are in groups of {group_size}, which cannot be divided at "
        f"{', '.join(f'{part.start} and {part.stop}' for part in ranges)}"
    )


def _slices(tensor: torch.Tensor, axis: int, ranges: Sequence[range]) -> torch.Tensor:
    before = (slice(None),) * axis
    parts = [tensor[*before, part.start : part.stop : part.step] for part in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Return `weight` [rows, in] in int8: the largest magnitude of a row becomes 127 steps."""
    wide = weight.float()
    largest = wide.abs().amax(dim=1)
    inverse = torch.where(largest > 0, INT8_STEPS / largest, 0.0)
    return Int8Weight((wide * inverse[:, None]).round_().to(torch.int8), largest / INT8_STEPS)


def quantize_int4(weight: torch.Tensor, group_size: int) -> GroupedWeight:
    """Return `weight` [rows, in] in 4 bits, in groups along the inputs.

    Sixteen steps span the weights of a group and 0, or a part of that range, with the outermost weights cut
    off: whichever has the least squared error. Scale and zero are numbers that kernels can hold.
    """
    groups = weight.float().reshape(len(weight), -1, group_size)
    low = groups.amin(dim=2, keepdim=True).clamp(max=0.0)
    high = groups.amax(dim=2, keepdim=True).clamp(min=0.0)
    scales, zeros = _range(low, high)
    least = torch.full_like(low, math.inf)
    for share in INT4_RANGE_SHARES:
        scale, zero = _range(low * share, high * share)
        error = ((_steps(groups, scale, zero) - zero) * scale - groups).square().sum(dim=2, keepdim=True)
        is_better = error < least
        least = torch.where(is_better, error, least)
        scales, zeros = torch.where(is_better, scale, scales), torch.where(is_better, zero, zeros)
    scales, zeros = as_held(scales.squeeze(2)), zeros.squeeze(2).half().float()
    steps = _steps(groups, scales.unsqueeze(2), zeros.unsqueeze(2))
    return GroupedWeight(steps.to(torch.uint8).flatten(1), scales, zeros, bits=4)


def as_held(scales: torch.Tensor) -> torch.Tensor:
    """Return [rows, groups] as kernels hold them: in float16, as multiples of a power of two for each row."""
    _, exponents = torch.frexp(scales.abs().amax(dim=1, keepdim=True))
    units = torch.ldexp(torch.ones_like(scales[:, :1]), (exponents - 15).clamp(min=-126))
    return (scales / units).half().float() * units


def _range(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero of 16 steps from `low` to `high`."""
    scales = (high - low) / 15
    return scales, torch.where(scales > 0, -low / scales, 0.0)


def _steps(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return the nearest of 16 steps: [rows, groups, group_size]."""
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    return (groups * inverse + zeros).clamp(0, 15).round()


def with_tensors(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """Return `weight` with what `change`, of the order of rows, makes of each of its tensors."""
    if isinstance(weight, torch.Tensor):
        return change(weight)
    if isinstance(weight, BlockWeight):
        return dataclasses.replace(weight, octets=change(weight.octets))
    if isinstance(weight, GroupedWeight):
        order = None if weight.order is None else change(weight.order)
        tables = change(weight.scales), change(weight.zeros)
        return GroupedWeight(change(weight.values), *tables, weight.bits, order, weight.is_mxfp4)
    return dataclasses.replace(weight, values=change(weight.values), scales=change(weight.scales))


def floats_of(weight: Weight) -> torch.Tensor:
    """Return `weight` in floating point: as it is, or dequantized to float32."""
    return weight if isinstance(weight, torch.Tensor) else dequantize(weight)


def dequantize(weight: Weight) -> torch.Tensor:
    """Return `weight` as float32."""
    if isinstance(weight, BlockWeight):
        weight = weight.decoded()
    if isinstance(weight, Int8Weight):
        return weight.values.float() * weight.scales[:, None]
    if isinstance(weight, Float8Weight):
        _, inputs = weight.block
        wide = weight.values.float()
        for columns, scales in zip(
            torch.split(wide, inputs, dim=1), scales_of_blocks(weight, (1, inputs)).t(), strict=True
        ):
            columns.mul_(scales[:, None])
        return wide
    if isinstance(weight, GroupedWeight):
        groups = weight.values.float().reshape(*weight.scales.shape, -1)
        wide = ((groups - weight.zeros[:, :, None]) * weight.scales[:, :, None]).flatten(1)
        return wide if weight.order is None else torch.empty_like(wide).index_copy_(1, weight.order, wide)
    return weight.float()
