from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scene import Scene

from held import num_held
from quire.errors import QueueFullError
from quire.scheduling.accounts.deadlines import Deadlines
from quire.scheduling.accounts.waiting import MAX_WAIT, MIN_WAIT, DrainRate
from quire.status import RequestStatus

NAMES = st.sampled_from(["a", "b", "c", "d"])
KINDS = st.sampled_from(["queue", "total"])
CALLS = st.one_of(
    st.tuples(st.just("add"), NAMES, KINDS, st.integers(0, 20)),
    st.tuples(st.just("forget"), NAMES),
    st.tuples(st.just("forget_queue"), NAMES),
    st.tuples(st.just("expired"), st.integers(0, 20)),
)


@settings(max_examples=200)
@given(st.lists(CALLS, max_size=60))
def test_deadlines_agree_with_a_dictionary(calls):
    deadlines, model = Deadlines(), {}
    for name, *arguments in calls:
        returned = getattr(deadlines, name)(*arguments)
        if name == "add":
            model[tuple(arguments[:2])] = arguments[2]
        elif name == "expired":
            passed = {key: at for key, at in model.items() if at <= arguments[0]}
            assert sorted(returned) == sorted(passed)
            moments = [passed[key] for key in returned]
            assert moments == sorted(moments)
            model = {key: at for key, at in model.items() if key not in passed}
        else:
            kinds = {"queue", "total"} if name == "forget" else {"queue"}
            model = {key: at for key, at in model.items() if key[0] != arguments[0] or key[1] not in kinds}
        assert len(deadlines) == len(model)


def test_deadlines_do_not_grow_with_requests_that_have_ended():
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(f"r{number}", "queue", 1e9)
        deadlines.add(f"r{number}", "total", 1e9 + number)
        deadlines.add("again", "total", 1e9 + number)
        deadlines.forget_queue(f"r{number}")
        deadlines.forget(f"r{number}")
    assert len(deadlines) == 1
    assert num_held(deadlines) <= 100


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_an_idle_hour_after_an_abort_is_no_slow_queue():
    scene = Scene(max_num_seqs=1, max_num_queued_reqs=3, num_blocks=64)
    for name in ("served", "served too", "aborted"):
        scene.add(name, [1], max_tokens=2)
    for _ in range(4):
        scene.step()
        scene.clock.advance(0.1)
    scene.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    scene.finish()
    scene.clock.advance(3600)
    scene.add("runs", [8], max_tokens=60)
    scene.step()
    for name in ("waits", "waits too", "waits as well"):
        scene.add(name, [7])
    with pytest.raises(QueueFullError) as refused:
        scene.add("one too many", [9])
    assert refused.value.retry_after < 5
    scene.finish()


def drain(rate, clock, *, seconds, every, num_requests=1, num_tokens=100, queue_is_empty=False):
    for _ in range(round(seconds / every)):
        clock.now += every
        rate.note(num_tokens, num_requests, queue_is_empty=queue_is_empty)


@pytest.mark.parametrize("every", [0.01, 0.25, 2.0])
@pytest.mark.parametrize("seconds", [4, 100])
def test_at_a_steady_rate_the_wait_is_excess_over_rate(clock, every, seconds):
    rate = DrainRate(clock)
    rate.note(100, 1, queue_is_empty=False)
    drain(rate, clock, seconds=seconds, every=every)
    assert rate.retry_after(round(20 / every), 0) == pytest.approx(20, rel=0.15)
    assert rate.retry_after(0, round(2000 / every)) == pytest.approx(20, rel=0.15)
    assert rate.retry_after(round(10 / every), round(2000 / every)) == pytest.approx(20, rel=0.15)


def test_the_wait_follows_a_change_of_speed(clock):
    rate = DrainRate(clock)
    drain(rate, clock, seconds=100, every=0.1)
    drain(rate, clock, seconds=40, every=1.0)
    assert rate.retry_after(20, 0) == pytest.approx(20, rel=0.2)


def test_a_stall_makes_the_wait_longer(clock):
    rate = DrainRate(clock)
    drain(rate, clock, seconds=20, every=0.1)
    before = rate.retry_after(100, 0)
    clock.now += 20
    assert rate.retry_after(100, 0) > 2 * before
    clock.now += 1e6
    assert MIN_WAIT <= rate.retry_after(100, 0) <= MAX_WAIT


def test_time_without_work_is_not_slowness(clock):
    rate = DrainRate(clock)
    drain(rate, clock, seconds=100, every=0.1)
    rate.note(1, 1, queue_is_empty=True)
    clock.now += 3600
    assert rate.retry_after(200, 0) == pytest.approx(20, rel=0.15)


def test_light_load_does_not_pass_for_speed(clock):
    rate = DrainRate(clock)
    drain(rate, clock, seconds=1000, every=0.1, queue_is_empty=True)
    rate.note(1, 1, queue_is_empty=False)
    drain(rate, clock, seconds=5, every=1.0)
    assert rate.retry_after(20, 0) == pytest.approx(20, rel=0.15)


def test_before_anything_has_left_the_wait_is_what_was_waited(clock):
    rate = DrainRate(clock)
    assert rate.retry_after(5, 5000) == MIN_WAIT
    clock.now += 5
    assert rate.retry_after(5, 5000) == pytest.approx(5)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 10**6), st.integers(0, 50), st.booleans())))
def test_the_wait_is_always_within_its_bounds(notes):
    clock = Clock()
    rate = DrainRate(clock)
    for seconds, num_tokens, num_requests, queue_is_empty in notes:
        clock.now += seconds
        rate.note(num_tokens, num_requests, queue_is_empty=queue_is_empty)
        wait = rate.retry_after(num_requests, num_tokens)
        assert math.isfinite(wait)
        assert MIN_WAIT <= wait <= MAX_WAIT
