"""Where the kernels run, and what is different in Triton's interpreter."""

from __future__ import annotations

import functools
import subprocess

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

is_interpreted: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter: decided when this module is imported, as by `triton.jit`."""

MULTIPROCESSORS = 132
"""Of an H100 and an H200: sizes are chosen for as many."""

INTERPRETED = tl.constexpr(is_interpreted)
"""The same, for kernels."""


def kernel_device() -> torch.device:
    """Return the device whose memory the kernels read and write."""
    return torch.device("cpu" if is_interpreted else "cuda")


@functools.cache
def compute_capability() -> int:
    """Return that of the GPU, 90 for 9.0; in the interpreter that of Hopper."""
    return 90 if is_interpreted else triton.runtime.driver.active.get_current_target().arch


def launch_obstacle() -> str:
    """Return why Triton cannot launch kernels on the GPU; empty: it can.

    What it launches kernels with is compiled from C at its first start on a machine.
    """
    try:
        _ = triton.runtime.driver.active
    except Exception as error:  # whatever a compiler, a linker or a loader comes to
        is_compiler_s = isinstance(error, subprocess.CalledProcessError) or "C compiler" in str(error)
        advice = (
            "; install a C compiler and Python's headers, or name a compiler in CC" if is_compiler_s else ""
        )
        return f"Triton cannot launch kernels ({type(error).__name__}: {error}){advice}"
    return ""


def has_large_tiles() -> bool:
    """Return whether programs may have the shared memory of Hopper, and tiles are fetched: 9.x and 10.x."""
    return 90 <= compute_capability() < 120


def has_little_shared_memory() -> bool:
    """Return whether programs may have 99 KB of shared memory at most: 8.6, 8.9 and 12.x."""
    return compute_capability() in (86, 89) or compute_capability() >= 120


@triton.jit
def await_previous():
    """Wait until the kernel before this one has ended: what each kernel does first.

    From Hopper on, a kernel is launched while the one before it still computes (programmatic dependent
    launch), and must not read or write before that has ended.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def loop_end(number):
    """Return a number as one that a loop can end at."""
    if INTERPRETED:  # a number is an array there, of which numpy makes no integer
        return number.handle.data.item()
    else:  # noqa: RET505 - the compiler sees no more than one branch
        return number


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
def nearest_float8(values):
    """Return float32 numbers in float8e4nv, the nearest, ties to even; 448 stands for all that are larger."""
    if INTERPRETED:
        # The interpreter rounds ties away from 0, and loses the carry into the exponent.
        bits = values.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        small = tl.minimum(magnitude, 0x3C800000)  # at most 2^-6, below which all steps are 2^-9
        steps = nearest_int(small.to(tl.float32, bitcast=True) * 512.0)
        code = tl.where(magnitude < 0x3C800000, steps.to(tl.uint32), tl.minimum(normal, 0x7E))
        code = tl.where(magnitude > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return values.to(tl.float8e4nv)


@triton.jit
def largest_magnitude(values, axis: tl.constexpr, keep_dims: tl.constexpr = False):
    """Return the largest magnitudes of float32 numbers along an axis, NaN where one of them is.

    A maximum of floats leaves NaN out. The bits of magnitudes are in their order, with those of NaN above.
    """
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis, keep_dims=keep_dims)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def larger(first, second):
    """Return the larger ones of two, NaN where one of them is."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nearest_int(values):
    """Return float32 numbers of less than 2^22 rounded to whole ones, ties to even."""
    return (values + 12582912.0) - 12582912.0  # 1.5 * 2^23: what follows has no fraction
