"""An engine process that runs before anybody knows what it is to build."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from quire.config import EngineConfig, SchedulerConfig
from quire.errors import ConfigError
from quire.front.process import launch as engine_launch
from quire.front.process.client import EngineProcess
from quire.front.process.launch import end_process, has_ended, start_process, started_ahead
from quire.scheduling.policies.victim import Last


@pytest.fixture
def started(monkeypatch):
    """Return the processes that are started in place of engines, and end them."""
    processes = []

    class Cat(subprocess.Popen):
        def __init__(self, _, **options):
            super().__init__(["cat"], **options)
            processes.append(self)

    monkeypatch.setattr(engine_launch.subprocess, "Popen", Cat)
    yield processes
    for process in processes:
        end_process(os.getpid(), process)


def test_it_becomes_the_first_engine_and_no_standby(started):
    with started_ahead():
        assert len(started) == 1
        standby, first, second = start_process(is_standby=True), start_process(), start_process()
    assert started == [first, standby, second]
    assert not any(has_ended(process, 0) for process in started)


@pytest.mark.parametrize("error", [ConfigError, KeyboardInterrupt])
def test_it_ends_with_a_block_that_starts_no_engine(started, error):
    with pytest.raises(error), started_ahead():
        raise error
    assert started[0].returncode is not None
    with started_ahead():
        pass
    assert started[1].returncode is not None
    assert start_process() is started[2]


def test_it_ends_if_no_engine_can_be_told_what_to_build(started):
    config = EngineConfig(model="mini", scheduler=SchedulerConfig(victim=Last))
    with pytest.raises(ConfigError, match="only names can be sent"), started_ahead():
        EngineProcess(config, Path())
    (process,) = started
    assert process.returncode is not None
