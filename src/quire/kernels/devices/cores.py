"""How many CPUs this process may use."""

from __future__ import annotations

import os

import psutil


def usable_cores() -> int:
    """Return the physical cores that this process may use; two threads on one only share its vector units."""
    allowed = usable_cpus()
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def usable_cpus() -> int:
    """Return the logical CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
