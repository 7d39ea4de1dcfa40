"""Drafts through the one rule: verified, counted, cut off, dropped; the output is that without any."""

from __future__ import annotations

import numpy as np
import pytest
from fake_runner import VOCAB, naive_generation
from scene import CLASSES, GatedGrammars, Scene, allowed_by_class, drafts_wanted

from quire.scheduling.phases.drafting import Drafting
from quire.step import DraftTokenIds

PROMPT = list(range(6))


def right(count: int, prompt=PROMPT) -> list[int]:
    """The tokens that really follow."""
    return naive_generation(prompt, count, set())


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def started(**settings) -> Scene:
    """A scene with one request that has its first token."""
    max_tokens = settings.pop("max_tokens", 12)
    scene = Scene(**settings)
    scene.add("a", PROMPT, max_tokens=max_tokens)
    scene.step()
    return scene


def propose(scene: Scene, drafts: list[int], request_id: str = "a") -> None:
    scene.scheduler.update_draft_token_ids(DraftTokenIds([request_id], [drafts]))


def test_right_drafts_all_become_output_and_one_token_more():
    scene = started()
    propose(scene, right(4)[1:])
    plan = scene.plan()
    assert plan.scheduled_spec_decode_tokens == {"a": right(4)[1:]}
    assert dict(plan.num_scheduled_tokens) == {"a": 4}
    scene.apply(plan)
    assert scene.outputs["a"] == right(5)
    stats = scene.scheduler.make_stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 3)
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_a_wrong_draft_and_all_behind_it_cost_nothing_but_their_computation(num_right):
    scene = started()
    drafts = right(5)[1:]
    drafts[num_right] = wrong(drafts[num_right])
    propose(scene, drafts)
    scene.step()
    assert scene.outputs["a"] == right(2 + num_right)
    assert scene.step() == {"a": 1}, "computed again from behind the last right token"
    scene.finish()
    scene.check_naive()
    stats = scene.scheduler.make_stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (4, num_right)


def test_no_more_drafts_than_may_become_output():
    scene = started(max_tokens=4)
    propose(scene, right(12)[1:])
    assert scene.step() == {"a": 3}, "the last known token and two drafts; verifying them gives the last one"
    assert scene.outputs["a"] == right(4)
    scene.finish()


def test_no_more_drafts_than_the_longest_sequence_allows():
    scene = started(max_model_len=9, max_tokens=50)
    propose(scene, right(12)[1:])
    assert scene.step() == {"a": 2}
    assert scene.outputs["a"] == right(3)


def test_a_stop_token_among_the_drafts_ends_the_request():
    stop = right(3)[2]
    scene = Scene()
    scene.add("a", PROMPT, max_tokens=12, stop_token_ids=(stop,))
    scene.step()
    propose(scene, right(6)[1:])
    scene.step()
    assert scene.outputs["a"] == right(3)
    assert scene.ends["a"].stop_reason == stop
    scene.finish()


def test_drafts_beyond_the_budget_are_not_verified():
    scene = started(max_num_batched_tokens=3)
    scene.add("b", [7], max_tokens=1)
    propose(scene, right(8)[1:])
    assert scene.step() == {"a": 3}, "running requests go first"
    scene.finish()
    scene.check_naive()


def test_drafts_are_dropped_before_anybody_is_preempted_for_them():
    scene = Scene(num_blocks=4, enable_prefix_caching=False)
    scene.add("a", PROMPT, max_tokens=10)
    scene.add("b", range(20, 26), max_tokens=2)
    scene.step()
    propose(scene, right(8)[1:])
    assert scene.step() == {"a": 1, "b": 1}
    scene.finish()
    scene.check_naive()
    assert scene.scheduler.make_stats().num_preemptions == 0


