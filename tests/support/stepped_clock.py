"""A scheduler for which each step takes a second, whatever it really took: time limits without waiting."""

from __future__ import annotations

import dataclasses

from quire.scheduling import Scheduler, SchedulerOutput
from quire.scheduling.context import SchedulerContext


class SecondPerStep(Scheduler):
    """Its clock is the number of steps planned."""

    def __init__(self, *args, context: SchedulerContext | None = None, **kwargs) -> None:
        self.num_planned = 0
        context = dataclasses.replace(context or SchedulerContext(), clock=lambda: float(self.num_planned))
        super().__init__(*args, context=context, **kwargs)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.num_planned += 1
        return super().schedule(throttle_prefills)
