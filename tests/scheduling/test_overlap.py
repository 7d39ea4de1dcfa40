"""The next step planned while one runs: the same tokens, and no more waste than cannot be avoided."""

from __future__ import annotations

import pytest
from fake_runner import naive_generation
from hypothesis import given, settings
from hypothesis import strategies as st
from scene import CLASSES, GatedGrammars, Scene, allowed_by_class, drafts_wanted

from memory_connector import MemoryConnector
from quire.status import FinishReason, RequestStatus
from quire.step import DraftTokenIds
from unmutated import UNMUTATED


def overlapped(**settings) -> Scene:
    return Scene(overlap_steps=True, **settings)


def test_a_step_is_planned_before_the_last_ones_tokens_are_known():
    scene = overlapped()
    scene.add("a", range(6), max_tokens=5)
    first = scene.plan()
    second = scene.plan()
    assert second.num_computed_tokens.tolist() == [6]
    assert second.num_known_tokens.tolist() == [7]
    assert dict(second.num_scheduled_tokens) == {"a": 1}
    computed = scene.compute(first)
    scene.apply(first, computed)
    scene.apply(second)
    assert scene.outputs["a"] == naive_generation(list(range(6)), 2, set())


def test_the_last_token_is_known_to_be_the_last_without_waiting():
    scene = overlapped()
    scene.add("a", range(6), max_tokens=1)
    first = scene.plan()
    assert scene.plan().request_ids == []
    scene.apply(first)
    assert scene.reasons["a"] is FinishReason.LENGTH


def test_a_stop_token_wastes_one_row_of_the_step_behind_it():
    prompt = list(range(6))
    stop = naive_generation(prompt, 3, set())[2]
    scene = overlapped()
    scene.add("a", prompt, max_tokens=10, stop_token_ids=(stop,))
    scene.finish_overlapped()
    scene.check_naive()
    assert scene.scheduler.make_stats().num_scheduled_tokens == 6 + 2 + 1


def test_only_as_many_steps_are_in_flight_as_the_configuration_says():
    scene = overlapped()
    scene.add("a", range(6), max_tokens=5)
    scene.plan()
    scene.plan()
    third = scene.plan()
    assert third.num_computed_tokens.tolist() == [0], "the others are taken for lost"


@pytest.mark.parametrize("which", ["both", "first"])
def test_an_abort_with_two_steps_in_flight(which):
    scene = overlapped(max_num_seqs=1)
    scene.add("a", range(6), max_tokens=8)
    first = scene.plan()
    second = scene.plan()
    if which == "first":
        scene.apply(first)
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scene.scheduler.get_kv_cache_usage() == 0
    scene.scheduler.check_invariants()
    scene.add("b", range(30, 36), max_tokens=3)
    third = scene.plan() if which == "first" else None
    if third is not None:
        assert third.request_ids == [], "the slot is fenced until the steps that name it have landed"
    if which == "both":
        scene.apply(first)
    scene.apply(second)
    if third is not None:
        scene.apply(third)
    scene.finish_overlapped()
    scene.check_naive("b")
    assert scene.outputs["a"] == scene.naive("a")[: len(scene.outputs["a"])]


def test_the_same_id_again_while_steps_of_its_predecessor_are_in_flight():
    scene = overlapped()
    scene.add("a", range(6), max_tokens=8)
    first, second = scene.plan(), scene.plan()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scene.add("a", range(30, 36), max_tokens=3)
    scene.apply(first)
    scene.apply(second)
    scene.finish_overlapped()
    scene.check_naive()


def test_a_preemption_with_a_step_in_flight_voids_the_token_on_its_way():
    scene = overlapped(num_blocks=6, max_num_seqs=2, enable_prefix_caching=False)
    scene.add("old", range(8), max_tokens=12)
    scene.add("new", range(20, 28), max_tokens=12)
    scene.finish_overlapped()
    assert scene.scheduler.make_stats().num_preemptions > 0
    scene.check_naive()


