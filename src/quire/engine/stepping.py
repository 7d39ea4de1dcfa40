"""Running steps: serially, or planning the next step while one is computed."""

from __future__ import annotations

import dataclasses
import functools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from typing_extensions import override

from quire.engine.messages import ErrorInfo
from quire.errors import EngineDeadError
from quire.scheduling.interface import SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutput
from quire.step import (
    DraftTokenIds,
    GrammarOutput,
    GrammarSource,
    GraphStats,
    ModelRunnerOutput,
    SchedulerOutput,
    StepInFlight,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Runner(Protocol):
    """Computes steps."""

    def execute(
        self, output: SchedulerOutput, grammar: GrammarSource | None = None
    ) -> ModelRunnerOutput | StepInFlight:
        """Compute one step, or have a device begin to; steps come in the order in which they were planned.

        The next step may come before the result of this one has been asked for. `grammar` is asked for masks
        when nothing is left but to choose tokens: it may have to wait for the tokens of the step before.
        """

    @property
    def captures(self) -> bool:
        """Whether steps are captured, so that a device can be asked for them at once."""

    @property
    def graph_stats(self) -> GraphStats | None:
        """How steps were computed so far; None: they are not captured."""

    def only_launches(self, output: SchedulerOutput) -> bool:
        """Return whether `execute` would have a device begin the step at once, and wait for nothing.

        Called when no other step is being executed.
        """


class Stepper(ABC):
    """Runs steps: schedule, execute, update.

    Args:
        scheduler: plans a step and applies its results.
        runner: computes it.
    """

    def __init__(self, scheduler: SchedulerInterface, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.num_failed_steps = 0
        """Steps that failed since the last one that computed anything."""

    @abstractmethod
    def step(self) -> tuple[list[EngineCoreOutput], bool]:
        """Run one step; return its outputs, and whether anything was done or is in flight."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the step in flight; the stepper cannot be used afterwards."""

    def _execute(
        self, scheduled: SchedulerOutput, grammar: GrammarSource
    ) -> ModelRunnerOutput | StepInFlight:
        """Compute the step or begin to; if that fails, return the output of a failed step.

        Raises:
            EngineDeadError: a rank has failed, and no further step can be computed.
        """
        try:
            return self._runner.execute(scheduled, grammar)
        except EngineDeadError:
            raise
        except Exception as error:
            return _failed(scheduled, error)

    @staticmethod
    def _result(scheduled: SchedulerOutput, computed: ModelRunnerOutput | StepInFlight) -> ModelRunnerOutput:
        """Wait for what a step computed; if it failed, return the output of a failed step."""
        try:
            result: object = computed.result() if isinstance(computed, StepInFlight) else computed
            if not isinstance(result, ModelRunnerOutput):
                raise TypeError(f"the model runner returned {type(result).__name__}")
            return result
        except Exception as error:
            reported = computed.kv_connector_output if isinstance(computed, StepInFlight) else None
            return dataclasses.replace(_failed(scheduled, error), kv_connector_output=reported)

    def _take(self, drafts: DraftTokenIds | None) -> None:
        if drafts is not None:
            self._scheduler.update_draft_token_ids(drafts)

    def _update(self, scheduled: SchedulerOutput, computed: ModelRunnerOutput) -> list[EngineCoreOutput]:
        found: list[EngineCoreOutput] = []
        for outputs in self._scheduler.update_from_output(scheduled, computed).values():
            found += outputs.outputs
        for output in found:
            if not isinstance(output, EngineCoreOutput):
                raise TypeError(f"the scheduler returned {type(output).__name__} as an output of a request")
        if not computed.is_applied:
            self.num_failed_steps += 1
        elif scheduled.request_ids:
            self.num_failed_steps = 0
        return found


class SerialStepper(Stepper):
    """Applies the results of each step before it plans the next."""

    @override
    def step(self) -> tuple[list[EngineCoreOutput], bool]:
        scheduled = self._scheduler.schedule()
        grammar = functools.partial(self._scheduler.get_grammar_bitmask, scheduled)
        executed = self._execute(scheduled, grammar)
        computed = self._result(scheduled, executed)
        outputs = self._update(scheduled, computed)
        if computed.is_applied and isinstance(executed, StepInFlight):
            self._take(executed.drafts())
        return outputs, bool(outputs) or _does_something(scheduled)

    @override
    def close(self) -> None:
        pass  # no step is ever in flight


class OverlappedStepper(Stepper):
    """Plans the next step while one is computed, before its tokens are known.

    Steps are computed in another thread. Where a device computes, it is given the next step before it has
    ended this one, and no other thread is needed if that takes little time: handing a step over would take
    longer. Masks of grammars that have to see these tokens first follow later, while the step is computed.
    """

    def __init__(self, scheduler: SchedulerInterface, runner: Runner) -> None:
        super().__init__(scheduler, runner)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model-runner")
        self._in_flight: deque[_LaunchedStep] = deque()
        self._drafts: Future[DraftTokenIds | None] | None = None  # after the last step that was applied

    @override
    def step(self) -> tuple[list[EngineCoreOutput], bool]:
        if self._drafts is not None:
            drafts, self._drafts = self._drafts, None
            self._take(drafts.result())
        if not self._in_flight:
            self._launch()
        self._launch()
        does_something = any(_does_something(step.scheduled) for step in self._in_flight)
        step = self._in_flight.popleft()
        executed = step.computed.result()
        computed = self._result(step.scheduled, executed)
        try:
            outputs = self._update(step.scheduled, computed)
        finally:
            self._tell_masks()
        if not computed.is_applied:
            outputs += self._finish_in_flight()
        elif step.scheduled.num_drafts_wanted is not None and isinstance(executed, StepInFlight):
            self._drafts = self._thread.submit(executed.drafts)  # while these outputs are sent
        return outputs, bool(outputs) or does_something

    def _finish_in_flight(self) -> list[EngineCoreOutput]:
        """Finish the step that was planned before a failure was known, so that no later plan builds on it.

        If it failed as well, the first failure may be the cause: its requests get no error, and are
        computed again.
        """
        outputs = []
        while self._in_flight:
            step = self._in_flight.popleft()
            computed = self._result(step.scheduled, step.computed.result())
            if not computed.is_applied:
                computed = dataclasses.replace(computed, errors={}, failure="")
            outputs += self._update(step.scheduled, computed)
        return outputs

    @override
    def close(self) -> None:
        for step in self._in_flight:
            step.masks.cancel()
        self._thread.shutdown()
        self._in_flight.clear()

    def _launch(self) -> None:
        scheduled = self._scheduler.schedule()
        has_to_wait = bool(self._in_flight) and scheduled.pending_structured_output_tokens
        if not has_to_wait and self._only_launches(scheduled):
            masks = _called(self._scheduler.get_grammar_bitmask, scheduled)
            computed = _called(self._execute, scheduled, masks.result)
            self._in_flight.append(_LaunchedStep(scheduled, masks, computed))
            return
        masks = Future()
        computed = self._thread.submit(self._execute, scheduled, masks.result)
        self._in_flight.append(_LaunchedStep(scheduled, masks, computed))
        if not has_to_wait:
            self._tell_masks()

    def _only_launches(self, scheduled: SchedulerOutput) -> bool:
        """Return whether the step is for this thread to execute; nothing else is executed any more then."""
        if not self._runner.captures:
            return False
        for step in self._in_flight:
            step.computed.exception()
        return self._runner.only_launches(scheduled)

    def _tell_masks(self) -> None:
        """Have steps in flight go on that wait for masks; where there are none, why there are none."""
        for step in self._in_flight:
            if not step.masks.done():
                _call(step.masks, self._scheduler.get_grammar_bitmask, step.scheduled)


@dataclasses.dataclass(slots=True, frozen=True)
class _LaunchedStep:
    scheduled: SchedulerOutput
    masks: Future[GrammarOutput | None]
    computed: Future[ModelRunnerOutput | StepInFlight]


def _called(function: Callable[..., Result], *args: object) -> Future[Result]:
    """Call a function; return what came of it as if a thread had called it."""
    future: Future[Result] = Future()
    _call(future, function, *args)
    return future


def _call(future: Future[Result], function: Callable[..., Result], *args: object) -> None:
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)


def describe_failure(error: Exception) -> str:
    """Return the error message for a request whose step has failed."""
    return (
        f"the step that computed this request failed: {type(error).__name__}: {ErrorInfo.of(error).message}"
    )


def _failed(scheduled: SchedulerOutput, error: Exception) -> ModelRunnerOutput:
    logger.error(
        "computing a step failed; its %d requests are retried in parts",
        len(scheduled.request_ids),
        exc_info=error,
    )
    return ModelRunnerOutput.failed(scheduled, describe_failure(error))


def _does_something(scheduled: SchedulerOutput) -> bool:
    return bool(scheduled.request_ids or scheduled.finished_req_ids)
