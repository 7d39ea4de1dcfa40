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


def available_memory() -> int:
    """Return the bytes this process can still allocate: free in the machine and within its cgroup limits."""
    free = int(psutil.virtual_memory().available)
    return min([free, *cgroup_headroom()])


def cgroup_headroom(root: Path = Path("/")) -> list[int]:
    """Return the bytes left under each memory limit on this process: of its control group and the parents.

    Args:
        root: the folder of `proc` and `sys`; tests replace it.
    """
    headroom = []
    for controller, group in _memory_groups(root):
        for folder in _existing_folders(root / controller.mount, group):
            left = _headroom_of(controller, folder)
            if left is not None:
                headroom.append(left)
    return headroom


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


def _headroom_of(controller: _Controller, folder: Path) -> int | None:
    """Return limit - usage + reclaimable page cache, or None if the group has no limit."""
    try:
        limit = (folder / controller.limit).read_text().strip()
        usage = int((folder / controller.usage).read_text())
        statistics = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if limit == "max":
        return None
    counters = dict(line.split() for line in statistics.splitlines())
    return max(0, int(limit) - usage + int(counters.get(controller.reclaimable, 0)))
