"""Starting engine processes, and ending them with their children."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

from quire.engine.process.standby_signs import STANDBY_OPTION

_ahead: list[subprocess.Popen[bytes]] = []


def is_readable(descriptor: int, timeout: float) -> bool:
    """Return whether data or the end of the file can be read within `timeout` seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


@contextlib.contextmanager
def started_ahead(number: int = 1) -> Iterator[None]:
    """Start a block's first engine processes at once, to run while the block imports its modules.

    They end with the block unless `start_process` has taken them. Not for blocks in several threads.
    """
    _ahead.extend(_start([]) for _ in range(number))
    try:
        yield
    finally:
        while _ahead:
            end_process(os.getpid(), _ahead.pop())


def start_process(*, is_standby: bool = False) -> subprocess.Popen[bytes]:
    """Start an engine process, which waits for the lines that configure it.

    Args:
        is_standby: whether it imports its modules while it waits.
    """
    if is_standby:
        return _start([STANDBY_OPTION])
    return _ahead.pop(0) if _ahead else _start([])


def _start(options: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.engine.process.main", str(os.getpid()), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # so that it can be killed together with its children
    )


def has_ended(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Return whether the process ends within `timeout` seconds, without reaping it."""
    if process.returncode is not None:
        return True
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:  # this program ignores SIGCHLD, so that the kernel reaps
        return True
    try:
        return is_readable(descriptor, timeout)
    finally:
        os.close(descriptor)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, unless it is reaped and its id may be another's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # this program ignores SIGCHLD
            os.killpg(process.pid, signal.SIGKILL)


def end_process(owner: int, process: subprocess.Popen[bytes]) -> None:
    """Kill the process if it is still running, reap it, and close its pipes.

    Args:
        owner: process id of the front; has no effect in a fork, which must not end the engine.
        process: an engine, or a standby.
    """
    if os.getpid() != owner:
        return
    kill_group(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
