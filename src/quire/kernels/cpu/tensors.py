"""How tensors are told to the native kernels: as an address, the number of a type, and strides."""

from __future__ import annotations

import torch

from quire.kernels.cpu import _native

TYPE_NUMBERS: dict[torch.dtype, int] = {getattr(torch, kind.name): kind.value for kind in _native.DType}
_FLOAT_TYPES = {dtype: TYPE_NUMBERS[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's first number, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def float_type(name: str, tensor: torch.Tensor) -> int:
    """Return the number of a tensor's type.

    Raises:
        TypeError: it is no type of floats that the kernels have.
    """
    number = _FLOAT_TYPES.get(tensor.dtype)
    if number is None:
        raise TypeError(f"{name} is {tensor.dtype}; it must be float32, bfloat16 or float16")
    return number


def check_on_cpu(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless a tensor is in the memory that the kernels compute in."""
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}; the native kernels need it on the CPU")


def row_stride(name: str, rows: torch.Tensor, shape: tuple[int, ...] | None = None) -> int:
    """Return the elements between rows that should have this shape.

    Raises:
        ValueError: they have another, or the numbers of a row are not adjacent, or it is not on the CPU.
    """
    strides = rows.stride()
    if len(strides) != 2 or strides[1] != 1 or (shape is not None and rows.shape != shape):
        raise ValueError(
            f"{name} is {tuple(rows.shape)} with strides {rows.stride()}; it must be "
            f"{'two-dimensional' if shape is None else list(shape)}, and a row's numbers adjacent"
        )
    check_on_cpu(name, rows)
    return strides[0]


def written_row_stride(name: str, rows: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Return the elements between rows of this shape that a kernel writes to.

    Raises:
        ValueError: see `row_stride`; or rows have memory in common.
    """
    stride = row_stride(name, rows, shape)
    if stride < shape[1] and shape[0] > 1:
        raise ValueError(f"{name} has rows of {shape[1]} numbers that begin {stride} numbers apart")
    return stride


def common_type(rows: torch.Tensor, out: torch.Tensor) -> int:
    """Return the number of the type that both have.

    Raises:
        TypeError: their types differ, or it is no type of floats that the kernels have.
    """
    if out.dtype is not rows.dtype:
        raise TypeError(f"the rows are {rows.dtype} and out is {out.dtype}; both must have the same type")
    return float_type("rows", rows)


def check_norm_weight(weight: torch.Tensor, num_features: int) -> None:
    """Raise ValueError unless a norm's weight is float32 [num_features] and contiguous."""
    if weight.dtype is not torch.float32 or weight.shape != (num_features,) or not weight.is_contiguous():
        raise ValueError(
            f"a norm's weight is {weight.dtype} {tuple(weight.shape)}; it must be float32 [{num_features}]"
        )
    check_on_cpu("a norm's weight", weight)


def token_stride(name: str, tokens: torch.Tensor) -> int:
    """Return the elements between tokens [T, heads, head_dim].

    Raises:
        ValueError: the numbers of a token are not adjacent, or it is not on the CPU.
    """
    check_on_cpu(name, tokens)
    stride, head_stride, feature_stride = tokens.stride()
    if feature_stride != 1 or head_stride != tokens.shape[2]:
        raise ValueError(f"{name}'s strides are {tokens.stride()}; the numbers of a token must be adjacent")
    return stride


def check_attended(out: torch.Tensor, query: torch.Tensor) -> None:
    """Raise ValueError unless `out` has the type and shape of `query` and is contiguous."""
    if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; it must be {query.dtype} "
            f"{tuple(query.shape)} and contiguous"
        )
    check_on_cpu("out", out)


def check_sinks(sinks: torch.Tensor, num_heads: int) -> None:
    """Raise ValueError unless `sinks` is float32 [num_heads] and contiguous."""
    if sinks.dtype is not torch.float32 or sinks.shape != (num_heads,) or not sinks.is_contiguous():
        raise ValueError(f"sinks is {sinks.dtype} {tuple(sinks.shape)}; it must be float32 [{num_heads}]")
    check_on_cpu("sinks", sinks)
