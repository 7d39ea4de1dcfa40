"""Every state that looks stuck moves, or ends with a reason."""

from __future__ import annotations

import pytest
from fake_runner import naive_generation
from scene import BAD, CLASSES, GatedGrammars, Scene, allowed_by_class

from faulty_connector import FaultyConnector
from quire.errors import InvalidRequestError
from quire.grammar.compilation import COMPILE_TIMEOUT
from quire.scheduling import PauseState
from quire.status import FinishReason, RequestStatus


def run_until(scene: Scene, condition, max_steps: int = 200) -> None:
    for _ in range(max_steps):
        if condition():
            return
        scene.step()
    raise AssertionError("it does not come to that")


def granting(left: int):
    """Memory for so many blocks in all."""

    def commit(count: int) -> int:
        nonlocal left
        count = min(count, left)
        left -= count
        return count

    return commit


# -- the head of the queue does not fit --------------------------------------------------------------------


def test_a_head_larger_than_the_free_memory_runs_when_what_runs_has_ended():
    scene = Scene(num_blocks=8, enable_prefix_caching=False)
    scene.add("running", range(12), max_tokens=8)
    scene.step()
    scene.add("large", range(20, 48), max_tokens=4)
    scene.step()
    assert scene.scheduler.get_request_counts() == (1, 1)
    assert "needs 7 blocks" in scene.scheduler.explain("large")
    scene.finish()
    scene.check_naive()


def test_a_head_larger_than_all_memory_is_refused_with_the_limit():
    scene = Scene(num_blocks=8)
    with pytest.raises(InvalidRequestError, match=r"could reach 34 tokens.*holds 32.*num_kv_blocks"):
        scene.add("too large", range(30), max_tokens=4)
    scene.add("just right", range(30), max_tokens=3)
    scene.finish()
    scene.check_naive()


def test_a_head_that_the_watermark_would_keep_out_for_ever_runs_when_nothing_else_does():
    scene = Scene(num_blocks=8, watermark=0.9)
    scene.add("a", range(28), max_tokens=4)
    scene.add("b", range(4), max_tokens=4)
    scene.finish()
    scene.check_naive()


# -- blocks that others hold -------------------------------------------------------------------------------


def test_blocks_leased_to_a_dead_peer_come_back_when_the_lease_expires():
    connector = FaultyConnector(4, send_steps=1, is_peer_alive=False)
    scene = Scene(connector=connector, num_blocks=4, enable_prefix_caching=False, kv_transfer_timeout=10.0)
    scene.add("sent", range(15), max_tokens=1)
    scene.step()
    assert scene.scheduler.get_kv_cache_usage() == 1.0
    scene.add("a", range(20, 29))
    assert [scene.step() for _ in range(3)] == [{}, {}, {}]
    assert "4 held by a transfer for up to 10.0 s" in scene.scheduler.explain("a")
    scene.clock.advance(10)
    assert scene.step() == {"a": 9}
    run_until(scene, lambda: "a" in scene.ends)
    scene.clock.advance(10)
    scene.finish()
    scene.check_naive()


def test_a_running_request_waits_for_a_dead_peers_blocks_too():
    connector = FaultyConnector(4, send_steps=1, is_peer_alive=False)
    scene = Scene(connector=connector, num_blocks=5, enable_prefix_caching=False, kv_transfer_timeout=10.0)
    scene.add("sent", range(11), max_tokens=1)
    scene.add("a", range(20, 27), max_tokens=6)
    scene.step()
    run_until(scene, lambda: len(scene.outputs["a"]) == 2)
    assert [scene.step() for _ in range(3)] == [{}, {}, {}]
    assert scene.scheduler.get_request_counts() == (1, 0)
    scene.clock.advance(10)
    assert scene.step() == {"a": 1}
    run_until(scene, lambda: "a" in scene.ends)
    scene.clock.advance(10)
    scene.finish()
    scene.check_naive()


