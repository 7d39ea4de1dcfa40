"""Beam search over shared blocks, against a search that copies everything and knows no blocks."""

from __future__ import annotations

import pytest
from fake_runner import VOCAB, scores
from hypothesis import given, settings
from hypothesis import strategies as st
from scene import Scene

from quire.errors import InvalidRequestError
from quire.status import FinishReason, RequestStatus
from unmutated import UNMUTATED

PROMPT = list(range(20, 29))  # two full blocks of four and a token
NAMES = ("b", "b:1", "b:2", "b:3", "b:4")


def naive_beam_search(prompt, *, width, n, max_tokens, stops=frozenset(), penalty=1.0, criteria="heuristic"):
    """The n best (tokens, cumulative log-probability), by the scoring of `quire.scheduling.beam_search`."""
    beams, finished = [([], 0.0)], []
    for length in range(1, max_tokens + 1):
        ranked = sorted(
            (
                ([*tokens, token], total + float(logprob))
                for tokens, total in beams
                for token, logprob in enumerate(scores(prompt + tokens))
            ),
            key=lambda one: -one[1],
        )
        best, is_last = ranked[:width], length == max_tokens
        finished += [(total / length**penalty, tokens, total) for tokens, total in best
                     if is_last or tokens[-1] in stops]  # fmt: skip
        finished = sorted(finished, key=lambda one: -one[0])[:width]
        beams = [one for one in ranked if one[0][-1] not in stops][:width]
        if is_last or (len(finished) == width and criteria == "early"):
            break
        reach = max_tokens if criteria == "never" and penalty > 0 else length
        if len(finished) == width and finished[-1][0] >= beams[0][1] / reach**penalty:
            break
    return [(tokens, pytest.approx(total, abs=1e-4)) for _, tokens, total in finished[:n]]


def add_search(scene: Scene, *, width=3, n=None, max_tokens=8, prompt=PROMPT, names=NAMES, **params):
    n = width if n is None else n
    stops = params.get("stop_token_ids", ())
    scene.add(
        names[0],
        prompt,
        max_tokens=max_tokens,
        beam_width=width,
        n=n,
        logprobs=width + len(stops),
        beam_sequence_ids=names[:n],
        **params,
    )


def found(scene: Scene, n: int = 3, names=NAMES):
    return [(scene.outputs[name], scene.ends[name].cumulative_logprob) for name in names[:n]]


@settings(max_examples=36, backend=UNMUTATED)
@given(
    num_prompt=st.integers(1, 13),
    width=st.integers(2, 5),
    n=st.integers(1, 5),
    max_tokens=st.integers(1, 10),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=8),
    penalty=st.sampled_from([0.0, 1.0, 2.0]),
    criteria=st.sampled_from(["early", "heuristic", "never"]),
    caching=st.booleans(),
    budget=st.sampled_from([5, 64]),
)
def test_equals_a_naive_search(num_prompt, width, n, max_tokens, stops, penalty, criteria, caching, budget):
    n, prompt = min(n, width), list(range(num_prompt))
    scene = Scene(num_blocks=40, enable_prefix_caching=caching, max_num_batched_tokens=budget)
    choice = {"length_penalty": penalty, "stop_criteria": criteria}
    ids = tuple(stops)
    add_search(scene, width=width, n=n, max_tokens=max_tokens, prompt=prompt, stop_token_ids=ids, **choice)
    scene.finish()
    expected = naive_beam_search(
        prompt, width=width, n=n, max_tokens=max_tokens, stops=stops, penalty=penalty, criteria=criteria
    )
    assert found(scene, n) == expected
    for name in NAMES[:n]:
        is_stop = scene.outputs[name][-1] in stops
        assert scene.reasons[name] is (FinishReason.STOP if is_stop else FinishReason.LENGTH)


def test_beams_share_the_blocks_of_what_they_have_in_common():
    scene = Scene(num_blocks=40)
    add_search(scene, width=3)
    scene.step()
    scene.step()
    tables = [table for slot, table in scene.runner.tables.items()]
    assert len(tables) == 3
    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}
    assert scene.scheduler.get_kv_cache_usage() == pytest.approx((2 + 3) / 40)
    scene.finish()


def test_a_fork_in_mid_block_copies_it_and_one_at_a_block_end_copies_nothing():
    for num_prompt, num_copies in ((9, 2), (8, 0)):
        scene = Scene(num_blocks=40)
        add_search(scene, prompt=PROMPT[:num_prompt])
        scene.step()
        plan = scene.plan()
        assert len(plan.forks) == 2
        assert len(plan.block_copies) == num_copies
        assert len(plan.chosen_tokens.slots) == 3
        scene.apply(plan)
        scene.finish()


def test_a_search_counts_as_one_request_and_ends_as_one():
    scene = Scene(num_blocks=40)
    add_search(scene)
    scene.step()
    scene.step()
    assert scene.scheduler.get_request_counts() == (1, 0)
    (request,) = scene.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert request.request_id == "b"
    scene.scheduler.check_invariants()
    assert scene.scheduler.get_kv_cache_usage() == 0
    scene.finish()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_abort_with_a_step_in_flight_leaves_nothing(num_steps):
    scene = Scene(num_blocks=40, max_num_seqs=3)
    add_search(scene)
    for _ in range(num_steps):
        scene.step()
    plan = scene.plan()
    scene.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    scene.apply(plan)
    scene.add("next", [1, 2, 3])
    scene.finish()
    scene.check_naive("next")


