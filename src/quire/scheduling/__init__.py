"""Who runs in a step; numpy and plain Python only.

The public names are imported when first used, so that the front, which needs what messages are made of, does
not import the scheduler.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

TYPE_CHECKING = False  # as in `quire.lazy_attributes`

if TYPE_CHECKING:
    from quire.scheduling.interface import PauseState, SchedulerInterface
    from quire.scheduling.outputs import EngineCoreOutput, EngineCoreOutputs, SchedulerStats
    from quire.scheduling.scheduler import Scheduler
    from quire.step import ModelRunnerOutput, SchedulerOutput

__all__ = [
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "ModelRunnerOutput",
    "PauseState",
    "Scheduler",
    "SchedulerInterface",
    "SchedulerOutput",
    "SchedulerStats",
]

_HOMES = {
    "EngineCoreOutput": "quire.scheduling.outputs",
    "EngineCoreOutputs": "quire.scheduling.outputs",
    "ModelRunnerOutput": "quire.step",
    "PauseState": "quire.scheduling.interface",
    "Scheduler": "quire.scheduling.scheduler",
    "SchedulerInterface": "quire.scheduling.interface",
    "SchedulerOutput": "quire.step",
    "SchedulerStats": "quire.scheduling.outputs",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
