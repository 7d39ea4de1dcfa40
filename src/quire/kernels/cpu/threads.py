"""The threads that the native kernels share."""

from __future__ import annotations

import logging

from quire.kernels.cpu import _native
from quire.kernels.devices.cores import usable_cores, usable_cpus

logger = logging.getLogger(__name__)


def use_threads(num_threads: int) -> None:
    """Compute on `num_threads` threads, the caller's among them; 0: one for each physical core."""
    if num_threads > usable_cpus():
        logger.warning(
            "EngineConfig.num_threads is %d, but this process may use only %d CPUs; a thread that waits for "
            "one holds up the others: lower it, or set it to 0",
            num_threads,
            usable_cpus(),
        )
    _native.set_threads(num_threads or usable_cores())
