"""Builds a `Weight` from integers, scales and zero points of any quantized format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

import torch

from quire.kernels.bounds import kernel_group
from quire.kernels.layers.weights import MAX_ZERO, GroupedWeight, Int8Weight, Weight

Parts = Mapping[str, torch.Tensor]
Shape = tuple[int, ...]

INT8_ZERO = 128  # unsigned byte that represents 0


@dataclasses.dataclass(slots=True, frozen=True)
class MatrixFormat:
    """One format of a quantized matrix: several tensors, whose names differ in their last component.

    Args:
        key: last component of the tensor that identifies this format.
        needed: last components of the tensors that every such matrix has.
        optional: parts that may be missing.
        ignored: parts that may be present and are not used.
        decode: takes the tensors by last component and the matrix's shape [out, in], and returns the matrix;
            raises ValueError if they are inconsistent.
    """

    key: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    ignored: tuple[str, ...]
    decode: Callable[[Parts, Shape], Weight]

    def requiring(self, names: Collection[str]) -> MatrixFormat:
        """Return this format with some optional tensors required."""
        return dataclasses.replace(
            self,
            needed=(*self.needed, *names),
            optional=tuple(name for name in self.optional if name not in names),
        )


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of `bits` (4 or 8) in each int32, lowest first: [...] to [..., 32 / bits] uint8.

    Raises:
        ValueError: `packed` is of another type.
    """
    if packed.dtype != torch.int32:
        raise ValueError(f"its packed numbers are stored as {packed.dtype}; int32 is needed")
    octets = packed.contiguous().view(torch.uint8).view(*packed.shape, 4)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def packed_bits(num_words: int, num_values: int) -> int:
    """Return the bits of each of `num_values` numbers that fill `num_words` words of 32 bits.

    Raises:
        ValueError: they are neither 4 nor 8.
    """
    for bits in (4, 8):
        if -(-num_values * bits // 32) == num_words:
            return bits
    raise ValueError(
        f"{num_values} weights are packed in {num_words} int32, which is neither 4 nor 8 bits for each"
    )


def scales_of(parts: Parts, name: str) -> torch.Tensor:
    """Return the part `name` in float32.

    Raises:
        ValueError: it is not floating point, or not finite.
    """
    scales = parts[name]
    if not scales.is_floating_point():  # bytes may be exponents, as in MXFP8
        raise ValueError(f"its {name} is stored as {scales.dtype}; a floating-point type is needed")
    wide = scales.float()
    if not bool(wide.isfinite().all()):
        raise ValueError(f"its {name} has invalid scales: infinite or NaN")
    return wide


def grouped(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    *,
    bits: int,
    group_of: torch.Tensor | None = None,
) -> Weight:
    """Return (value - zero of its group) * scale of its group, in the narrowest form that holds it exactly.

    That is `Int8Weight` for 8 bits with one scale for a row and zeros in the middle, `GroupedWeight` for all
    others in equal groups of a size that kernels have, and float32 for the rest.

    Args:
        values: [out, in] uint8.
        scales: [out, groups] float32.
        zeros: like scales, any type.
        bits: 4 or 8.
        group_of: [in], the group of each input; None: groups are runs of equal length.
    """
    zeros = zeros.float()
    inputs, groups = values.shape[1], scales.shape[1]
    if scales.shape != zeros.shape:
        raise ValueError(
            f"it has scales {list(scales.shape)} and zeros {list(zeros.shape)}, not one for each"
        )
    if not bool((zeros.abs() <= MAX_ZERO).all()):
        raise ValueError(f"it has zero points beyond {MAX_ZERO:.0f}, or NaN")
    if group_of is None:
        if inputs % groups:
            raise ValueError(f"{inputs} inputs cannot be divided evenly among {groups} groups")
        group_of = torch.arange(inputs) // (inputs // groups)
    group_of = group_of.long()
    if len(group_of) != inputs or int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        raise ValueError(f"its {len(group_of)} inputs' groups do not fit {inputs} inputs and {groups} groups")
    kept_group = kernel_group(inputs // groups)
    are_equal = inputs % groups == 0 and bool((group_of.bincount(minlength=groups) == inputs // groups).all())
    if bits == 8 and groups == 1 and bool((zeros == INT8_ZERO).all()):
        return Int8Weight((values ^ INT8_ZERO).view(torch.int8), scales[:, 0].contiguous())
    if not are_equal or not kept_group:
        return (values.float() - zeros[:, group_of]) * scales[:, group_of]
    order = None
    if bool((group_of.diff() < 0).any()):
        order = group_of.argsort(stable=True)
        values = values[:, order]
    repeats = inputs // groups // kept_group
    scales, zeros = (part.repeat_interleave(repeats, dim=1) for part in (scales, zeros))
    return GroupedWeight(values, scales, zeros, bits, order)


def require_shape(parts: Parts, name: str, shape: Shape) -> None:
    """Raise ValueError unless the part `name` has this shape."""
    if tuple(parts[name].shape) != shape:
        raise ValueError(f"its {name} has shape {list(parts[name].shape)}; {list(shape)} is needed")