def test_a_grammar_sees_each_token_before_the_next_is_chosen():
    scene = overlapped(grammars=GatedGrammars())
    scene.add("a", range(6), max_tokens=6, structured_outputs=CLASSES)
    scene.add("b", range(9), max_tokens=12)
    scene.finish_overlapped(max_steps=100_000)
    assert scene.outputs["a"] == scene.naive("a", allowed_by_class)
    scene.check_naive("b")


def test_a_request_with_a_grammar_is_in_each_step():
    scene = overlapped(grammars=GatedGrammars())
    scene.add("a", range(6), max_tokens=6, structured_outputs=CLASSES)
    plan = scene.plan()
    while not plan.request_ids:  # its grammar is being compiled
        scene.apply(plan)
        plan = scene.plan()
    assert not plan.pending_structured_output_tokens
    for _ in range(4):
        following = scene.plan()
        assert following.request_ids == ["a"]
        assert following.pending_structured_output_tokens
        scene.apply(plan)
        plan = following


@pytest.mark.parametrize("accuracy", [0.3, 1.0])
@pytest.mark.parametrize("late", [False, True])
def test_drafts_follow_tokens_that_are_known(accuracy, late):
    scene = overlapped(num_blocks=40, draft_length=lambda num_running: 3, draft_accuracy=accuracy)
    scene.add("a", range(8), max_tokens=20)
    scene.add("b", range(30, 37), max_tokens=20)
    scene.finish_overlapped(late_drafts=late)
    scene.check_naive()
    stats = scene.scheduler.make_stats()
    assert stats.num_draft_tokens > 0
    if accuracy == 1.0:
        assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_drafts_for_a_place_that_a_step_in_flight_computes_are_passed_over():
    scene = overlapped(num_blocks=40)
    scene.add("a", range(8), max_tokens=12)
    in_flight = [scene.plan()]
    for _ in range(8):
        in_flight.append(scene.plan())
        assert not in_flight[-1].draft_token_ids.size
        scene.apply(in_flight.pop(0))
        scene.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3]]))
    scene.apply(in_flight.pop())
    scene.finish_overlapped()
    scene.check_naive()


def test_drafts_that_begin_and_end_with_the_load():
    scene = overlapped(num_blocks=60, draft_length=lambda num_running: 3 * (num_running < 3))
    for number in range(4):
        scene.add(f"r{number}", range(10 * number, 10 * number + 5), max_tokens=4 + 5 * number)
    scene.finish_overlapped()
    scene.check_naive()


def test_who_gets_no_drafts_after_a_step_is_in_the_next_one():
    scene = overlapped(num_blocks=60, draft_length=lambda num_running: 3 * (num_running < 2))
    scene.add("a", range(8), max_tokens=12)
    scene.add("b", range(30, 37), max_tokens=12)
    first, second = scene.plan(), scene.plan()
    assert drafts_wanted(first) == drafts_wanted(second) == {"a": 0, "b": 0}
    scene.apply(first)
    scene.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    third = scene.plan()
    assert drafts_wanted(third) == {"a": 3}, "no drafts come of the second"
    scene.apply(second)
    assert scene.plan().request_ids == [], "drafts come of the third"


def test_steps_that_no_drafts_follow_for_a_while_overlap():
    scene = overlapped(num_blocks=60, draft_length=lambda num_running: 3)
    scene.runner.share_of_pauses = 1.0
    scene.add("a", range(8), max_tokens=40)
    plans = [scene.plan(), scene.plan()]
    num_overlapped = 0
    while scene.scheduler.has_unfinished_requests():
        scene.apply(plans.pop(0))
        plans.append(scene.plan())
        num_overlapped += all(plan.request_ids for plan in plans)
    for plan in plans:
        scene.apply(plan)
    assert num_overlapped > 10
    scene.check_naive()


