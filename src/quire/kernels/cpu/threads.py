"""The threads that the native kernels share."""

from __future__ import annotations

import logging
import os

import psutil

from quire.kernels.cpu import _native

logger = logging.getLogger(__name__)


def use_threads(num_threads: int) -> None:
    """Compute on `num_threads` threads, the caller's among them; 0: one for each physical core."""
    if num_threads > _usable_cpus():
        logger.warning(
            "EngineConfig.num_threads is %d, but this process may use only %d CPUs; a thread that waits for "
            "one holds up the others: lower it, or set it to 0",
            num_threads,
            _usable_cpus(),
        )
    _native.set_threads(num_threads or _usable_cores())


def _usable_cores() -> int:
    """Return the physical cores that this process may use; two threads on one only share its vector units."""
    allowed = _usable_cpus()
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
