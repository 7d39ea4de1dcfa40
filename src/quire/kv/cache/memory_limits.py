"""Memory available to this process: free in the machine, and within the limits of its control groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import psutil


@dataclasses.dataclass(frozen=True, slots=True)
class _Controller:
    """File names of one version of the kernel's memory controller; all values are in bytes."""

    mount: str
    limit: str
    usage: str
    reclaimable: str  # line of memory.stat: page cache that the kernel reclaims under pressure


# A group without a limit has "max" in version 2, and a number near 2^63 in version 1.
_V1 = _Controller(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2 = _Controller("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit on what this process allocates, in bytes."""

    limit: int
    available: int  # the part of `limit` that is unused or can be reclaimed

    @property
    def in_use(self) -> int:
        """Bytes of `limit` that are taken, by this process or others."""
        return self.limit - self.available


def memory_limit() -> MemoryLimit:
    """Return the limit that leaves this process least: the machine's memory, or that of a control group."""
    memory = psutil.virtual_memory()
    machine = MemoryLimit(int(memory.total), int(memory.available))
    return min([machine, *cgroup_limits()], key=lambda each: each.available)


def available_memory() -> int:
    """Return the bytes this process can still allocate: free in the machine and within its cgroup limits."""
    return memory_limit().available


def cgroup_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the memory limits on this process: of its control group and the parents.

    Args:
        root: the folder of `proc` and `sys`; tests replace it.
    """
    limits = []
    for controller, group in _memory_groups(root):
        for folder in _existing_folders(root / controller.mount, group):
            limit = _limit_of(controller, folder)
            if limit is not None:
                limits.append(limit)
    return limits


def _memory_groups(root: Path) -> Iterator[tuple[_Controller, str]]:
    """Yield this process's memory groups: lines `hierarchy:controllers:path` of /proc/self/cgroup."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _V1, path
        elif hierarchy == "0":
            yield _V2, path


def _existing_folders(mount: Path, group: str) -> Iterator[Path]:
    """Yield the group's folder and its parents up to the mount.

    Inside a container, the path may be that of the host, while the mount is already the container's group;
    folders that do not exist here are skipped.
    """
    folder = mount / group.lstrip("/")
    while folder != mount and mount in folder.parents:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    yield mount


def _limit_of(controller: _Controller, folder: Path) -> MemoryLimit | None:
    """Return a group's limit, with limit - usage + reclaimable page cache available; None: it has none."""
    try:
        limit = (folder / controller.limit).read_text().strip()
        usage = int((folder / controller.usage).read_text())
        statistics = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if limit == "max":
        return None
    counters = dict(line.split() for line in statistics.splitlines())
    reclaimable = int(counters.get(controller.reclaimable, 0))
    return MemoryLimit(int(limit), max(0, int(limit) - usage + reclaimable))
