"""Counting open descriptors in a process of which other threads and garbage have some, too."""

from __future__ import annotations

import gc
import os
import time

LIMIT = 60.0  # seconds


def num_open() -> int:
    """Return how many descriptors are open, without those that only garbage holds."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def wait_until_closed(num_before: int) -> None:
    """Wait until no more descriptors are open than before: threads that end close theirs a little later."""
    deadline = time.monotonic() + LIMIT
    while num_open() > num_before:
        assert time.monotonic() < deadline, "descriptors are left open"
        time.sleep(0.01)
