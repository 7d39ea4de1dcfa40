"""A limit on the memory of a process that computes what is not to be trusted."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """Let this process map at most so many bytes more than it has now, and leave no core dump."""
    most = _num_bytes_mapped() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _num_bytes_mapped() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()
