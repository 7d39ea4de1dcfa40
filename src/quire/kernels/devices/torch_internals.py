"""The operators that Quire calls and that torch does not promise to keep; tested with `TESTED_TORCH`.

They are looked up when they are first called, since builds of torch without oneDNN lack some.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

TESTED_TORCH = "2.13.0"


def has_onednn_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this CPU: AVX2 alone does not do."""
    return bool(torch_operator("ops.mkldnn._is_mkldnn_bf16_supported")())


def reorder_linear_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [out, in] bfloat16 in oneDNN's own layout, which only `linear_pointwise` reads.

    Raises:
        ImportError: this build of torch lacks the operator; so do all others here.
    """
    return torch_operator("ops.mkldnn._reorder_linear_weight")(weight, None)  # type: ignore[no-any-return]


def linear_pointwise(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `rows @ weight.T + bias` in bfloat16, with a weight from `reorder_linear_weight`."""
    operator = torch_operator("ops.mkldnn._linear_pointwise")
    return operator(rows, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def int8_product(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the product [T, n] int32 of int8 matrices [T, k] and [k, n]."""
    return torch_operator("_int_mm")(rows, columns)  # type: ignore[no-any-return]


def end_failed_capture(pool: tuple[int, int]) -> bool:
    """Have torch's allocator end a capture to a pool of memory, if it takes it for under way.

    It does so if CUDA has ended the capture with an error, at least up to torch 2.13. Then it would give no
    memory back to the GPU any more, also where it runs out, and `torch.cuda.empty_cache` would raise.

    Returns:
        Whether it did.

    Raises:
        ImportError: this build of torch lacks a function.
    """
    device = torch.cuda.current_device()
    try:
        torch_operator("_C._cuda_endAllocateToPool")(device, pool)
    except RuntimeError:  # it has ended it
        return False
    torch_operator("_C._cuda_releasePool")(device, pool)
    return True


@functools.cache
def torch_operator(name: str) -> Any:
    """Return `torch.<name>`.

    Raises:
        ImportError: there is none.
    """
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ImportError(
            f"torch {torch.__version__} has no torch.{name}; install the version that Quire is tested with, "
            f"torch=={TESTED_TORCH}"
        )
    return found
