"""Schedulers that tests plug in."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from quire.scheduling import Scheduler, SchedulerOutput
from quire.scheduling.outputs import EngineCoreOutput, EngineCoreOutputs
from quire.step import ModelRunnerOutput
from stepped_clock import SecondPerStep

SLOW_STEPS = "QUIRE_TEST_SLOW_STEPS"
"""Environment variable with the path of a file: while it is there, `SlowScheduler` is slow."""


class CountingScheduler(Scheduler):
    """Counts its steps."""

    num_scheduled = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.num_scheduled += 1
        return super().schedule(throttle_prefills)


class BrokenScheduler(Scheduler):
    """Cannot be built."""

    def __init__(self, *args, **kwargs) -> None:
        raise RuntimeError("this scheduler is broken")


class UnfinishedScheduler(Scheduler):
    """Is never built to the end: its engine does not become ready."""

    def __init__(self, *args, **kwargs) -> None:
        threading.Event().wait()
        raise AssertionError


class HangingScheduler(Scheduler):
    """Never finishes its first step."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        threading.Event().wait()
        raise AssertionError


class HaltingScheduler(Scheduler):
    """Begins no step any more once ten requests have ended."""

    num_ended = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.num_ended >= 10:
            threading.Event().wait()
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        self.num_ended += sum(output.finish_reason is not None for output in outputs_of(by_client))
        return by_client


class SlowScheduler(Scheduler):
    """Has requests go on for as long as a test needs them, and then lets them end without delay."""

    slow_step = 0.05  # seconds; hundreds of them are longer than a busy machine holds up a test
    _goes_on = False

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._goes_on and Path(os.environ[SLOW_STEPS]).exists():
            time.sleep(self.slow_step)
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        self._goes_on = any(
            output.new_token_ids and output.finish_reason is None for output in outputs_of(by_client)
        )
        return by_client


class SlowSecondPerStep(SlowScheduler, SecondPerStep):
    """On its own clock, it is never slow."""

    slow_step = 0.005  # seconds; for requests of thousands of tokens


def outputs_of(by_client: dict[int, EngineCoreOutputs]) -> list[EngineCoreOutput]:
    """Return the outputs of a step for all clients."""
    return [output for one in by_client.values() for output in one.outputs]
