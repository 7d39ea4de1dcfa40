"""Prefixes shared within a step: computed once, and never read by anybody if they were not computed."""

from __future__ import annotations

import dataclasses

import pytest
from scene import Scene

from faulty_connector import FaultyConnector
from preempting import preempt
from quire.status import FinishReason, RequestStatus
from quire.step import ModelRunnerOutput

SHARED = list(range(10))  # two full blocks and two tokens


def burst(count: int = 3, **settings) -> Scene:
    scene = Scene(**{"num_blocks": 64, "max_num_batched_tokens": 64, **settings})
    for number in range(count):
        scene.add(f"r{number}", [*SHARED, 20 + number, 30 + number])
    return scene


def tables(plan) -> dict[str, list[int]]:
    return {new.request_id: new.block_ids[0].tolist() for new in plan.scheduled_new_reqs}


def test_a_burst_of_32_computes_250_shared_tokens_once():
    scene = Scene(
        block_size=16, num_blocks=600, max_model_len=512, max_num_batched_tokens=8192, max_num_seqs=32
    )
    shared = [number % 50 for number in range(250)]
    for number in range(32):
        scene.add(f"r{number}", [*shared, *[number] * 6])
    plan = scene.plan()
    assert plan.num_tokens.tolist() == [256] + [256 - 240] * 31
    first = tables(plan)["r0"][:15]
    assert all(table[:15] == first for table in tables(plan).values())
    scene.apply(plan)
    assert [scene.cached[name] for name in scene.requests] == [0] + [240] * 31
    scene.finish()
    scene.check_naive()


def test_one_may_lean_on_who_leans_on_another():
    scene = Scene(num_blocks=64, max_num_batched_tokens=64)
    branch = [*SHARED[:8], 40, 41, 42, 43]
    scene.add("a", SHARED)
    scene.add("b", [*branch, 44])
    scene.add("c", [*branch, 45])
    assert scene.step() == {"a": 10, "b": 5, "c": 1}
    scene.finish()
    scene.check_naive()


def test_the_last_token_is_computed_even_if_another_fills_its_block():
    scene = Scene(num_blocks=64, max_num_batched_tokens=64)
    for name in "ab":
        scene.add(name, SHARED[:8])
    assert scene.step() == {"a": 8, "b": 4}
    scene.finish()
    scene.check_naive()


def test_a_request_that_goes_on_with_its_prompt_is_leaned_on_too():
    scene = Scene(num_blocks=64, max_num_batched_tokens=16, long_prefill_token_threshold=6)
    scene.add("a", range(20))
    assert scene.step() == {"a": 6}
    scene.add("b", [*range(12), 40])
    assert scene.step() == {"a": 6, "b": 1}, "one block is cached, and two are filled now"
    scene.finish()
    scene.check_naive()


def test_nobody_leans_on_a_block_that_a_step_in_flight_began_to_fill():
    scene = Scene(
        num_blocks=64, max_num_batched_tokens=16, long_prefill_token_threshold=6, overlap_steps=True
    )
    scene.add("a", range(20))
    first = scene.plan()
    computed = scene.compute(first)
    scene.add("b", [*range(12), 40])
    second = scene.plan()
    assert dict(second.num_scheduled_tokens) == {"a": 6, "b": 6}
    also = scene.compute(second)
    scene.apply(first, computed)
    scene.apply(second, also)
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize(
    ("first", "second"),
    [({"salt": "x"}, {"salt": "y"}), ({}, {"salt": "y"}), ({}, {"prompt_logprobs": 0})],
)
def test_what_may_not_share_does_not(first, second):
    scene = Scene(num_blocks=64, max_num_batched_tokens=64)
    scene.add("a", SHARED, **first)
    scene.add("b", SHARED, **second)
    assert scene.step() == {"a": 10, "b": 10}
    scene.finish()


def test_tenants_share_and_so_does_who_asks_for_prompt_logprobs_first():
    scene = Scene(num_blocks=64, max_num_batched_tokens=64)
    scene.add("a", SHARED, tenant="x", prompt_logprobs=0)
    scene.add("b", SHARED, tenant="y")
    assert scene.step() == {"a": 10, "b": 2}
    scene.finish()


def test_nothing_is_shared_without_prefix_caching():
    scene = burst(enable_prefix_caching=False)
    assert scene.step() == {"r0": 12, "r1": 12, "r2": 12}
    scene.finish()


def test_equal_digests_of_other_tokens_share_nothing():
    scene = Scene(num_blocks=64, max_num_batched_tokens=64)
    scene.add("a", range(10))
    scene.add("b", range(20, 30))
    keys = scene.scheduler.accounts.kv._keys
    keys["a"].digest(2)
    keys["b"]._chain[:] = keys["a"]._chain
    assert scene.step() == {"a": 10, "b": 10}
    scene.finish()
    scene.check_naive()


# -- what goes wrong ---------------------------------------------------------------------------------------


