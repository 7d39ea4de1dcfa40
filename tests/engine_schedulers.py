"""Schedulers that tests plug in."""

from __future__ import annotations

import threading

from quire.scheduling import Scheduler, SchedulerOutput


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


class HangingScheduler(Scheduler):
    """Never finishes its first step."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        threading.Event().wait()
        raise AssertionError