def test_loads_that_never_answer_give_their_blocks_back_in_time():
    connector = FaultyConnector(4, load_steps=1)
    scene = Scene(connector=connector, num_blocks=4, enable_prefix_caching=False, kv_transfer_timeout=10.0)
    scene.add("before", range(13), max_tokens=1)
    scene.finish()
    connector.never_answer_next_loads(1)
    scene.add("a", range(13), max_tokens=3)
    scene.add("b", range(20, 32), max_tokens=3)
    scene.step()
    assert scene.step() == {}
    scene.clock.advance(10)
    scene.finish()
    scene.check_naive("a", "b")


def test_a_running_request_takes_the_blocks_of_loads_that_have_arrived():
    connector = FaultyConnector(4, load_steps=2)
    scene = Scene(connector=connector, num_blocks=7, enable_prefix_caching=False, max_num_seqs=1)
    scene.add("before", range(17), max_tokens=1)
    scene.finish()
    scene.add("loaded", range(17), max_tokens=3)
    scene.step()
    scene.add("running", range(20, 26), max_tokens=12)
    run_until(scene, lambda: scene.scheduler.get_kv_cache_usage() == 1.0)
    assert scene.requests["loaded"].status is RequestStatus.WAITING
    scene.finish()
    scene.check_naive()


def test_pins_are_broken_for_a_request_that_cannot_start_without_their_blocks():
    scene = Scene(num_blocks=4)
    scene.add("pinned", range(12), max_tokens=1, pin_prefix=1e6)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 3
    scene.add("a", range(20, 32), max_tokens=2)
    assert scene.step() == {"a": 12}
    assert scene.scheduler.make_stats().num_leased_blocks == 0
    scene.finish()
    scene.check_naive()


def test_pins_are_broken_for_a_request_that_cannot_go_on_without_their_blocks():
    scene = Scene(num_blocks=4)
    scene.add("pinned", range(8), max_tokens=1, pin_prefix=1e6)
    scene.step()
    scene.add("a", range(20, 27), max_tokens=6)
    scene.finish()
    scene.check_naive()


def test_growth_that_is_refused_costs_turns_and_at_last_an_error():
    scene = Scene(num_blocks=16, commit_blocks=granting(5), enable_prefix_caching=False)
    scene.add("a", range(9), max_tokens=10)
    scene.add("b", range(20, 29), max_tokens=10)
    scene.add("c", range(30, 39), max_tokens=20)
    scene.finish()
    scene.check_naive("a", "b")
    assert scene.reasons["c"] is FinishReason.ERROR
    assert "5 KV blocks that there is memory for now" in scene.errors["c"]
    assert scene.outputs["c"] == scene.naive("c")[: len(scene.outputs["c"])]


@pytest.mark.parametrize("num_granted", [2, 3, 4, 5, 6])
def test_a_search_that_no_memory_is_granted_for_ends_with_the_reason(num_granted):
    scene = Scene(num_blocks=40, commit_blocks=granting(num_granted))
    names = ("b", "b1", "b2")
    scene.add("b", range(9), max_tokens=12, beam_width=3, n=3, logprobs=3, beam_sequence_ids=names)
    scene.finish()
    expected = f"{num_granted} KV blocks that there is memory for now"
    assert all(expected in scene.errors[name] for name in names)


# -- others that do not come to an end ---------------------------------------------------------------------


def test_only_requests_that_wait_for_a_grammar_start_when_it_is_compiled():
    grammars = GatedGrammars(is_open=False)
    scene = Scene(grammars=grammars)
    scene.add("a", range(5), structured_outputs=CLASSES)
    scene.add("b", range(5), structured_outputs=BAD)
    for _ in range(5):
        assert scene.step() == {}
    assert scene.scheduler.get_request_counts() == (0, 2)
    assert scene.scheduler.has_requests()
    grammars.gate.set()
    scene.finish(max_steps=100_000)
    assert scene.outputs["a"] == scene.naive("a", allowed_by_class)
    assert scene.errors["b"] == "the pattern is bad"


