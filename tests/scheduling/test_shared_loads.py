"""Requests that begin with the same tokens wait for one load, and not for what is of little use to them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scene import Scene
from test_transfers import PROMPT, Witness

from quire.status import FinishReason, RequestStatus


@pytest.fixture
def scene(request):
    """A scene whose connector has the KV of `PROMPT`, and whose own cache has nothing."""
    options = getattr(request, "param", {})
    scene = Scene(connector=Witness(4, load_steps=options.pop("load_steps", 3)), num_blocks=40, **options)
    scene.add("before", PROMPT, max_tokens=1)
    scene.finish()
    assert scene.scheduler.reset_prefix_cache()
    scene.connector.allocated.clear()
    return scene


def loaders(scene: Scene) -> list[str]:
    return [request_id for request_id, _, num_tokens in scene.connector.allocated if num_tokens]


def test_of_requests_with_the_same_prompt_one_loads_it(scene):
    for number in range(8):
        scene.add(f"r{number}", PROMPT)
    scene.add("other", range(30, 33))
    assert scene.step() == {"other": 3}
    for number in range(8, 10):
        scene.add(f"r{number}", [*PROMPT, 40 + number])
    scene.finish()
    scene.check_naive()
    assert loaders(scene) == ["r0"]
    assert scene.cached == {"before": 0, "other": 0} | {f"r{number}": 16 for number in range(10)}
    assert scene.scheduler.make_stats().num_loaded_tokens == 16


@pytest.mark.parametrize("scene", [{"overlap_steps": True}], indirect=True)
def test_steps_in_flight_change_nothing(scene):
    for number in range(4):
        scene.add(f"r{number}", PROMPT)
    scene.finish_overlapped()
    scene.check_naive()
    assert loaders(scene) == ["r0"]


def test_blocks_that_have_arrived_are_found_before_their_request_runs(scene):
    scene.connector.never_answer_next_loads(1)
    scene.add("a", PROMPT, max_tokens=1)
    scene.step()
    scene.connector.answer()
    scene.step()
    scene.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    scene.add("b", PROMPT)
    scene.finish()
    assert loaders(scene) == ["a"]
    assert scene.cached["b"] == 16


@pytest.mark.parametrize(("num_same", "waits"), [(7, False), (8, True), (12, True)])
def test_a_request_waits_for_half_of_a_load_or_more(scene, num_same, waits):
    """The load has four blocks, of four tokens each."""
    scene.connector.never_answer_next_loads(1)
    scene.add("a", PROMPT)
    scene.step()
    scene.add("b", [*PROMPT[:num_same], *range(50, 60)])
    scene.step()
    assert bool(scene.requests["b"].awaited_load) is waits
    scene.connector.answer()
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize(
    "fields", [{"salt": "another"}, {"prompt_logprobs": 0}, {"kv_transfer_params": {}}], ids=str
)
def test_a_request_that_cannot_use_these_blocks_or_names_its_own_does_not_wait(scene, fields):
    scene.connector.never_answer_next_loads(1)
    scene.add("a", PROMPT)
    scene.step()
    scene.add("b", PROMPT, **fields)
    scene.step()
    assert scene.requests["b"].awaited_load == 0
    scene.connector.answer()
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("scene", [{"load_steps": 0}], indirect=True)
def test_a_request_whose_own_load_takes_part_in_its_step_does_not_wait(scene):
    scene.add("a", PROMPT)
    scene.add("b", PROMPT)
    assert scene.step() == {"a": 1, "b": 1}
    scene.finish()


@pytest.mark.parametrize("scene", [{"kv_load_failure": "fail"}, {}], indirect=True, ids=["fail", "recompute"])
@pytest.mark.parametrize("num_good_blocks", [0, 2])
def test_after_a_load_that_has_failed_the_others_go_on(scene, num_good_blocks):
    scene.connector.fail_next_loads(1, num_good_blocks=num_good_blocks)
    for number in range(3):
        scene.add(f"r{number}", PROMPT)
    scene.finish()
    fails = scene.config.kv_load_failure == "fail"
    assert scene.reasons["r0"] is (FinishReason.ERROR if fails else FinishReason.LENGTH)
    scene.check_naive("r1", "r2")


def test_a_request_waits_for_one_load_only(scene):
    """Each silent load would take `kv_transfer_timeout`, one after the other."""
    scene.connector.never_answer_next_loads(8)
    for number in range(4):
        scene.add(f"r{number}", PROMPT)
    scene.step()
    assert loaders(scene) == ["r0"]
    scene.clock.advance(scene.config.kv_transfer_timeout + 1)
    scene.step()
    assert loaders(scene) == ["r0", "r1", "r2", "r3"]
    scene.clock.advance(scene.config.kv_transfer_timeout + 1)
    scene.finish()
    scene.check_naive()


def test_the_others_go_on_when_the_request_that_loads_is_aborted(scene):
    scene.connector.never_answer_next_loads(1)
    scene.add("a", PROMPT)
    scene.add("b", PROMPT)
    scene.step()
    assert "KV of its first tokens is on its way" in scene.scheduler.explain("b")
    scene.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert "on its way" not in scene.scheduler.explain("b")
    scene.finish()
    scene.check_naive("b")
    assert loaders(scene) == ["a", "b"]


def test_a_request_that_waits_can_be_aborted_and_time_out(scene):
    scene.connector.never_answer_next_loads(1)
    scene.add("a", PROMPT)
    scene.add("b", PROMPT)
    scene.add("c", PROMPT, queue_timeout=5.0)
    scene.step()
    scene.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    scene.clock.advance(6)
    scene.step()
    assert scene.reasons["c"] is FinishReason.ERROR
    scene.connector.answer()
    scene.finish()
    scene.check_naive("a")


def test_a_reset_while_requests_wait_leaves_nothing_out_of_date(scene):
    scene.connector.never_answer_next_loads(1)
    for number in range(3):
        scene.add(f"r{number}", PROMPT)
    scene.step()
    assert scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    scene.finish()
    scene.check_naive()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 17), st.integers(0, 6), st.integers(0, 4)), min_size=2, max_size=8
    ),
    faults=st.lists(
        st.sampled_from(["fail", "part", "silent", "abort", "late", "step", "step"]), max_size=12
    ),
    num_blocks=st.integers(10, 40),
    load_steps=st.integers(1, 3),
)
def test_whatever_befalls_loads_each_request_has_its_own_tokens(requests, faults, num_blocks, load_steps):
    scene = Scene(connector=Witness(4, load_steps=load_steps), num_blocks=num_blocks)
    scene.add("before", PROMPT, max_tokens=1)
    scene.finish()
    assert scene.scheduler.reset_prefix_cache()
    aborted = set()
    for number, (num_same, num_own, num_steps) in enumerate(requests):
        scene.add(f"r{number}", [*PROMPT[:num_same], *range(50, 50 + num_own)])
        if faults:
            fault = faults.pop()
            if fault == "fail":
                scene.connector.fail_next_loads(1)
            elif fault == "part":
                scene.connector.fail_next_loads(1, num_good_blocks=1)
            elif fault == "silent":
                scene.connector.never_answer_next_loads(1)
            elif fault == "abort":
                aborted.add(f"r{number // 2}")
                scene.scheduler.finish_requests([f"r{number // 2}"], RequestStatus.FINISHED_ABORTED)
            elif fault == "late":
                scene.clock.advance(scene.config.kv_transfer_timeout + 1)
        for _ in range(num_steps):
            scene.step()
    scene.connector.answer()
    scene.finish()
    scene.check_naive(*(scene.requests.keys() - aborted))
