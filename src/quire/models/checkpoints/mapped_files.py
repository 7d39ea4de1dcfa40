"""Tensors in memory-mapped files."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch


def drop_pages(tensor: torch.Tensor) -> None:
    """Release the whole pages from the first to the last number of `tensor` in a private mapping of a file.

    They are read from the file again on the next access; they must not have been written to. Does nothing on
    systems without `madvise`.
    """
    advise = _madvise()
    if advise is None:
        return
    if not tensor.numel():
        return
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + span * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        advise(start, stop - start, mmap.MADV_DONTNEED)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
