"""Waiting for descriptors with numbers too large for select, which a server with many connections has."""

import fcntl
import os
import resource
import subprocess

import pytest

from quire.front.process import launch as engine_launch
from quire.front.process.launch import is_readable
from quire.front.process.standby import StandbyProcess

LARGE = 1500


@pytest.fixture(autouse=True)
def many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= LARGE:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * LARGE), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def moved_up(descriptor):
    """Return another descriptor of the same thing, whose number is large."""
    large = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, LARGE)
    os.close(descriptor)
    return large


def test_something_to_read_and_an_end():
    read_end, write_end = os.pipe()
    read_end = moved_up(read_end)
    assert not is_readable(read_end, 0)
    os.write(write_end, b"x")
    assert is_readable(read_end, 0)
    os.read(read_end, 1)
    os.close(write_end)
    assert is_readable(read_end, 0)
    os.close(read_end)


def test_the_end_of_an_engine_process_is_seen(monkeypatch):
    open_pidfd = os.pidfd_open
    monkeypatch.setattr(engine_launch.os, "pidfd_open", lambda pid: moved_up(open_pidfd(pid)))
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not engine_launch.has_ended(process, 0)
        process.kill()
        assert engine_launch.has_ended(process, 10)


def test_a_standby_is_checked(monkeypatch):
    standby = StandbyProcess.__new__(StandbyProcess)
    read_end, write_end = os.pipe()
    read_end = moved_up(read_end)
    monkeypatch.setattr(StandbyProcess, "event_fd", read_end)
    assert standby.check()
    os.close(write_end)
    assert not standby.check()
    os.close(read_end)
