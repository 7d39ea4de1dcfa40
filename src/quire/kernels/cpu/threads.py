"""The threads that the native kernels share."""

from __future__ import annotations

import os

import psutil

from quire.kernels.cpu import _native


def use_threads(num_threads: int) -> None:
    """Compute on `num_threads` threads, the caller's among them; 0: one for each physical core."""
    _native.set_threads(num_threads or _usable_cores(), [])


def _usable_cores() -> int:
    """Return the physical cores that this process may use; two threads on one only share its vector units."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)