def test_only_those_who_may_have_drafts_wait_for_their_tokens():
    scene = overlapped(num_blocks=60, draft_length=lambda num_running: 3, draft_accuracy=1.0)
    scene.runner.share_of_pauses = 0.0
    for number, name in enumerate("abc"):
        scene.add(name, range(10 * number, 10 * number + 4), max_tokens=24)
    first, second = scene.plan(), scene.plan()
    assert (first.request_ids, second.request_ids) == (["a", "b", "c"], [])
    scene.runner.pauses = {"b": 30, "c": 30}
    scene.apply(first)
    scene.apply(second)
    plans = [scene.plan()]
    for number in range(8):
        plans.append(scene.plan())
        both = [plan.request_ids for plan in plans]
        assert both == ([["a", "b", "c"], ["b", "c"]] if number % 2 == 0 else [["b", "c"], ["a", "b", "c"]])
        plan = plans.pop(0)
        assert drafts_wanted(plan) == {name: 3 * (name == "a") for name in plan.request_ids}
        scene.apply(plan)
    stats = scene.scheduler.make_stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    for plan in plans:
        scene.apply(plan)
    scene.finish_overlapped()
    scene.check_naive()


def test_those_who_wait_do_so_in_the_same_steps():
    scene = overlapped(num_blocks=60, draft_length=lambda num_running: 3)
    scene.add("a", range(4), max_tokens=24)
    scene.add("b", range(20, 24), max_tokens=24)
    scene.add("c", range(30, 34), max_tokens=24)
    first, second = scene.plan(), scene.plan()
    scene.runner.share_of_pauses, scene.runner.pauses = 0.0, {"b": 2, "c": 30}
    scene.apply(first)
    scene.apply(second)
    first, second = scene.plan(), scene.plan()
    assert [drafts_wanted(plan) for plan in (first, second)] == [{"a": 3, "b": 0, "c": 0}, {"c": 0}]
    scene.apply(first)
    third = scene.plan()
    assert drafts_wanted(third) == {"a": 3, "b": 3, "c": 0}
    scene.add("d", range(40, 44), max_tokens=24)
    scene.apply(second)
    fourth = scene.plan()
    assert drafts_wanted(fourth) == {"c": 0, "d": 0}, "a prompt is not held back"
    scene.apply(third)
    assert drafts_wanted(scene.plan()) == {"a": 3, "b": 3, "c": 0, "d": 3}


def test_beams_wait_for_their_tokens():
    names = ("b", "b1", "b2")
    outcomes = []
    for overlap in (False, True):
        scene = Scene(overlap_steps=overlap, num_blocks=40)
        scene.add("b", range(9), max_tokens=8, beam_width=3, n=3, logprobs=3, beam_sequence_ids=names)
        scene.add("a", range(5), max_tokens=12)
        scene.finish_overlapped() if overlap else scene.finish()
        scene.check_naive("a")
        outcomes.append([scene.outputs[name] for name in names])
    assert outcomes[0] == outcomes[1]


@settings(max_examples=36, backend=UNMUTATED)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=6,
    ),
    num_blocks=st.integers(8, 30),
    budget=st.sampled_from([3, 8, 64]),
    caching=st.booleans(),
    load_steps=st.sampled_from([None, 0, 2]),
    drafts=st.sampled_from([None, "with the step", "later"]),
)
def test_overlapped_outputs_are_those_without(requests, num_blocks, budget, caching, load_steps, drafts):
    connector = None if load_steps is None else MemoryConnector(4, load_steps=load_steps)
    scene = overlapped(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        connector=connector,
        draft_length=(lambda num_running: 2 if num_running < 3 else 0) if drafts else None,
    )
    for number, (num_prompt, max_tokens, stops, start) in enumerate(requests):
        stop_token_ids = (3, 11, 19) if stops else ()
        prompt = range(start, start + num_prompt)
        scene.add(f"r{number}", prompt, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
    scene.finish_overlapped(late_drafts=drafts == "later")
    scene.check_naive()
