"""The standby that is kept beside an engine, on a clock that tests set; a shell takes the place of Python."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from typing import ClassVar

import pytest

from engine_checks import is_zombie
from quire.front.process import standby
from quire.front.process.standby import START_DELAY, StandbyKeeper

READY = "printf +; read line; exit 3"
IMPORTS = "read line"
BROKEN = "exit 1"


class Scene:
    def __init__(self, **options):
        self.now = 100.0
        self.events = select.epoll()
        self.keeper = StandbyKeeper(self.events, **{"is_wanted": True, **options})

    def attend(self):
        self.keeper.maintain(lambda: self.now)

    def start_standby(self, then_wait=True):
        self.keeper.schedule_start(self.now)
        self.now += START_DELAY
        self.attend()
        if then_wait:
            self.wait()

    def wait(self):
        """Wait for an event of the standby, and attend to it."""
        assert self.events.poll(60)
        self.attend()


@pytest.fixture
def shell(monkeypatch):
    """Return the processes that are started, and let `shell.program` say what they do."""

    class Shell:
        program = READY
        started: ClassVar[list[subprocess.Popen[bytes]]]

    def start_process(*, is_standby):
        assert is_standby
        if not Shell.program:
            raise OSError(11, "no process for you")
        command = ["/bin/sh", "-c", Shell.program]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        Shell.started.append(subprocess.Popen(command, process_group=0, **pipes))
        return Shell.started[-1]

    Shell.started = []
    monkeypatch.setattr(standby, "start_process", start_process)
    return Shell


@pytest.fixture
def scene(shell):
    with contextlib.ExitStack() as stack:

        def make(**options):
            made = Scene(**options)
            stack.callback(made.events.close)
            stack.callback(made.keeper.close)
            return made

        yield make


def test_a_standby_is_started_some_time_after_the_engine_is_ready(scene, shell):
    one = scene()
    one.attend()
    assert one.keeper.start_at is None
    one.keeper.schedule_start(one.now)
    assert one.keeper.start_at == one.now + START_DELAY
    one.attend()
    assert not shell.started
    one.now += START_DELAY
    one.attend()
    assert one.keeper.start_at is None
    one.wait()
    assert one.keeper.is_ready()
    assert not one.events.poll(0), "its sign was read"
    one.keeper.schedule_start(one.now)
    assert one.keeper.start_at is None, "there is one"
    process = one.keeper.take()
    assert process is shell.started[0]
    assert process.poll() is None
    assert one.keeper.take() is None
    process.communicate(b"go\n")
    assert process.returncode == 3
    assert len(shell.started) == 1, "the next waits for the next engine"


@pytest.mark.parametrize("program", [IMPORTS, BROKEN])
def test_a_standby_that_has_not_imported_everything_is_not_used(scene, shell, program):
    shell.program = program
    one = scene()
    one.start_standby(then_wait=False)
    assert one.keeper.take() is None
    assert shell.started[0].returncode is not None
    assert not one.events.poll(0)


def test_a_standby_that_dies_is_not_replaced_before_the_next_engine_is_ready(scene, shell, caplog):
    one = scene()
    one.start_standby()
    os.kill(shell.started[0].pid, signal.SIGKILL)
    one.wait()
    assert "SIGKILL; the next recovery will take longer" in caplog.text
    assert not is_zombie(shell.started[0].pid)
    for _ in range(3):
        one.now += 1000
        one.attend()
    assert len(shell.started) == 1
    assert one.keeper.take() is None
    one.start_standby()
    assert one.keeper.is_ready()


def test_a_standby_that_cannot_be_started_is_done_without(scene, shell, caplog):
    shell.program = ""
    one = scene()
    one.start_standby(then_wait=False)
    one.attend()
    assert caplog.text.count("no standby engine process can be started") == 1
    assert one.keeper.take() is None
    assert one.keeper.start_at is None


def test_an_engine_that_dies_early_takes_the_plan_with_it(scene, shell):
    one = scene()
    one.keeper.schedule_start(one.now)
    assert one.keeper.take() is None
    assert one.keeper.start_at is None


def test_a_standby_ends_with_its_keeper_and_its_owner(scene, shell):
    one = scene()
    one.start_standby()
    one.keeper.close()
    assert shell.started[0].returncode == -signal.SIGKILL
    one.keeper.schedule_start(one.now)
    assert one.keeper.start_at is None
    lost = Scene()
    lost.start_standby()
    lost.events.close()
    del lost
    assert shell.started[1].returncode == -signal.SIGKILL


def test_without_a_wish_there_is_no_standby(scene, shell):
    one = scene(is_wanted=False)
    one.start_standby(then_wait=False)
    assert not shell.started
    assert one.keeper.take() is None
