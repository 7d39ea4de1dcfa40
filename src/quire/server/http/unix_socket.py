"""A Unix socket to listen on, owned by one server at a time and removed with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator, Mapping

from quire.errors import ConfigError

MODES: Mapping[str, int] = {"owner": 0o600, "group": 0o660, "all": 0o666}
MAX_PATH_LENGTH = 107  # bytes; Linux's limit

_PROBE_TIMEOUT = 1.0  # seconds


@contextlib.contextmanager
def unix_socket(path: str, access: str) -> Iterator[socket.socket]:
    """Yield a bound Unix socket that is not listening yet; remove it at the end of the context.

    A file beside it, with the suffix `.lock`, is locked meanwhile, since the socket does not show whether
    another server is about to listen.

    Args:
        path: path of the socket.
        access: which users may connect, a key of `MODES`.

    Raises:
        ConfigError: another server uses the socket, the path is another file, or access is denied.
    """
    with contextlib.ExitStack() as stack:
        try:
            _require_short(path)
            stack.enter_context(_locked(f"{path}.lock", path))
            _remove_stale(path)
            bound = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            bound.bind(path)
            stack.callback(_remove_own, path, os.lstat(path))
            os.chmod(path, MODES[access])
        except OSError as error:
            raise ConfigError(
                f"cannot listen on the Unix socket {path!r} ({error}); choose another EdgeConfig.uds"
            ) from None
        yield bound


def _require_short(path: str) -> None:
    length = len(os.fsencode(path))
    if length > MAX_PATH_LENGTH:
        raise ConfigError(
            f"EdgeConfig.uds has {length} bytes, {path!r:.200}; the path of a Unix socket has at most "
            f"{MAX_PATH_LENGTH}"
        )


@contextlib.contextmanager
def _locked(lock_path: str, path: str) -> Iterator[None]:
    """Lock a socket's path; raise `ConfigError` if another process holds the lock."""
    while True:
        with open(os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(path) from None
            if not _is_same_file(lock_path, os.fstat(lock.fileno())):
                continue  # its last owner has just removed it
            try:
                yield
            finally:
                os.unlink(lock_path)
            return


def _remove_stale(path: str) -> None:
    """Remove the socket of a dead server; raise `ConfigError` for anything else at its path."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"EdgeConfig.uds is {path!r}, which exists and is not a socket; choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except (BlockingIOError, TimeoutError):  # its backlog is full
            raise _in_use(path) from None
        else:
            raise _in_use(path)


def _remove_own(path: str, own: os.stat_result) -> None:
    """Remove the socket unless another file has replaced it."""
    if _is_same_file(path, own):
        os.unlink(path)


def _is_same_file(path: str, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), known)
    except FileNotFoundError:
        return False


def _in_use(path: str) -> ConfigError:
    return ConfigError(f"another server listens on EdgeConfig.uds {path!r}; stop it, or choose another path")