def test_the_newest_proposal_counts_and_none_takes_it_back():
    scene = started()
    propose(scene, [1, 2, 3])
    propose(scene, right(3)[1:])
    assert scene.plan().scheduled_spec_decode_tokens == {"a": right(3)[1:]}
    scene = started()
    propose(scene, right(3)[1:])
    propose(scene, [])
    assert scene.step() == {"a": 1}


def test_proposals_for_nobody_are_passed_over():
    scene = started()
    scene.scheduler.update_draft_token_ids(DraftTokenIds([], []))
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["stranger"], [[1, 2]]))
    scene.add("waiting", [3])
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["waiting", "a"], [[5], right(2)[1:]]))
    assert scene.step() == {"a": 2, "waiting": 1}
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_drafts_are_replaced_in_a_plan_by_as_many_or_fewer(kept):
    scene = started()
    propose(scene, [wrong(token) for token in right(4)[1:]])
    plan = scene.plan()
    given = DraftTokenIds(["a"], [right(9)[1 : 1 + kept] if kept < 3 else right(9)[1:]])
    scene.scheduler.update_draft_token_ids_in_output(given, plan)
    assert dict(plan.num_scheduled_tokens) == {"a": 1 + kept}
    assert plan.scheduled_spec_decode_tokens == ({"a": right(1 + kept)[1:]} if kept else {})
    scene.scheduler.check_invariants()
    scene.apply(plan)
    assert scene.outputs["a"] == right(2 + kept)
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("padding", [[-1], [-1, -1], [-1, 7]])
@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_what_stands_behind_padding_is_no_draft(num_kept, padding):
    drafts = [*right(9)[1 : 1 + num_kept], *padding]
    scene = started()
    propose(scene, [wrong(token) for token in right(5)[1:]])
    plan = scene.plan()
    scene.scheduler.update_draft_token_ids_in_output(DraftTokenIds(["a"], [drafts]), plan)
    assert dict(plan.num_scheduled_tokens) == {"a": 1 + num_kept}
    scene.apply(plan)
    assert scene.outputs["a"] == right(2 + num_kept)
    scene.finish()
    scene.check_naive()
    scene = started()
    propose(scene, drafts)
    assert scene.step() == {"a": 1 + num_kept}
    scene.finish()
    scene.check_naive()


def test_a_request_in_the_middle_of_its_prompt_takes_no_drafts():
    scene = Scene(max_num_batched_tokens=4)
    scene.add("a", PROMPT)
    scene.step()
    propose(scene, right(2))
    assert scene.step() == {"a": 2}
    scene.finish()
    scene.check_naive()


def test_a_request_left_out_of_the_replacement_has_no_drafts():
    scene = started()
    propose(scene, right(3)[1:])
    plan = scene.plan()
    scene.scheduler.update_draft_token_ids_in_output(DraftTokenIds([], []), plan)
    assert dict(plan.num_scheduled_tokens) == {"a": 1}
    scene.apply(plan)
    scene.finish()
    scene.check_naive()


def test_only_the_newest_plan_can_be_changed():
    scene = started()
    old = scene.plan()
    scene.apply(old)
    with pytest.raises(ValueError, match="not the newest step in flight"):
        scene.scheduler.update_draft_token_ids_in_output(DraftTokenIds(["a"], [[1]]), old)


