"""What raises or fails may not lose a request, a block or a promise: policies, connectors, steps."""

from __future__ import annotations

import dataclasses

import pytest
from fake_runner import naive_generation
from scene import Scene

from faulty_connector import FaultyConnector
from quire.status import FinishReason, RequestStatus
from quire.step import NO_TOKEN


class Failing(FaultyConnector):
    """Knows nothing of `unsure`, and raises where it is told to."""

    raises_for: str = ""
    raises_at_end_of: str = ""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id == self.raises_for:
            raise RuntimeError("the network is gone")
        if request.request_id == "unsure":
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(self, request, block_ids):
        if request.request_id == self.raises_at_end_of:
            raise RuntimeError("the network is gone")
        return super().request_finished(request, block_ids)


def test_a_connector_that_raises_while_requests_start_loses_neither_requests_nor_blocks():
    connector = Failing(4)
    scene = Scene(connector=connector)
    scene.add("before", range(9), max_tokens=2)
    scene.finish()
    connector.raises_for = "fatal"
    for name, prompt in (("unsure", [1] * 9), ("cached", range(9)), ("fatal", [3] * 9)):
        scene.add(name, prompt)
    with pytest.raises(RuntimeError, match="network"):
        scene.scheduler.schedule()
    scene.scheduler.check_invariants()
    ended = scene.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR)
    assert {request.request_id for request in ended} == {"unsure", "cached", "fatal"}
    connector.raises_for = ""
    scene.add("after", [5] * 9)
    scene.finish()
    assert scene.outputs["after"] == naive_generation([5] * 9, 4, set())


def test_a_connector_that_raises_at_a_requests_end_takes_no_answer_away(caplog):
    connector = Failing(4)
    connector.raises_at_end_of = "b"
    scene = Scene(connector=connector)
    for name, prompt in (("a", range(5)), ("b", range(10, 15)), ("c", range(20, 25))):
        scene.add(name, prompt, max_tokens=2)
    scene.finish()
    assert scene.reasons == dict.fromkeys("abc", FinishReason.LENGTH)
    assert "'b'" in caplog.text


def test_a_pin_holds_what_can_be_found_and_is_not_ended_early_by_another():
    scene = Scene(num_blocks=12, max_num_batched_tokens=64)
    scene.add("first", range(9), max_tokens=1)
    scene.add("same", range(9), max_tokens=1, pin_prefix=1000.0)
    scene.finish_but_pins()
    scene.add("brief", range(9), max_tokens=1, pin_prefix=1.0)
    scene.finish_but_pins()
    scene.clock.advance(5)
    for number in (30, 31):
        scene.add(f"churn {number}", [number] * 30, max_tokens=8)
        scene.finish_but_pins()
    scene.add("later", range(9), max_tokens=1)
    scene.finish_but_pins()
    assert scene.cached["later"] == 8


def test_nobody_starts_on_blocks_that_the_first_waits_for():
    """The first in order lacks a block that a peer still reads; a newcomer would only be preempted for it."""
    connector = FaultyConnector(4, send_steps=1, is_peer_alive=False)
    scene = Scene(num_blocks=6, connector=connector, max_num_seqs=2)
    scene.add("sent", range(12), max_tokens=1)
    while scene.scheduler.has_unfinished_requests():
        scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks
    scene.add("first", range(20, 26), max_tokens=14)
    scene.add("second", range(30, 34), max_tokens=4)
    for _ in range(12):
        scene.step()
    assert scene.scheduler.make_stats().num_preemptions <= 1
    for _ in range(4):  # what ends is sent to the dead peer too
        scene.clock.advance(scene.config.kv_transfer_timeout + 1)
        for _ in range(20):
            scene.step()
    scene.check_nothing_is_held()
    assert scene.outputs["first"] == naive_generation(list(range(20, 26)), 14, set())
    assert scene.outputs["second"] == naive_generation(list(range(30, 34)), 4, set())


def test_a_refused_reset_breaks_no_pin():
    scene = Scene()
    scene.add("pinned", range(9), max_tokens=1, pin_prefix=1000.0)
    scene.finish_but_pins()
    scene.add("running", range(20, 29), max_tokens=4)
    scene.step()
    assert not scene.scheduler.reset_prefix_cache()
    assert scene.scheduler.make_stats().num_leased_blocks == 2
    scene.finish_but_pins()
    assert scene.scheduler.reset_prefix_cache()
    scene.check_nothing_is_held()


# -- runners that return something else ---------------------------------------------------------------------


def without_sample(computed, *request_ids):
    sampled = computed.sampled_token_ids.copy()
    sampled[[computed.request_ids.index(name) for name in request_ids]] = NO_TOKEN
    return dataclasses.replace(computed, sampled_token_ids=sampled)


@pytest.mark.parametrize("step", [0, 1])
def test_a_request_that_gets_no_token_ends_with_the_reason(step):
    scene = Scene()
    scene.add("a", range(5))
    scene.add("b", range(10, 15))
    for _ in range(step):
        scene.step()
    plan = scene.plan()
    scene.apply(plan, without_sample(scene.compute(plan), "a"))
    assert "returned no token" in scene.errors["a"]
    scene.finish()
    scene.check_naive("b")


def test_a_request_that_gets_no_token_while_the_next_step_is_planned_ends_too():
    scene = Scene(overlap_steps=True)
    scene.add("a", range(5))
    first = scene.plan()
    computed = scene.compute(first)
    second = scene.plan()
    also = scene.compute(second)
    scene.apply(first, without_sample(computed, "a"))
    scene.apply(second, also)
    assert "returned no token" in scene.errors["a"]
    scene.finish()


def test_a_search_whose_beam_gets_no_candidates_ends_with_the_reason():
    scene = Scene()
    scene.add("a", range(5), beam_width=2, logprobs=2, n=2, beam_sequence_ids=("a.0", "a.1"))
    plan = scene.plan()
    scene.apply(plan, dataclasses.replace(scene.compute(plan), logprobs={}))
    assert "returned no token" in scene.errors["a.0"]
    assert "returned no token" in scene.errors["a.1"]
    scene.finish()


@pytest.mark.parametrize("fault", ["order", "missing", "rows"])
def test_an_output_of_other_requests_fails_the_step(fault):
    scene = Scene()
    scene.add("a", range(5))
    scene.add("b", range(10, 15))
    plan = scene.plan()
    computed = scene.compute(plan)
    match fault:
        case "order":
            computed = dataclasses.replace(computed, request_ids=["b", "a"])
        case "missing":
            computed = dataclasses.replace(computed, request_ids=["a"])
        case "rows":
            computed = dataclasses.replace(computed, sampled_token_ids=computed.sampled_token_ids[:1])
    scene.apply(plan, computed)
    assert all("another step than was planned" in scene.errors[name] for name in "ab")
    scene.add("after", range(5))
    scene.finish()
    scene.check_naive("after")


def test_an_error_of_a_request_that_has_ended_is_not_that_of_its_namesake():
    scene = Scene(overlap_steps=True)
    scene.add("a", range(5))
    first = scene.plan()
    scene.runner.fail = {"a"}
    computed = scene.compute(first)
    scene.runner.fail = set()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scene.add("a", range(20, 25), beam_width=2, logprobs=2, n=1)
    second = scene.plan()
    assert "a" in second.request_ids
    also = scene.compute(second)
    scene.apply(first, computed)
    scene.apply(second, also)
    scene.finish()
    assert scene.reasons["a"] is FinishReason.LENGTH
