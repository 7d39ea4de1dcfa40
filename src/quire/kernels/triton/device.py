"""Where the kernels run, and what is different in Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

is_interpreted: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter: decided when this module is imported, as by `triton.jit`."""

INTERPRETED = tl.constexpr(is_interpreted)
"""The same, for kernels."""


def kernel_device() -> torch.device:
    """Return the device whose memory the kernels read and write."""
    return torch.device("cpu" if is_interpreted else "cuda")


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Return float32 numbers in another type of floats, the nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter cuts off what bfloat16 has no room for.
        bits = values.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        nearest = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        values = tl.where(values == values, nearest, values)
    return values.to(dtype)


@triton.jit
def nearest_int(values):
    """Return float32 numbers of less than 2^22 rounded to whole ones, ties to even."""
    return (values + 12582912.0) - 12582912.0  # 1.5 * 2^23: what follows has no fraction