def test_what_a_grammar_does_not_allow_is_cut_off():
    scene = Scene(grammars=GatedGrammars())
    scene.add("a", PROMPT, max_tokens=8, structured_outputs=CLASSES)
    while "a" not in scene.runner.tokens:
        scene.step()
    expected = scene.naive("a", allowed_by_class)
    propose(scene, [*expected[1:3], wrong(expected[3]), expected[4]])
    plan = scene.plan()
    assert plan.scheduled_spec_decode_tokens == {"a": expected[1:3]}
    in_output = DraftTokenIds(["a"], [[expected[1], wrong(expected[2])]])
    scene.scheduler.update_draft_token_ids_in_output(in_output, plan)
    assert plan.scheduled_spec_decode_tokens == {"a": expected[1:2]}
    scene.apply(plan)
    scene.finish()
    assert scene.outputs["a"] == expected


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_blocks", [8, 40])
def test_a_runner_that_proposes_changes_no_token(accuracy, num_blocks):
    scene = Scene(num_blocks=num_blocks, draft_length=lambda num_running: 4, draft_accuracy=accuracy)
    for number in range(4):
        scene.add(f"r{number}", range(10 * number, 10 * number + 9), max_tokens=15)
    scene.finish()
    scene.check_naive()
    stats = scene.scheduler.make_stats()
    assert stats.num_draft_tokens > 0
    assert (stats.num_preemptions > 0) == (num_blocks == 8)
    if accuracy == 1.0:
        assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_no_drafts_are_asked_for_while_there_would_be_none():
    scene = Scene(draft_length=lambda num_running: 4)
    scene.runner.share_of_pauses = 0.0
    scene.add("a", PROMPT, max_tokens=30)
    wanted = []
    for number in range(12):
        plan = scene.plan()
        wanted.append(list(drafts_wanted(plan).values()))
        if number in (1, 6):
            scene.runner.pauses["a"] = 1 + 3  # this step is one of them
        scene.apply(plan)
        if number == 7:
            scene.add("b", PROMPT, max_tokens=2)
    assert wanted == [[4], [4], [0], [0], [0], [4], [4], [0], [0, 4], [0, 4], [4], [4]]
    scene.finish()
    scene.check_naive()


def test_a_pause_counts_the_steps_that_a_request_samples_in():
    scene = Scene(draft_length=lambda num_running: 4, max_num_batched_tokens=8)
    scene.runner.share_of_pauses = 0.0
    scene.add("a", PROMPT, max_tokens=30)
    scene.step()
    running = scene.scheduler.accounts.running
    [slot] = running.in_order()
    drafting = Drafting(lambda num_running: 4 * (num_running == 1), running)
    slots = np.array([slot])
    drafting.pause(slots, np.array([2], np.int32))
    yes, no = np.array([True]), np.array([False])
    assert [drafting.wanted(slots, samples) for samples in (no, yes, no, yes)] == [None] * 4
    assert drafting.wanted(slots, no) is None
    assert drafting.wanted(slots, yes).tolist() == [4]
    running.num_pending[slot] = 1  # in a step that was begun before the pause was known
    drafting.pause(slots, np.array([2], np.int32))
    assert drafting.wanted(slots, yes) is None
    assert drafting.wanted(slots, yes).tolist() == [4]
    running.num_pending[slot] = 0


def test_drafts_given_later_may_come_with_a_pause():
    scene = started(draft_length=lambda num_running: 4)
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["a", "stranger"], [[], [1]], [2, 1]))
    wanted = []
    for _ in range(3):
        plan = scene.plan()
        wanted.append(drafts_wanted(plan)["a"])
        scene.apply(plan)
    assert wanted == [0, 0, 4]


def test_a_pause_ends_with_its_request():
    scene = Scene(draft_length=lambda num_running: 4, max_num_seqs=1)
    scene.runner.share_of_pauses, scene.runner.pauses = 0.0, {"a": 9}
    scene.add("a", PROMPT, max_tokens=2)
    scene.add("b", PROMPT)
    wanted = []
    while scene.scheduler.has_requests():
        plan = scene.plan()
        wanted.append(drafts_wanted(plan))
        scene.apply(plan)
    assert wanted[:3] == [{"a": 4}, {"a": 0}, {"b": 4}]


def test_the_number_of_drafts_wanted_follows_the_number_of_running_requests():
    scene = Scene(draft_length=lambda num_running: 5 - num_running)
    scene.runner.share_of_pauses = 0.0
    scene.add("a", PROMPT)
    plan = scene.plan()
    assert drafts_wanted(plan) == {"a": 4}
    scene.apply(plan)
    scene.add("b", [1])
    assert drafts_wanted(scene.plan()) == {"a": 3, "b": 3}
