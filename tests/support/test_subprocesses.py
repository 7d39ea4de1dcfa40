"""No program that a test starts can hang the test, or outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import subprocesses
from engine_checks import wait_for_end
from subprocesses import python_output, run, started

pytestmark = pytest.mark.processes

# A parent and its child that only SIGKILL ends; the parent prints both process ids.
STUBBORN = """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
while True:
    signal.pause()
"""
COMMAND = [sys.executable, "-c", STUBBORN]


def test_a_group_that_ignores_signals_ends_with_the_block():
    with started(COMMAND, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert pids[0] == process.pid
        for pid in pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
    assert process.returncode == -signal.SIGKILL
    assert all(wait_for_end(pid) for pid in pids)


def test_a_program_that_never_ends_is_killed_at_its_limit():
    with pytest.raises(TimeoutError, match=r"ran for more than 0\.3 seconds"):
        run(COMMAND, limit=0.3)


def test_an_error_that_the_limit_causes_is_told_as_the_limit():
    silent = [sys.executable, "-c", "import signal; signal.pause()"]
    with (
        pytest.raises(TimeoutError, match="ran for more than"),
        started(silent, limit=0.3, stdout=subprocess.PIPE) as process,
    ):
        int(process.stdout.readline())  # reads nothing, and fails at that


def test_a_failing_block_kills_the_group():
    pids = []

    def fail_beside_a_group():
        with started(COMMAND, stdout=subprocess.PIPE, text=True) as process:
            pids.extend(int(pid) for pid in process.stdout.readline().split())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_beside_a_group()
    assert pids
    assert all(wait_for_end(pid) for pid in pids)


def test_a_program_can_be_interrupted_though_the_test_run_ignores_sigint():
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert python_output(code) == "True\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_is_killed_when_the_test_run_is():
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    test_run = (
        "import subprocesses, sys\n"
        f"with subprocesses.started([sys.executable, '-c', {code!r}]) as process:\n"
        "    process.wait()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(subprocesses.__file__).parent)}
    command = [sys.executable, "-c", test_run]
    with started(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        pid = int(process.stdout.readline())
        process.kill()
        assert wait_for_end(pid)
