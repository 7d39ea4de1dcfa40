"""Requests whose time is up, in every state; and when those that are refused should come back."""

from __future__ import annotations

import pytest
from fake_runner import naive_generation
from scene import Scene

from quire.errors import QueueFullError
from quire.status import FinishReason

START = (
    "the request had not started after 5 s; raise its queue_timeout if it has one of its own, or "
    "SchedulerConfig.queue_timeout"
)
END = (
    "the request had not ended after 5 s; raise its timeout if it has one of its own, or "
    "SchedulerConfig.request_timeout"
)


@pytest.mark.parametrize("by", ["request", "configuration"])
def test_a_request_that_does_not_start_in_time_ends_with_the_reason(by):
    scene = Scene(max_num_seqs=1, queue_timeout=5.0 if by == "configuration" else 0.0)
    own = {"queue_timeout": 5.0} if by == "request" else {}
    scene.add("first", range(4), max_tokens=20)
    scene.step()
    scene.add("late", range(4), client_index=3, **own)
    scene.clock.advance(4)
    scene.step()
    assert scene.reasons == {}
    scene.clock.advance(1)
    scene.step()
    assert scene.errors == {"late": START}
    assert scene.ends["late"].error_type == "RequestTimeoutError"
    assert scene.clients["late"] == 3
    scene.clock.advance(100)
    scene.finish()
    assert scene.reasons["first"] is FinishReason.LENGTH, "it has started in time"
    assert scene.scheduler.make_stats().num_timeouts == 1


@pytest.mark.parametrize("by", ["request", "configuration"])
def test_a_request_that_does_not_end_in_time_ends_with_the_reason_and_keeps_what_it_has(by):
    scene = Scene(request_timeout=5.0 if by == "configuration" else 0.0)
    scene.add("slow", range(4), max_tokens=20, **({"timeout": 5.0} if by == "request" else {}))
    scene.step()
    scene.step()
    scene.clock.advance(5)
    scene.finish()
    assert scene.errors == {"slow": END}
    assert scene.outputs["slow"] == naive_generation(list(range(4)), 2, set())


def test_a_timeout_of_milliseconds_is_told():
    scene = Scene()
    scene.add("slow", range(4), max_tokens=20, timeout=0.01)
    scene.step()
    scene.clock.advance(0.0123)
    scene.finish()
    assert "had not ended after 0.012 s" in scene.errors["slow"]


def test_a_request_may_ask_for_no_timeout():
    scene = Scene(request_timeout=5.0, queue_timeout=5.0)
    scene.add("patient", range(4), timeout=0.0, queue_timeout=0.0)
    scene.clock.advance(100)
    scene.finish()
    assert scene.reasons == {"patient": FinishReason.LENGTH}


def test_time_runs_out_for_preempted_requests_and_with_a_step_in_flight():
    scene = Scene(num_blocks=6, request_timeout=50.0, enable_prefix_caching=False)
    scene.add("old", range(8), max_tokens=12, timeout=0.0)
    scene.add("new", range(20, 28), max_tokens=12)
    while scene.scheduler.get_request_counts() != (1, 1):
        scene.step()
    scene.clock.advance(60)
    scene.finish()
    assert scene.reasons == {"old": FinishReason.LENGTH, "new": FinishReason.ERROR}


def test_the_retry_hint_is_the_excess_over_the_rate_at_which_the_queue_empties():
    scene = Scene(max_num_seqs=1, max_num_queued_reqs=10)
    for number in range(10):
        scene.add(f"r{number}", range(4), max_tokens=1)
    for number in range(10, 200):
        scene.clock.advance(2)
        scene.step()
        scene.add(f"r{number}", range(4), max_tokens=1)
    with pytest.raises(QueueFullError) as refused:
        scene.add("one more", range(4))
    assert refused.value.retry_after == pytest.approx(2, rel=0.2)
