"""The directory of files and batches, and how much of it each tenant uses."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.front.text.worker_thread import TooManyJobsError, WorkerThread
from quire.server.wire.errors import UNAVAILABLE, ApiError

T = TypeVar("T")

_MAX_WAITING = 1024  # jobs
_FILE_ID = re.compile(r"file-[0-9a-z]+(-output|-errors)?")
_ID = re.compile(r"(?:file-|batch_)([0-9a-f]{8})[0-9a-f]{24}(?:-output|-errors)?")
_KEY_BYTES = 4
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DirectoryInUseError(ConfigError):
    """Another server uses the directory of files and batches."""


class BatchDirectory:
    """A directory that this server owns until it is closed. Files are named by ids that the server makes.

    Each directory has a key, which all ids that are made for it begin with. Disk access happens in one
    thread, a bounded part at a time.

    Args:
        path: path of the directory, created if missing.

    Raises:
        ConfigError: it cannot be used.
        DirectoryInUseError: another server uses it.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._files = self._path / "files"
        self._thread = WorkerThread("quire-batch-files", _MAX_WAITING)
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"BatchConfig.batch_dir {path!r} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise DirectoryInUseError(f"BatchConfig.batch_dir {path!r} is used by another server") from None
        try:
            self._key = _key_in(self._lock)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"BatchConfig.batch_dir {path!r} cannot be used: {error}") from error

    @property
    def database_path(self) -> Path:
        """Path of the database of files."""
        return self._path / "batches.sqlite"

    def new_id(self, prefix: str) -> str:
        """Return a new id of a file or batch, which cannot be guessed."""
        return f"{prefix}{self._key}{secrets.token_hex(16 - _KEY_BYTES)}"

    def is_elsewhere(self, given_id: str) -> bool:
        """Return whether an id was made for another directory."""
        match = _ID.fullmatch(given_id)
        return match is not None and match[1] != self._key

    def path_of(self, file_id: str) -> Path:
        """Return the path of the file with this id, made by this server."""
        return self._files / file_id

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in the disk thread, and return its result.

        Raises:
            ApiError: 503: too many calls are waiting.
            Exception: whatever `call` raises.
        """
        try:
            job = self._thread.submit(call)
        except TooManyJobsError as error:
            raise ApiError(503, f"the disk is too busy: {error}", kind=UNAVAILABLE) from None
        return await asyncio.wrap_future(job)

    def sync(self) -> None:
        """Sync the directory to disk; blocks."""
        descriptor = os.open(self._files, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_all_but(self, file_ids: Collection[str]) -> None:
        """Remove leftovers of interrupted uploads and deletions; blocks."""
        for entry in os.scandir(self._files):
            if _FILE_ID.fullmatch(entry.name) and entry.name not in file_ids:
                os.unlink(entry.path)

    def close(self) -> None:
        """Release the directory to other servers."""
        os.close(self._lock)


def _key_in(lock: int) -> str:
    """Return the key of a directory, which is in its lock file."""
    key = os.pread(lock, 2 * _KEY_BYTES, 0).decode("ascii", "replace")
    if not re.fullmatch(f"[0-9a-f]{{{2 * _KEY_BYTES}}}", key):
        key = secrets.token_hex(_KEY_BYTES)
        os.pwrite(lock, key.encode(), 0)
        os.fsync(lock)
    return key


def opened_directory(config: ServerConfig) -> BatchDirectory | None:
    """Open the configured directory; None if there is none.

    Raises:
        ConfigError: it cannot be used, or another server uses it.
    """
    path = config.batches.batch_dir
    return BatchDirectory(path) if path else None


class StoredBytes:
    """Bytes of each tenant's stored files.

    Args:
        limit: maximum for each tenant.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used: dict[str, int] = {}

    def load(self, used: Mapping[str, int]) -> None:
        """Count the files that are already stored."""
        self._used = dict(used)

    def has_room(self, tenant: str, num_bytes: int) -> bool:
        """Return whether a tenant may store `num_bytes` more."""
        return self._used.get(tenant, 0) + num_bytes <= self.limit

    def note(self, tenant: str, num_bytes: int) -> None:
        """Add to the bytes of a tenant; negative: subtract."""
        self._used[tenant] = self._used.get(tenant, 0) + num_bytes


def disk_failure(error: OSError) -> ApiError:
    """Return the answer to a request after a disk error."""
    if error.errno in _NO_SPACE:
        return ApiError(507, "the disk of the server's batch_dir is full", code="disk_full")
    problem = error.strerror or "an error of the disk"
    return ApiError(503, f"the server's batch_dir cannot be used: {problem}", kind=UNAVAILABLE)
