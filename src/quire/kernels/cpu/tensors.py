"""How tensors are passed to the native kernels: as an address, the number of a type, and strides.

What kernels demand of a tensor concerns nothing but its form, so that a form is checked when it is first met:
a call looks up the forms of its tensors, and follows their addresses with the numbers that came of the check.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu import _native

TYPE_NUMBERS: dict[torch.dtype, int] = {getattr(torch, kind.name): kind.value for kind in _native.DType}
_FLOAT_TYPES = {dtype: TYPE_NUMBERS[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16)}

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""A tensor's shape, strides and type, and whether it is on the CPU. Calls that must be quick spell it out."""

checked_once = functools.lru_cache(maxsize=1024)
"""Decorates what checks forms; those that were checked last pass without a call."""


def form_of(tensor: torch.Tensor) -> Form:
    """Return the form of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cpu


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's first number, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def float_type(name: str, form: Form) -> int:
    """Return the number of a tensor's type.

    Raises:
        TypeError: it is no type of floats that the kernels have.
    """
    number = _FLOAT_TYPES.get(form[2])
    if number is None:
        raise TypeError(f"{name} is {form[2]}; it must be float32, bfloat16 or float16")
    return number


def check_on_cpu(name: str, form: Form) -> None:
    """Raise ValueError unless a tensor is in the memory that the kernels compute in."""
    if not form[3]:
        raise ValueError(f"{name} is on another device; the native kernels need it on the CPU")


def row_stride(name: str, form: Form, shape: tuple[int, ...] | None = None) -> int:
    """Return the elements between rows that should have this shape.

    Raises:
        ValueError: they have another, or the numbers of a row are not adjacent, or it is not on the CPU.
    """
    rows, strides = form[:2]
    if len(strides) != 2 or strides[1] != 1 or (shape is not None and rows != shape):
        raise ValueError(
            f"{name} is {tuple(rows)} with strides {strides}; it must be "
            f"{'two-dimensional' if shape is None else list(shape)}, and a row's numbers adjacent"
        )
    check_on_cpu(name, form)
    return strides[0]


def written_row_stride(name: str, form: Form, shape: tuple[int, ...]) -> int:
    """Return the elements between rows of this shape that a kernel writes to.

    Raises:
        ValueError: see `row_stride`; or rows have memory in common.
    """
    stride = row_stride(name, form, shape)
    if stride < shape[1] and shape[0] > 1:
        raise ValueError(f"{name} has rows of {shape[1]} numbers that begin {stride} numbers apart")
    return stride


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether numbers lie in order, as `torch.Tensor.is_contiguous` means it."""
    is_next = all(
        size == 1 or stride == math.prod(shape[axis + 1 :])
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )
    return is_next or 0 in shape


def check_contiguous(name: str, form: Form, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor has this shape, and is contiguous and on the CPU."""
    if form[0] != shape or not is_contiguous(shape, form[1]):
        raise ValueError(
            f"{name} is {list(form[0])} with strides {form[1]}; it must be {list(shape)} and contiguous"
        )
    check_on_cpu(name, form)


def check_vector(name: str, form: Form, size: int) -> None:
    """Raise ValueError unless a tensor is float32 [size] and contiguous."""
    shape, strides, dtype, _ = form
    if dtype is not torch.float32 or shape != (size,) or (strides != (1,) and size > 1):
        raise ValueError(
            f"{name} is {dtype} {list(shape)} with strides {strides}; it must be float32 [{size}] and "
            "contiguous"
        )
    check_on_cpu(name, form)


def check_arrays(*wanted: tuple[str, npt.NDArray[Any], np.dtype[Any], tuple[int, ...]]) -> None:
    """Raise ValueError unless each array, of a name, has this type and shape and is contiguous."""
    for name, array, dtype, shape in wanted:
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)} with strides {array.strides} in bytes; it must "
                f"be {dtype} {list(shape)} and contiguous"
            )
