"""Starting engine processes, and ending them with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from quire.engine.messages import SPARE_OPTION
from quire.front.descriptors import is_readable


def start_process(*, is_spare: bool = False) -> subprocess.Popen[bytes]:
    """Start an engine process, which waits for the lines that say what it is to build.

    Args:
        is_spare: let it import what it needs while it waits.
    """
    options = [SPARE_OPTION] if is_spare else []
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.engine.process", str(os.getpid()), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # so that it can be killed together with what it has started
    )


def has_ended(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Return whether the process ends within `timeout` seconds; it is not reaped."""
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
    """Kill the process and what it has started, unless it is reaped, and its number perhaps another's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # this program ignores SIGCHLD
            os.killpg(process.pid, signal.SIGKILL)


def end_process(owner: int, process: subprocess.Popen[bytes]) -> None:
    """Kill the process if it is still running, reap it, and close its pipes.

    Args:
        owner: process id of the front; in a fork of it, which must not end the engine, nothing happens.
        process: of an engine, or a spare.
    """
    if os.getpid() != owner:
        return
    kill_group(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
