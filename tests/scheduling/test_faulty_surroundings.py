"""A clock, memory, events and drafts that raise or lie: no request, block or token is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scene import Clock, Scene

from quire.errors import QueueFullError
from quire.status import FinishReason
from quire.step import DraftTokenIds
from unmutated import UNMUTATED

NAN = float("nan")


class Faulty:
    """Calls a function; when told to, it raises or answers something else instead."""

    def __init__(self, function) -> None:
        self._function = function
        self.fault = None

    def __call__(self, *arguments):
        fault, self.fault = self.fault, None
        if isinstance(fault, Exception):
            raise fault
        return self._function(*arguments) if fault is None else fault


# -- the clock ----------------------------------------------------------------------------------------------


def timed_scene(**config) -> tuple[Scene, Faulty, Clock]:
    clock = Clock()
    faulty = Faulty(clock)
    return Scene(clock=faulty, **config), faulty, clock


@pytest.mark.parametrize(
    "fault",
    [OSError("no clock"), NAN, float("inf"), "noon", None, 1 << 2000, -5e6],
    ids=lambda one: f"{one!r:.20}",
)
def test_a_clock_that_fails_stands_still(fault, caplog):
    scene, faulty, clock = timed_scene(request_timeout=10.0)
    scene.add("a", range(5), max_tokens=6)
    for _ in range(3):
        faulty.fault = fault
        scene.step()
    clock.advance(9.0)
    scene.step()
    scene.add("b", range(5))
    scene.finish()
    scene.check_naive()
    assert ("the clock failed" in caplog.text) == (fault not in (None, -5e6))


def test_a_clock_that_goes_back_goes_on_from_where_it_was():
    scene, _, clock = timed_scene(request_timeout=10.0, max_num_seqs=1, max_num_queued_reqs=2)
    scene.add("a", range(5), max_tokens=40)
    scene.step()
    scene.add("waits", range(5))
    clock.advance(6)
    scene.step()
    clock.advance(-1e6)
    scene.step()
    clock.advance(3)
    scene.step()
    assert not scene.reasons
    clock.advance(1.5)
    scene.step()
    assert scene.reasons == dict.fromkeys(("a", "waits"), FinishReason.ERROR)
    assert "after 10.5 s" in scene.errors["a"]
    scene.add("b", range(5))
    scene.finish()
    scene.check_naive("b")


@settings(max_examples=30, backend=UNMUTATED)
@example([-0.5] * 3)
@given(st.lists(st.sampled_from([0.1, 1.0, 30.0, -0.5, -40.0, -1e7, 1e7, NAN, OSError("no clock")])))
def test_whatever_the_clock_does_all_end_and_the_queue_has_an_answer(jumps):
    scene, faulty, clock = timed_scene(
        request_timeout=50.0, queue_timeout=20.0, max_num_seqs=1, max_num_queued_reqs=2
    )
    for number, jump in enumerate(jumps):
        try:
            scene.add(f"{number}", range(5), pin_prefix=2.0)
        except QueueFullError as error:
            assert 1 <= error.retry_after <= 60
        if isinstance(jump, float) and np.isfinite(jump):
            clock.advance(jump)
        else:
            faulty.fault = jump
        scene.step()
    scene.finish_but_pins()
    assert set(scene.reasons) == set(scene.requests)
    for _ in range(2):  # a clock that has gone back counts for less when it comes to where it was
        clock.advance(3)
        scene.step()
    scene.check_nothing_is_held()


# -- memory and events --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [MemoryError(), -7, 10**6, "all", NAN, ()], ids=repr)
def test_memory_that_raises_or_lies_costs_nobody_anything(fault):
    committed = []

    def commit(count):
        committed.append(count)
        return count

    faulty = Faulty(commit)
    scene = Scene(num_blocks=40, commit_blocks=faulty, max_num_batched_tokens=8)
    for number in range(4):
        scene.add(f"{number}", range(number, number + 9), max_tokens=9)
        faulty.fault = fault
        scene.step()
        assert scene.scheduler.accounts.kv.pools.first.num_committed <= 40
    scene.finish()
    scene.check_naive()


class BrokenSink:
    """Is told of the prefix cache, and raises every time."""

    def stored(self, block_id, key):
        raise BrokenPipeError

    removed = stored

    def cleared(self):
        raise BrokenPipeError


def test_events_that_nobody_can_note_change_nothing(caplog):
    scene = Scene(num_blocks=8, kv_events=BrokenSink())
    for number in range(4):
        scene.add(f"{number}", range(number, number + 9), max_tokens=5)
        scene.finish()
    scene.check_naive()
    assert scene.scheduler.reset_prefix_cache()
    assert "could not be noted" in caplog.text


# -- drafts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [ValueError("no length"), -1, "two", 1.5, 50], ids=repr)
def test_a_draft_length_that_raises_or_lies_changes_no_token(fault):
    faulty = Faulty(lambda num_running: 2)
    scene = Scene(draft_length=faulty)
    scene.add("a", range(9), max_tokens=12)
    for _ in range(3):
        faulty.fault = fault
        scene.step()
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("drafts", [[-7], [1, -2, 3], [1] * 500, [2**31 - 1]], ids=str)
def test_drafts_that_are_no_tokens_or_too_many_change_no_token(drafts):
    scene = Scene(draft_length=lambda num_running: 2)
    scene.add("a", range(9), max_tokens=12)
    scene.step()
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [drafts]))
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("drafts", [[2**40], ["one"], None], ids=str)
def test_drafts_from_outside_that_are_refused_change_nothing(drafts):
    scene = Scene(draft_length=lambda num_running: 2)
    scene.add("a", range(9), max_tokens=12)
    scene.add("b", range(20, 29), max_tokens=12)
    for _ in range(2):
        scene.step()
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["a", "b"], [[1, 2], [3, 4]]))
    plan = scene.plan()
    assert plan.num_drafts.all()
    for given_drafts in (DraftTokenIds(["a", "b"], [[1], drafts]), DraftTokenIds(["a"], [])):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            scene.scheduler.update_draft_token_ids(given_drafts)
        with pytest.raises((TypeError, ValueError, OverflowError)):
            scene.scheduler.update_draft_token_ids_in_output(given_drafts, plan)
    scene.apply(plan)
    scene.finish()
    scene.check_naive()
