"""The file of a disk tier: locked by one writer, read and written in regions, bounded in size."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.disk.region import RegionLayout

logger = logging.getLogger(__name__)

SUFFIX = ".kvtier"


class TierFile:
    """An open file of regions. The first process to open it is its writer, until that closes it.

    Several threads may read and write it at the same time. The file is closed when nothing refers to this.

    Args:
        path: the file, which is made if there is none.

    Raises:
        OSError: it can be neither opened nor made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.is_writer = _lock(self._descriptor)

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def try_to_become_writer(self) -> bool:
        """Become the writer if there is none any more; return whether this is the writer now."""
        self.is_writer = self.is_writer or _lock(self._descriptor)
        return self.is_writer

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this file."""
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        own = os.fstat(self._descriptor)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._descriptor).st_size

    @property
    def last_change(self) -> int:
        """When the file was last written to, in nanoseconds."""
        return os.fstat(self._descriptor).st_mtime_ns

    def read_header(self, layout: RegionLayout, place: int) -> bytes:
        """Return the header of a region, shorter if the file ends before."""
        return os.pread(self._descriptor, layout.header_bytes, place * layout.region_bytes)

    def prefetch(self, layout: RegionLayout, place: int) -> None:
        """Have the kernel fetch a region into its page cache."""
        offset = place * layout.region_bytes
        os.posix_fadvise(self._descriptor, offset, layout.region_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, layout: RegionLayout, place: int, payload: ByteArray) -> bytes:
        """Read a region's payload and return its header; empty if the file ends before its end."""
        header = bytearray(layout.header_bytes)
        num_read = os.preadv(self._descriptor, [header, payload.data], place * layout.region_bytes)
        return bytes(header) if num_read == layout.header_bytes + layout.payload_bytes else b""

    def write(self, layout: RegionLayout, place: int, header: bytes, payload: ByteArray) -> None:
        """Write a region.

        Raises:
            OSError: the disk is full or fails; the region then holds anything.
        """
        offset = place * layout.region_bytes
        num_written = os.pwritev(self._descriptor, [header, payload.data], offset)
        if num_written < len(header):
            raise OSError(f"only {num_written} bytes of a region could be written")
        rest = payload.data[num_written - len(header) :]
        while rest:
            num_written = os.pwrite(self._descriptor, rest, offset + len(header) + len(payload) - len(rest))
            rest = rest[num_written:]

    def truncate(self, num_bytes: int) -> None:
        """Cut off all but the first `num_bytes`."""
        if self.num_bytes > num_bytes:
            os.ftruncate(self._descriptor, num_bytes)

    def grow(self, num_bytes: int, limit: int) -> bool:
        """Let the file have `num_bytes`, unless all tiers of the directory together had more than `limit`.

        Files that no process uses are removed for it, those first that were not written to for longest.

        Returns:
            Whether it has them now. They take up no disk before they are written.
        """
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)  # two that grow at a time would both see the same room
            if not self._make_room(num_bytes, limit):
                return False
            os.ftruncate(self._descriptor, num_bytes)
            return True
        finally:
            os.close(directory)

    def _make_room(self, num_bytes: int, limit: int) -> bool:
        states: list[tuple[Path, os.stat_result]] = []
        for path in self._path.parent.glob(f"*{SUFFIX}"):
            if path != self._path:
                with contextlib.suppress(OSError):  # a link that leads nowhere, for example
                    states.append((path, path.stat()))
        states.sort(key=lambda state: state[1].st_mtime_ns)
        excess = num_bytes + sum(state.st_size for _, state in states) - limit
        for path, state in states:
            if excess <= 0:
                break
            with contextlib.suppress(OSError):  # another user's file, for example
                excess -= state.st_size if _remove_unused(path) else 0
        return excess <= 0


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("a KV tier is read-only, because its file cannot be locked: %s", error)
        return False
    return True


def _remove_unused(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not _lock(descriptor):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)