def test_a_grammar_that_is_never_compiled_ends_its_request():
    grammars = GatedGrammars(is_open=False)
    scene = Scene(grammars=grammars)
    scene.add("a", range(5), structured_outputs=CLASSES)
    scene.step()
    scene.clock.advance(COMPILE_TIMEOUT)
    scene.finish()
    assert "was not compiled within the limit" in scene.errors["a"]
    grammars.gate.set()


def test_nobody_waits_for_a_request_whose_grammar_compiles():
    grammars = GatedGrammars(is_open=False)
    scene = Scene(grammars=grammars, max_num_seqs=1)
    scene.add("a", range(5), structured_outputs=CLASSES)
    scene.add("b", range(5))
    assert scene.step() == {"b": 5}
    grammars.gate.set()
    scene.finish(max_steps=100_000)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_holds_and_its_end_lets_all_go_on(state):
    scene = Scene(num_blocks=6)
    scene.add("running", range(8), max_tokens=8)
    scene.step()
    scene.add("waiting", range(8), max_tokens=8)
    scene.scheduler.set_pause_state(state)
    expected = {"running": 1} if state is PauseState.PAUSED_NEW else {}
    for _ in range(3):
        assert scene.step() == expected
    scene.scheduler.set_pause_state(PauseState.UNPAUSED)
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("num_steps_of_load", [1, 50])
def test_a_drain_does_not_wait_for_loads(num_steps_of_load):
    """Whether they are on their way or have arrived: until the pause ends, nobody can use them."""
    connector = FaultyConnector(4, load_steps=num_steps_of_load)
    scene = Scene(num_blocks=12, connector=connector, enable_prefix_caching=False)
    scene.add("before", range(9), max_tokens=1)
    scene.finish()
    scene.add("running", range(20, 24), max_tokens=5)
    scene.add("loading", range(9))
    scene.step()
    assert scene.scheduler.make_stats().num_awaiting == (num_steps_of_load == 50)
    scene.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    run_until(scene, lambda: scene.scheduler.get_kv_cache_usage() == 0, max_steps=6)
    assert scene.scheduler.reset_prefix_cache()
    assert scene.scheduler.get_request_counts() == (0, 1)
    scene.scheduler.set_pause_state(PauseState.UNPAUSED)
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_time_runs_out_during_a_pause_too(state):
    scene = Scene(request_timeout=5.0)
    scene.add("waiting", range(8))
    scene.scheduler.set_pause_state(state)
    scene.clock.advance(6)
    scene.step()
    assert scene.reasons == {"waiting": FinishReason.ERROR}


def test_an_urgent_request_takes_the_place_of_an_unimportant_one_and_that_one_ends_too():
    scene = Scene(num_blocks=6, policy="priority", enable_prefix_caching=False)
    scene.add("unimportant", range(16), max_tokens=8, priority=9)
    scene.step()
    scene.add("urgent", range(20, 24), max_tokens=16, priority=0)
    preempted = []
    while scene.scheduler.has_requests():
        plan = scene.plan()
        preempted += plan.preempted_req_ids
        scene.apply(plan)
    assert set(preempted) == {"unimportant"}
    scene.check_naive()


def test_a_low_priority_is_not_starved_by_a_stream_of_higher_ones():
    scene = Scene(max_num_seqs=1, policy="priority", priority_ageing=10.0)
    scene.add("low", range(4), max_tokens=1, priority=3)
    for number in range(40):
        scene.add(f"high {number}", range(4), max_tokens=1, priority=0)
        scene.step()
        if "low" in scene.ends:
            break
        scene.clock.advance(1)
    assert 30 <= number < 34, "3 levels of 10 seconds later"


