"""Steps that are begun before the masks of their grammars are known, which may never be."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

from quire.engine.stepping import OverlappedStepper
from quire.step import ModelRunnerOutput


class Runner:
    """Notes which steps have been begun, and with which masks they ended."""

    def __init__(self, *, only_launches: bool) -> None:
        self.captures = only_launches
        self.only_launches = Mock(return_value=only_launches)
        self.began = [threading.Event() for _ in range(8)]
        self.masks: list[Any] = []

    def execute(self, output: Any, grammar: Any) -> ModelRunnerOutput:
        self.began[output.step].set()
        self.masks.append(grammar())
        return ModelRunnerOutput(["a"], Mock())


class Scheduler:
    """Plans steps of one request with a grammar, and notes in which order it is asked."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.calls: list[tuple[str, int]] = []
        self.num_planned = 0
        self.update_error: Exception | None = None

    def schedule(self) -> Mock:
        step, self.num_planned = self.num_planned, self.num_planned + 1
        plan = Mock(step=step, request_ids=["a"], pending_structured_output_tokens=step > 0)
        self.calls.append(("plan", step))
        return plan

    def get_grammar_bitmask(self, plan: Mock) -> str:
        self.calls.append(("masks", plan.step))
        return f"of {plan.step}"

    def update_from_output(self, plan: Mock, computed: ModelRunnerOutput) -> dict[int, Any]:
        if plan.pending_structured_output_tokens is False:
            assert self.runner.began[plan.step + 1].wait(20)  # before its masks can be known
        self.calls.append(("update", plan.step))
        if self.update_error is not None:
            raise self.update_error
        return {}


@pytest.fixture(params=[False, True], ids=["computes", "only_launches"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(only_launches=request.param)


@pytest.fixture
def scheduler(runner: Runner) -> Scheduler:
    return Scheduler(runner)


@pytest.fixture
def stepper(scheduler: Scheduler, runner: Runner) -> OverlappedStepper:
    return OverlappedStepper(scheduler, runner)  # type: ignore[arg-type]


def test_a_step_begins_before_its_masks_are_known(
    stepper: OverlappedStepper, scheduler: Scheduler, runner: Runner
) -> None:
    stepper.step()
    stepper.step()
    stepper.close()
    order = [call for call in scheduler.calls if call[0] != "plan"]
    assert order == [("masks", 0), ("update", 0), ("masks", 1), ("update", 1), ("masks", 2)]
    assert runner.masks == ["of 0", "of 1", "of 2"]


def test_no_step_waits_for_masks_after_one_that_could_not_be_applied(
    stepper: OverlappedStepper, scheduler: Scheduler, runner: Runner
) -> None:
    scheduler.update_error = ArithmeticError("no luck")
    with pytest.raises(ArithmeticError):
        stepper.step()
    scheduler.update_error = None
    stepper.step()
    stepper.close()
    assert runner.masks == ["of 0", "of 1", "of 2"]


def test_a_stepper_that_is_closed_leaves_no_step_behind(stepper: OverlappedStepper, runner: Runner) -> None:
    for _ in range(2):
        stepper._launch()
    assert runner.began[1].wait(20)
    stepper.close()
    assert runner.masks == ["of 0"]


def test_masks_that_cannot_be_computed_fail_their_step(
    stepper: OverlappedStepper, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied = []

    def update(plan: Mock, computed: ModelRunnerOutput) -> dict[int, Any]:
        applied.append((plan.step, computed.is_applied))
        return {}

    def fail(plan: Mock) -> str:
        if plan.step == 1:
            raise MemoryError
        return ""

    monkeypatch.setattr(scheduler, "update_from_output", update)
    monkeypatch.setattr(scheduler, "get_grammar_bitmask", fail)
    stepper.step()
    stepper.step()
    stepper.close()
    assert applied == [(0, True), (1, False), (2, True)]
