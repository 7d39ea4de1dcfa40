"""Memory limit for a process that runs untrusted code."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """Limit the further memory of this process to `num_bytes`, and disable core dumps."""
    most = _num_bytes_mapped() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _num_bytes_mapped() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()