def test_without_ageing_a_low_priority_waits_as_long_as_there_are_higher_ones():
    scene = Scene(max_num_seqs=1, policy="priority", priority_ageing=0.0)
    scene.add("low", range(4), max_tokens=1, priority=3)
    for number in range(40):
        scene.add(f"high {number}", range(4), max_tokens=1, priority=0)
        scene.step()
        scene.clock.advance(1000)
    assert "low" not in scene.ends
    scene.finish()


def test_siblings_do_not_wait_for_a_leader_that_was_aborted():
    scene = Scene(max_num_batched_tokens=4)
    scene.add("leader", range(10))
    scene.add("sibling", range(10), shares_prompt_with="leader")
    scene.step()
    scene.scheduler.finish_requests("leader", RequestStatus.FINISHED_ABORTED)
    assert "sibling" in scene.step()
    scene.finish()
    scene.check_naive("sibling")


def test_a_search_that_is_preempted_again_and_again_ends_all_the_same():
    scene = Scene(num_blocks=13, max_num_batched_tokens=16, enable_prefix_caching=False)
    names = ("b", "b1", "b2")
    scene.add("old", range(20), max_tokens=16)
    scene.step()
    scene.add("b", range(20, 29), max_tokens=8, beam_width=3, n=3, logprobs=3, beam_sequence_ids=names)
    scene.finish()
    assert scene.scheduler.make_stats().num_preemptions >= 2
    alone = Scene(num_blocks=40)
    alone.add("b", range(20, 29), max_tokens=8, beam_width=3, n=3, logprobs=3, beam_sequence_ids=names)
    alone.finish()
    assert {name: scene.outputs[name] for name in names} == alone.outputs
    scene.check_naive("old")


# -- steps that come to nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize("has_run", [False, True])
def test_a_step_that_was_planned_and_never_applied_is_planned_again(has_run):
    scene = Scene()
    scene.add("a", range(8), max_tokens=4)
    scene.add("gone", range(8), max_tokens=1)
    scene.step()
    lost = scene.plan()
    assert lost.finished_req_ids == ["gone"]
    if has_run:
        scene.compute(lost)
    again = scene.plan()
    assert again.finished_req_ids == ["gone"], "told again"
    assert again.preempted_req_ids == ["a"]
    assert again.num_computed_tokens.tolist() == [8], "from the prefix cache"
    scene.apply(again)
    scene.finish()
    scene.check_naive("a", "gone")


def test_a_lost_step_of_a_search_begins_it_anew():
    scene = Scene(num_blocks=40)
    names = ("b", "b1")
    scene.add("b", range(9), max_tokens=6, beam_width=2, n=2, logprobs=2, beam_sequence_ids=names)
    scene.step()
    scene.step()
    scene.plan()
    scene.finish()
    alone = Scene(num_blocks=40)
    alone.add("b", range(9), max_tokens=6, beam_width=2, n=2, logprobs=2, beam_sequence_ids=names)
    alone.finish()
    assert scene.outputs == alone.outputs


def test_a_lost_step_with_an_abort_in_it_leaves_nothing_behind():
    scene = Scene(max_num_seqs=1)
    scene.add("a", range(8))
    scene.plan()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scene.add("b", range(5))
    scene.plan()
    scene.finish()
    scene.check_naive("b")
    scene.check_nothing_is_held()


def test_a_request_whose_connector_never_knows_holds_nobody_up():
    connector = FaultyConnector(4)
    connector.get_num_new_matched_tokens = lambda request, num_computed_tokens: (
        (None if request.request_id == "undecided" else 0),
        False,
    )
    scene = Scene(connector=connector, max_num_seqs=1)
    scene.add("undecided", range(8), timeout=50.0)
    scene.add("a", range(5))
    run_until(scene, lambda: "a" in scene.ends)
    assert scene.outputs["a"] == naive_generation(list(range(5)), 4, set())
    scene.clock.advance(51)
    scene.finish()
    assert "timeout" in scene.errors["undecided"]