def test_who_leans_on_an_aborted_request_goes_on():
    """Its row is computed all the same: the plan is in flight."""
    scene = burst()
    plan = scene.plan()
    scene.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    scene.scheduler.check_invariants()
    scene.apply(plan)
    assert all(len(scene.outputs[name]) == 1 for name in ("r1", "r2"))
    scene.add("later", [*SHARED, 50])
    assert scene.step()["later"] == 3, "what was filled can be found, although who filled it has gone"
    scene.finish()
    scene.check_naive("r1", "r2", "later")


def test_who_leans_on_a_preempted_request_goes_on():
    scene = burst(num_blocks=8, overlap_steps=True)
    first = scene.plan()
    computed = scene.compute(first)
    preempt(scene.scheduler, first.slots[0])
    second = scene.plan()
    also = scene.compute(second)
    scene.apply(first, computed)
    scene.apply(second, also)
    scene.finish()
    scene.check_naive()


def test_who_leans_on_a_failed_request_goes_back():
    scene = Scene(num_blocks=64, max_num_batched_tokens=64)
    branch = [*SHARED[:8], 40, 41, 42, 43]
    scene.add("fails", SHARED)
    scene.add("leans", [*branch, 44])
    scene.add("leans on that", [*branch, 45])
    scene.add("stands alone", range(20, 30))
    scene.runner.fail = {"fails"}
    plan = scene.plan()
    scene.apply(plan)
    scene.runner.fail = set()
    assert scene.reasons == {"fails": FinishReason.ERROR}
    assert {name for name, tokens in scene.outputs.items() if tokens} == {"stands alone"}
    assert scene.step() == {"stands alone": 1, "leans": 13, "leans on that": 1}
    scene.finish()
    scene.check_naive("leans", "leans on that", "stands alone")


def test_who_leans_on_a_request_that_failed_after_it_was_aborted_goes_back():
    scene = burst()
    scene.runner.fail = {"r0"}
    plan = scene.plan()
    computed = scene.compute(plan)
    scene.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    scene.runner.fail = set()
    scene.apply(plan, computed)
    assert not scene.outputs["r1"]
    assert not scene.outputs["r2"]
    scene.finish()
    scene.check_naive("r1", "r2")


def test_a_lost_plan_takes_all_who_leaned_back():
    scene = burst()
    scene.plan()
    assert scene.step() == {"r0": 12, "r1": 4, "r2": 4}, "the first to be served fills the blocks again"
    assert scene.scheduler.make_stats().num_preemptions == 3
    scene.finish()
    scene.check_naive()


def test_a_step_that_fails_leaves_nothing_to_be_found():
    scene = burst()
    plan = scene.plan()
    failed = dataclasses.replace(ModelRunnerOutput.failed(plan, ""), errors={"r0": "broken"})
    scene.apply(plan, failed)
    assert scene.step() == {"r1": 12, "r2": 4}
    scene.finish()
    scene.check_naive("r1", "r2")


# -- with others -------------------------------------------------------------------------------------------


def test_what_a_connector_has_is_loaded_rather_than_leaned_on():
    connector = FaultyConnector(4, load_steps=0)
    scene = Scene(num_blocks=64, max_num_batched_tokens=64, connector=connector)
    scene.add("before", SHARED, max_tokens=1)
    scene.finish()
    scene.scheduler.reset_prefix_cache()
    for name in "ab":
        scene.add(name, [*SHARED, 20, 21, 22])
    assert scene.step() == {"a": 5, "b": 5}
    scene.finish()
    scene.check_naive()


def test_a_connector_keeps_what_was_shared_within_a_step():
    connector = FaultyConnector(4, load_steps=0)
    scene = burst(connector=connector)
    scene.finish()
    scene.scheduler.reset_prefix_cache()
    for number in range(3):
        scene.add(f"again {number}", [*SHARED, 20 + number, 30 + number, 1])
    assert scene.step() == dict.fromkeys(["again 0", "again 1", "again 2"], 1)
    scene.finish()
    scene.check_naive()


def test_events_name_each_shared_block_once():
    stored = []

    class Events:
        def stored(self, block_id, key):
            stored.append(block_id)

        def removed(self, block_id, key):
            raise AssertionError(f"block {block_id} is removed")

    scene = burst(kv_events=Events())
    scene.step()
    assert len(stored) == len(set(stored)) == 2 + 3
    scene.finish()


def test_beam_searches_share_within_a_step_too():
    scene = Scene(num_blocks=64, max_num_batched_tokens=64)
    search = {"beam_width": 2, "logprobs": 2, "n": 1}
    scene.add("alone", SHARED, **search)
    scene.finish()
    scene.scheduler.reset_prefix_cache()
    for name in "ab":
        scene.add(name, SHARED, **search)
    plan = scene.plan()
    assert (plan.num_scheduled_tokens["a"], plan.num_scheduled_tokens["b"]) == (10, 2)
    scene.apply(plan)
    scene.finish()
    assert scene.outputs["a"] == scene.outputs["b"] == scene.outputs["alone"]
