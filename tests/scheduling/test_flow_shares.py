"""What a call with many sequences leaves to others: tokens of each step, slots and blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from scene import Scene

from faulty_connector import FaultyConnector
from quire.scheduling.accounts.flow_shares import MIN_SHARE
from quire.status import FinishReason

LEAST = 2
STEP = LEAST * MIN_SHARE


def scene_with_a_large_flow(count: int, *, max_tokens: int = 12, **settings) -> Scene:
    fields = {"num_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": STEP, **settings}
    scene = Scene(**fields)
    for number in range(count):
        scene.add(f"large{number}", [number, 1, 2], max_tokens=max_tokens, flow="large")
    return scene


def tokens_of_large(step: dict[str, int]) -> int:
    return sum(num_tokens for name, num_tokens in step.items() if name.startswith("large"))


def test_a_flow_has_the_machine_to_itself_when_nobody_else_is_there():
    scene = scene_with_a_large_flow(20)
    steps = [len(scene.step()) for _ in range(8)]
    assert max(steps) == 8
    scene.finish()
    scene.check_naive()


def test_a_large_flow_gets_as_much_of_a_step_as_the_others_or_its_least_share():
    scene = scene_with_a_large_flow(20, max_tokens=30)
    while len(scene.step()) < 7:
        pass
    for number in range(3):
        scene.add(f"small{number}", [number, 5], max_tokens=12)
    seen = Counter()
    while not all(f"small{number}" in scene.reasons for number in range(3)):
        step = scene.step()
        num_small = sum(step.values()) - tokens_of_large(step)
        running = [name for name in step if name.startswith("small")]
        if len(running) == 3 and all(step[name] == 1 for name in running):
            assert tokens_of_large(step) == max(LEAST, num_small)
            seen["shared"] += 1
    assert seen["shared"] > 5
    scene.finish()
    scene.check_naive()


def test_a_newcomer_runs_at_once_though_all_slots_are_taken():
    scene = scene_with_a_large_flow(20, max_tokens=60)
    while len(scene.step()) < 8:
        pass
    scene.add("small", [1, 2, 3], max_tokens=3)
    assert "small" in scene.step()
    assert scene.scheduler.make_stats().num_preemptions == 1
    scene.finish()
    scene.check_naive()


def test_a_newcomer_runs_soon_though_all_blocks_are_taken():
    scene = scene_with_a_large_flow(20, max_tokens=40, num_blocks=24, max_num_seqs=16)
    for _ in range(12):
        scene.step()
    scene.add("small", range(30), max_tokens=3)
    steps = 0
    while "small" not in scene.reasons:
        scene.step()
        steps += 1
    assert steps <= 12
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "longest-prefix"])
def test_neither_a_flow_nor_a_stream_of_others_starves(policy):
    scene = scene_with_a_large_flow(12, max_tokens=6, policy=policy)
    for number in range(120):
        scene.clock.advance(0.01)
        scene.add(f"small{number}", [number, 3], max_tokens=6)
        scene.step()
        if all(f"large{other}" in scene.reasons for other in range(12)):
            break
    else:
        raise AssertionError("the large flow has not ended")
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_who_has_one_sequence_waits_for_at_most_one_of_each_call(policy):
    scene = scene_with_a_large_flow(30, policy=policy, max_num_seqs=1)
    scene.step()
    for name in ("first", "second"):
        scene.add(name, [4], max_tokens=2)
    order = []
    while len(scene.reasons) < 8:
        order += [name for name in scene.step() if name not in order]
    assert order.index("first") < order.index("second") < 4


def test_flows_of_one_sequence_are_served_as_they_come():
    scene = Scene(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=STEP)
    for number in range(10):
        scene.add(f"r{number}", [number], max_tokens=2, flow="" if number % 2 else f"of its own {number}")
    started = []
    while scene.scheduler.has_requests():
        started += [name for name in scene.step() if name not in started]
    assert started == [f"r{number}" for number in range(10)]


def test_a_more_important_large_flow_is_not_held_up_by_less_important_requests():
    scene = Scene(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=STEP, policy="priority")
    for number in range(6):
        scene.add(f"large{number}", [number, 1], max_tokens=20, flow="large", priority=0)
    scene.add("small", [7], max_tokens=20, priority=5)
    most = max(tokens_of_large(scene.step()) for _ in range(12))
    assert most >= 6
    scene.finish()


def test_a_large_beam_search_and_others_end_as_they_should():
    scene = Scene(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=STEP)
    names = tuple(f"beam{number}" for number in range(4))
    scene.add("beam0", [1, 2, 3], max_tokens=6, beam_width=4, n=4, logprobs=5, beam_sequence_ids=names)
    scene.add("small", [4], max_tokens=10)
    scene.finish()
    assert all(scene.reasons[name] is FinishReason.LENGTH for name in (*names, "small"))


def test_those_behind_a_request_whose_kv_may_be_elsewhere_do_not_wait_for_that():
    class Unsure(FaultyConnector):
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            if request.request_id in ("large0", "large2"):
                return None, False
            return super().get_num_new_matched_tokens(request, num_computed_tokens)

    scene = scene_with_a_large_flow(4, connector=Unsure(4))
    assert {name for _ in range(4) for name in scene.step()} == {"large1", "large3"}
