"""Steps that the thread that plans them has a device begin: the results that another thread would have."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.stepping import OverlappedStepper
from quire.errors import EngineDeadError
from quire.step import ModelRunnerOutput


@dataclasses.dataclass(frozen=True)
class Planned:
    only_launches: bool = True
    awaits_tokens: bool = False  # for its masks, if a step is in flight
    error: Exception | None = None


class Engine:
    """Scheduler and runner of steps as planned; notes what is called, and in which thread."""

    def __init__(self, planned: list[Planned], *, captures: bool = True) -> None:
        self.planned = planned
        self.captures = captures
        self.num_planned = 0
        self.applied: list[tuple[int, bool]] = []
        self.executed: list[int] = []
        self.masks: list[str] = []
        self.here: list[int] = []  # steps that this thread has executed
        self.thread = threading.current_thread()
        self.gate = threading.Event()  # which other threads wait for before they compute
        self.gate.set()

    def schedule(self) -> Mock:
        step = self.num_planned
        self.num_planned += 1
        plan = self.planned[step] if step < len(self.planned) else Planned()
        return Mock(
            step=step,
            planned=plan,
            request_ids=["a"],
            pending_structured_output_tokens=plan.awaits_tokens,
            num_drafts_wanted=None,
        )

    def get_grammar_bitmask(self, output: Any) -> str:
        if output.planned.awaits_tokens and output.step:
            assert self.applied[-1][0] >= output.step - 1
        return f"of {output.step}"

    def update_from_output(self, output: Any, computed: ModelRunnerOutput) -> dict[int, Any]:
        self.applied.append((output.step, computed.is_applied))
        return {}

    def only_launches(self, output: Any) -> bool:
        # A runner's own state is not to be read while it computes.
        assert self.executed == list(range(output.step))
        return output.planned.only_launches

    def execute(self, output: Any, grammar: Any) -> ModelRunnerOutput:
        if threading.current_thread() is self.thread:
            self.here.append(output.step)
        else:
            assert self.gate.wait(20)
        self.masks.append(grammar())
        self.executed.append(output.step)
        if output.planned.error is not None:
            raise output.planned.error
        return ModelRunnerOutput(["a"], Mock())


def stepper(engine: Engine) -> OverlappedStepper:
    return OverlappedStepper(engine, engine)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.builds(Planned, st.booleans(), st.booleans(), st.sampled_from([None, None, ValueError("no")])),
        min_size=1,
        max_size=8,
    )
)
def test_steps_are_computed_and_applied_in_their_order_wherever_they_are(planned: list[Planned]) -> None:
    engine = Engine(planned)
    steps = stepper(engine)
    for _ in planned:
        steps.step()
    steps.close()
    order = list(range(engine.num_planned))
    assert engine.executed == order[: len(engine.executed)]
    assert engine.masks == [f"of {step}" for step in engine.executed]
    assert [step for step, _ in engine.applied] == order[: len(engine.applied)]
    assert len(engine.applied) >= len(planned)
    for step, is_applied in engine.applied:
        assert is_applied == (step >= len(planned) or planned[step].error is None)


def test_what_only_launches_is_asked_for_by_the_thread_that_plans_and_all_else_by_another() -> None:
    planned = [Planned(), Planned(only_launches=False), Planned(), Planned(awaits_tokens=True), Planned()]
    engine = Engine(planned)
    steps = stepper(engine)
    while engine.num_planned < len(planned):
        steps.step()
    steps.close()
    assert engine.here == [0, 2, 4]


def test_without_recordings_another_thread_executes_all() -> None:
    engine = Engine([Planned(), Planned()], captures=False)
    steps = stepper(engine)
    steps.step()
    steps.close()
    assert engine.executed == [0, 1]
    assert engine.here == []


def test_a_step_waits_its_turn_while_another_thread_computes() -> None:
    engine = Engine([Planned(only_launches=False), Planned()])
    engine.gate.clear()
    steps = stepper(engine)
    threading.Timer(0.05, engine.gate.set).start()
    steps.step()
    steps.close()
    assert engine.executed[:2] == [0, 1]
    assert engine.here[0] == 1


def test_an_engine_that_is_dead_is_so_wherever_that_was_noticed() -> None:
    engine = Engine([Planned(error=EngineDeadError("rank 1 has ended"))])
    with pytest.raises(EngineDeadError, match="rank 1"):
        stepper(engine).step()