@pytest.mark.parametrize("sick", [slice(0, 1), slice(1, 2), slice(0, 3)], ids=["first", "other", "all"])
def test_a_fault_in_one_beam_ends_the_search_with_the_reason(sick):
    scene = Scene(num_blocks=40)
    add_search(scene)
    scene.add("well", range(5), max_tokens=6)
    scene.step()
    scene.step()
    beams = sorted(name for name in scene.runner.slot_of if name != "well")
    scene.runner.fail |= set(beams[sick])
    scene.finish()
    assert scene.errors == {"b": "broken", "b:1": "broken", "b:2": "broken", "well": None}
    scene.check_naive("well")


def test_a_search_that_is_preempted_begins_anew_and_finds_the_same():
    scene = Scene(num_blocks=14, max_num_batched_tokens=16)
    scene.add("old", range(20), max_tokens=16)
    scene.step()
    add_search(scene)
    scene.finish()
    assert scene.scheduler.make_stats().num_preemptions > 0
    assert found(scene) == naive_beam_search(PROMPT, width=3, n=3, max_tokens=8)
    scene.check_naive("old")


def test_the_first_in_order_is_not_preempted_for_a_search():
    scene = Scene(num_blocks=13, max_num_batched_tokens=16)
    scene.add("old", range(20), max_tokens=16)
    scene.step()
    add_search(scene)
    preempted = set()
    while scene.scheduler.has_requests():
        plan = scene.plan()
        preempted |= set(plan.preempted_req_ids)
        scene.apply(plan)
    assert preempted == {"b"}
    assert found(scene) == naive_beam_search(PROMPT, width=3, n=3, max_tokens=8)


@pytest.mark.parametrize("num_blocks", [*range(12, 22)])
def test_searches_beside_each_other_find_what_each_finds_alone(num_blocks):
    scene = Scene(num_blocks=num_blocks, max_num_seqs=12, enable_prefix_caching=False)
    prompts = [list(range(start, start + 7)) for start in (0, 10, 20)]
    for number, prompt in enumerate(prompts):
        add_search(scene, prompt=prompt, names=(f"b{number}", f"c{number}", f"d{number}"))
    scene.add("plain", range(9), max_tokens=12)
    while scene.scheduler.has_requests():
        plan = scene.plan()
        targets = plan.block_copies[:, 1, 0].tolist()
        assert len(set(targets)) == len(targets), "two copies to one block"
        scene.apply(plan)
    assert scene.scheduler.make_stats().num_preemptions > 0
    for number, prompt in enumerate(prompts):
        names = (f"b{number}", f"c{number}", f"d{number}")
        assert found(scene, 3, names) == naive_beam_search(prompt, width=3, n=3, max_tokens=8)
    scene.check_naive("plain")


@pytest.mark.parametrize("num_blocks", range(11, 18))
def test_copies_for_a_search_that_is_preempted_in_the_same_step_are_not_made(num_blocks):
    scene = Scene(num_blocks=num_blocks, max_num_seqs=8, enable_prefix_caching=False, policy="priority")
    idle, urgent = ("i0", "i1", "i2"), ("u0", "u1", "u2")
    add_search(scene, names=idle, priority=9)
    scene.step()
    add_search(scene, names=urgent, prompt=list(range(7)))
    while scene.scheduler.has_requests():
        plan = scene.plan()
        targets = plan.block_copies[:, 1, 0].tolist()
        assert len(set(targets)) == len(targets), "two copies to one block"
        scene.apply(plan)
    assert found(scene, 3, idle) == naive_beam_search(PROMPT, width=3, n=3, max_tokens=8)
    assert found(scene, 3, urgent) == naive_beam_search(list(range(7)), width=3, n=3, max_tokens=8)


def test_what_a_search_leaves_in_the_prefix_cache_is_right():
    scene = Scene(num_blocks=60)
    add_search(scene, width=5, max_tokens=12)
    scene.finish()
    for name in NAMES:
        scene.add(f"after {name}", [*PROMPT, *scene.outputs[name]], max_tokens=2)
    scene.finish()
    for name in NAMES:
        scene.check_naive(f"after {name}")
        assert scene.cached[f"after {name}"] >= 8, "the prompt at least"


def test_groups_with_a_large_penalty_begin_with_different_tokens():
    scene = Scene(num_blocks=60)
    add_search(scene, width=4, n=4, num_beam_groups=4, diversity_penalty=50.0, max_tokens=5)
    scene.finish()
    firsts = [scene.outputs[name][0] for name in NAMES[:4]]
    assert len(set(firsts)) == 4


def test_a_search_that_runs_out_of_time_answers_for_every_hypothesis():
    scene = Scene(num_blocks=40, request_timeout=5.0)
    add_search(scene)
    scene.step()
    scene.step()
    scene.clock.advance(6)
    scene.step()
    assert set(scene.reasons) == {"b", "b:1", "b:2"}
    assert "request_timeout" in scene.errors["b:2"]
    scene.finish()


@pytest.mark.parametrize(
    ("config", "message"),
    [({"max_num_seqs": 2}, "beam_width is 3.*max_num_seqs 2"), ({"num_blocks": 7}, "3 beams could need 8")],
)
def test_beams_that_could_never_run_at_once_are_refused(config, message):
    scene = Scene(**config)
    with pytest.raises(InvalidRequestError, match=message):
        add_search(scene)
    scene.scheduler.check_invariants()


def test_a_search_waits_until_all_its_beams_have_slots():
    scene = Scene(num_blocks=40, max_num_seqs=3)
    scene.add("first", range(4), max_tokens=3)
    scene.step()
    add_search(scene)
    assert scene.step() == {"first": 1}
    scene.finish()
    assert found(scene) == naive_beam_search(PROMPT, width=3, n=3, max_tokens=8)
