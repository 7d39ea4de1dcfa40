"""Who runs in a step; numpy and plain Python only."""

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
