"""Programs that tests start: each has a time limit, and nothing that it started outlives the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import preloaded

LIMIT = 100.0  # seconds; the slowest take about five on an idle machine

# Runs in the child before the program. Signals that the test run ignores (SIGINT, if a shell started it in
# the background) would be ignored by the program too. PR_SET_PDEATHSIG (1) has it killed if the test run is.
LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execvp(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def started(
    command: Sequence[str], *, limit: float = LIMIT, preload: bool = False, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Run a program in a process group of its own while the block lasts, then kill the group.

    Args:
        limit: seconds after which the group is killed within the block: reads from the program then end.
        preload: let a Python program start with torch and Quire imported (tests/support/preloaded.py).
        options: for `subprocess.Popen`.

    Raises:
        TimeoutError: the block ended because of the limit.
    """
    launch = [*command] if preload else [sys.executable, "-I", "-S", "-c", LAUNCHER, *command]
    popen = preloaded.Popen if preload else subprocess.Popen
    with popen(launch, start_new_session=True, **options) as process:
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill_group(process)

        timer = threading.Timer(limit, expire)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            timer.join()
            _kill_group(process)
            if expired.is_set():
                raise TimeoutError(f"{list(command)} ran for more than {limit} seconds")


def run(command: Sequence[str], *, stdin: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; `options` are those of `started`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, **pipes, **options) as process:
        stdout, stderr = process.communicate(stdin)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def python_output(code: str, *arguments: str, preload: bool = False) -> str:
    """Return what Python code prints in a process of its own; fails with its errors if it fails."""
    result = run([sys.executable, "-c", code, *arguments], preload=preload)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _kill_group(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
