"""Checks of a call's tensors before a kernel reads their addresses."""

from __future__ import annotations

import torch
import triton.language as tl

FLOAT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def check_rows(name: str, rows: torch.Tensor, like: torch.Tensor | None = None) -> None:
    """Raise unless `rows` are rows of floats whose numbers are adjacent, of the shape and type of `like`.

    Raises:
        TypeError: their type is not one of `FLOAT_TYPES`, or another than that of `like`.
        ValueError: their shape or strides are not as they must be.
    """
    if rows.dtype not in FLOAT_TYPES or (like is not None and rows.dtype is not like.dtype):
        wanted = "float32, bfloat16 or float16" if like is None else str(like.dtype)
        raise TypeError(f"{name} is {rows.dtype}; it must be {wanted}")
    shape = rows.shape if like is None else like.shape
    if rows.dim() != 2 or rows.shape != shape or (rows.stride(1) != 1 and rows.shape[1] > 1):
        raise ValueError(
            f"{name} is {tuple(rows.shape)} with strides {rows.stride()}; it must be "
            f"{'two-dimensional' if like is None else list(shape)}, and a row's numbers adjacent"
        )


def check_norm_weight(weight: torch.Tensor, num_features: int) -> None:
    """Raise ValueError unless a norm's weight is float32 [num_features] and contiguous."""
    if weight.dtype is not torch.float32 or weight.shape != (num_features,) or not weight.is_contiguous():
        raise ValueError(
            f"a norm's weight is {weight.dtype} {tuple(weight.shape)}; it must be float32 [{num_features}]"
        )


def check_vector(name: str, vector: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    """Raise unless `vector` is [length] of a type, and contiguous.

    Raises:
        TypeError: it is of another type.
        ValueError: its shape or strides are not as they must be.
    """
    if vector.dtype is not dtype:
        raise TypeError(f"{name} is {vector.dtype}; it must be {dtype}")
    if vector.shape != (length,) or not vector.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(vector.shape)} with strides {vector.stride()}; it must be [{length}] and "
            "contiguous"
        )


def check_logits(logits: torch.Tensor) -> None:
    """Raise unless `logits` are float32 [R, V], V at least 1, and a row's numbers adjacent.

    Raises:
        TypeError: their type is another.
        ValueError: their shape or strides are not as they must be.
    """
    if logits.dtype is not torch.float32:
        raise TypeError(f"logits are {logits.dtype}; they must be float32")
    if logits.dim() != 2 or not logits.shape[1] or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise ValueError(
            f"logits are {tuple(logits.shape)} with strides {logits.stride()}; they must be two-dimensional, "
            "have at least 1 token, and a row's numbers adjacent"
        )
