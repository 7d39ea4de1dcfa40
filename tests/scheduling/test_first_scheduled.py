"""When requests first ran, as their first outputs tell."""

from __future__ import annotations

import pytest
from scene import Scene


def test_it_is_the_time_of_the_step_that_admits_a_request():
    scene = Scene(max_num_seqs=1)
    start = scene.clock()
    scene.add("first", range(4), max_tokens=3)
    scene.add("second", range(4, 8), max_tokens=2)
    scene.clock.advance(2)
    while scene.scheduler.has_requests():
        scene.step()
        scene.clock.advance(1)
    assert scene.ends["first"].first_scheduled_time == start + 2
    assert scene.ends["second"].first_scheduled_time == start + 5


def test_a_preempted_request_keeps_the_time_of_its_first_admission():
    scene = Scene(num_blocks=6, max_num_seqs=2)
    start = scene.clock()
    for name in ("a", "b"):
        scene.add(name, range(4), max_tokens=16)
    while scene.scheduler.has_requests():
        scene.step()
        scene.clock.advance(1)
    assert scene.scheduler.make_stats().num_preemptions
    assert scene.ends["a"].first_scheduled_time == scene.ends["b"].first_scheduled_time == start


@pytest.mark.parametrize("by", ["a beam search", "a prompt in chunks"])
def test_it_comes_with_the_first_output_however_late_that_is(by):
    scene = Scene(max_num_batched_tokens=4)
    start = scene.clock()
    beams = {"beam_width": 2, "logprobs": 4, "beam_sequence_ids": ("x",)} if by == "a beam search" else {}
    scene.add("x", range(9), max_tokens=3, **beams)
    scene.clock.advance(1)
    while scene.scheduler.has_requests():
        scene.step()
        scene.clock.advance(1)
    assert scene.ends["x"].first_scheduled_time == start + 1
