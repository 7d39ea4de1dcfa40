"""Several completions of one prompt: computed once, its blocks shared, and copied where they part."""

from __future__ import annotations

import pytest
from scene import BAD, CLASSES, GatedGrammars, Scene, allowed_by_class

from quire.status import FinishReason, RequestStatus

PROMPT = list(range(10))  # two full blocks of four and a half one


def scene_of_siblings(count: int, prompt=PROMPT, *, max_tokens: int = 5, **settings) -> Scene:
    scene = Scene(**settings)
    for number in range(count):
        leader = "s0" if number else None
        scene.add(f"s{number}", prompt, max_tokens=max_tokens, shares_prompt_with=leader)
    return scene


@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(caching):
    scene = scene_of_siblings(4, enable_prefix_caching=caching)
    assert scene.step() == {"s0": 10}
    plan = scene.plan()
    assert dict(plan.num_scheduled_tokens) == {"s0": 1, "s1": 1, "s2": 1, "s3": 1}
    tables = [new.block_ids[0].tolist() for new in plan.scheduled_new_reqs]
    assert len({tuple(table[:2]) for table in tables}) == 1
    lasts = {table[2] for table in tables}
    assert len(lasts) == 3
    source = scene.runner.tables[scene.runner.slot_of["s0"]][2]
    assert plan.block_copies[:, :, 0].tolist() == [[source, table[2]] for table in tables]
    scene.apply(plan)
    scene.finish()
    scene.check_naive()
    assert scene.cached == {"s0": 0, "s1": 9, "s2": 9, "s3": 9}


def test_a_prompt_that_ends_with_a_block_shares_all_but_the_last_block():
    scene = scene_of_siblings(2, range(8))
    scene.step()
    plan = scene.plan()
    (new,) = plan.scheduled_new_reqs
    assert new.num_computed_tokens == 7
    assert len(plan.block_copies) == 1
    scene.apply(plan)
    scene.finish()
    scene.check_naive()


def test_one_token_beyond_a_block_needs_no_copy():
    scene = scene_of_siblings(2, range(9))
    scene.step()
    plan = scene.plan()
    assert plan.block_copies.tolist() == []
    assert dict(plan.num_scheduled_tokens) == {"s0": 1, "s1": 1}
    scene.apply(plan)
    scene.finish()
    scene.check_naive()


def test_siblings_wait_while_the_prompt_is_computed_in_chunks():
    scene = scene_of_siblings(3, max_num_batched_tokens=4)
    assert [scene.step() for _ in range(3)] == [{"s0": 4}, {"s0": 4}, {"s0": 2}]
    assert set(scene.step()) == {"s0", "s1", "s2"}
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("caching", [True, False])
def test_a_leader_that_has_ended_already_leaves_the_prefix_cache_or_nothing(caching):
    scene = scene_of_siblings(3, max_tokens=1, enable_prefix_caching=caching)
    scene.step()
    assert scene.reasons == {"s0": FinishReason.LENGTH}
    assert scene.step() == ({"s1": 2, "s2": 2} if caching else {"s1": 10, "s2": 10})
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_siblings_go_on_when_their_leader_is_aborted(num_steps, caching):
    scene = scene_of_siblings(3, max_num_batched_tokens=8, enable_prefix_caching=caching)
    for _ in range(num_steps):
        scene.step()
    scene.scheduler.finish_requests("s0", RequestStatus.FINISHED_ABORTED)
    scene.scheduler.check_invariants()
    scene.finish()
    scene.check_naive("s1", "s2")


def test_siblings_go_on_when_their_leader_is_aborted_with_a_step_in_flight():
    scene = scene_of_siblings(2)
    plan = scene.plan()
    scene.scheduler.finish_requests("s0", RequestStatus.FINISHED_ABORTED)
    scene.apply(plan)
    scene.finish()
    scene.check_naive("s1")


def test_siblings_go_on_when_their_leader_fails_in_the_runner():
    scene = scene_of_siblings(2)
    scene.runner.fail.add("s0")
    scene.finish()
    assert scene.reasons == {"s0": FinishReason.ERROR, "s1": FinishReason.LENGTH}
    scene.check_naive("s1")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_siblings_take_nothing_that_a_step_in_flight_computes_of_their_leader(fails, caching):
    """The leader has been preempted behind its first token; what it computes again may come to nothing."""
    scene = Scene(overlap_steps=True, enable_prefix_caching=caching, max_num_batched_tokens=11)
    scene.add("s0", PROMPT)
    scene.step()
    assert scene.scheduler.reset_prefix_cache(True)
    scene.add("s1", PROMPT, shares_prompt_with="s0")
    if fails:
        scene.runner.fail.add("s0")
    first = scene.plan()
    assert dict(first.num_scheduled_tokens) == {"s0": 11}
    second = scene.plan()
    assert dict(second.num_scheduled_tokens) == {"s0": 1, "s1": 10}
    computed = [scene.compute(plan) for plan in (first, second)]
    for plan, of_plan in zip((first, second), computed, strict=True):
        scene.apply(plan, of_plan)
    scene.finish()
    assert scene.reasons["s0"] is (FinishReason.ERROR if fails else FinishReason.LENGTH)
    scene.check_naive("s1", *([] if fails else ["s0"]))


def test_a_sibling_that_is_aborted_while_it_waits_is_forgotten():
    scene = scene_of_siblings(3)
    scene.scheduler.finish_requests("s1", RequestStatus.FINISHED_ABORTED)
    assert scene.scheduler.get_request_counts() == (0, 2)
    scene.finish()
    scene.check_naive("s0", "s2")


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_and_their_leader_survive_preemption(caching):
    scene = scene_of_siblings(3, max_tokens=20, num_blocks=12, enable_prefix_caching=caching)
    scene.finish()
    assert scene.scheduler.make_stats().num_preemptions > 0
    scene.check_naive()


def test_a_sibling_of_a_request_that_is_not_there_computes_its_prompt():
    scene = Scene()
    scene.add("s1", PROMPT, shares_prompt_with="gone")
    assert scene.step() == {"s1": 10}
    scene.finish()
    scene.check_naive()


def test_waiting_siblings_count_as_waiting():
    scene = scene_of_siblings(3, max_num_queued_tokens=35)
    assert scene.scheduler.get_request_counts() == (0, 3)
    assert scene.scheduler.has_request("s2")
    assert {
        request.request_id
        for request in scene.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    } == {"s0", "s1", "s2"}
    assert scene.scheduler.get_num_unfinished_requests() == 0


def test_siblings_with_a_grammar_wait_for_both():
    scene = Scene(grammars=GatedGrammars())
    for number in range(3):
        leader = "s0" if number else None
        scene.add(f"s{number}", PROMPT, shares_prompt_with=leader, structured_outputs=CLASSES)
    scene.finish(max_steps=100_000)
    for number in range(3):
        assert scene.outputs[f"s{number}"] == scene.naive(f"s{number}", allowed_by_class)


def test_siblings_whose_grammar_is_none_all_end_with_the_reason():
    scene = Scene(grammars=GatedGrammars())
    for number in range(3):
        leader = "s0" if number else None
        scene.add(f"s{number}", PROMPT, shares_prompt_with=leader, structured_outputs=BAD)
    scene.finish(max_steps=100_000)
    assert scene.errors == dict.fromkeys(("s0", "s1", "s2"), "the pattern is bad")
