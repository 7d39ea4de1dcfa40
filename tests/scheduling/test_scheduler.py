"""Single decisions of the scheduler, each in the smallest scene that shows it."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner, naive_generation
from scene import BLOCK_SIZE, CLASSES, Scene

from preempting import preempt
from quire.errors import DuplicateRequestError, InvalidRequestError, QueueFullError
from quire.scheduling import PauseState
from quire.status import FinishReason, RequestStatus


def test_a_long_prompt_is_computed_in_chunks_beside_decoding():
    scene = Scene(max_num_batched_tokens=8)
    scene.add("short", [1, 2, 3])
    assert scene.step() == {"short": 3}
    scene.add("long", range(20))
    assert scene.step() == {"short": 1, "long": 7}
    assert scene.step() == {"short": 1, "long": 7}
    assert scene.step() == {"short": 1, "long": 6}
    assert scene.step() == {"long": 1}
    scene.finish()
    assert scene.outputs["long"] == naive_generation(list(range(20)), 4, set())


def test_one_prompt_takes_at_most_the_long_prefill_threshold_of_a_step():
    scene = Scene(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    scene.add("a", range(10))
    scene.add("b", range(20, 30))
    assert scene.step() == {"a": 4, "b": 4}


def test_the_second_request_with_a_prefix_computes_only_the_rest():
    scene = Scene()
    scene.add("first", range(13))
    scene.finish()
    scene.add("second", range(13))
    assert scene.step() == {"second": 1}
    scene.finish()
    assert scene.cached == {"first": 0, "second": 12}
    assert scene.outputs["first"] == scene.outputs["second"]
    stats = scene.scheduler.make_stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (26, 12)


def test_idle_blocks_and_those_evicted_are_counted():
    scene = Scene(num_blocks=4)
    scene.add("first", range(9), max_tokens=1)
    scene.finish()
    stats = scene.scheduler.make_stats()
    assert (stats.num_free_blocks, stats.num_idle_blocks, stats.prefix_evicted_blocks) == (4, 2, 0)
    scene.add("second", range(20, 33), max_tokens=1)
    scene.finish()
    stats = scene.scheduler.make_stats()
    assert (stats.num_free_blocks, stats.num_idle_blocks, stats.prefix_evicted_blocks) == (4, 3, 2)


def test_the_last_prompt_token_is_always_computed():
    scene = Scene()
    scene.add("first", range(12))
    scene.finish()
    scene.add("second", range(12))
    assert scene.step() == {"second": 4}


def test_another_salt_shares_nothing():
    scene = Scene()
    scene.add("first", range(13), salt="one tenant")
    scene.finish()
    scene.add("second", range(13), salt="another")
    assert scene.step() == {"second": 13}


def test_prompt_logprobs_need_every_position_computed():
    scene = Scene()
    scene.add("first", range(13))
    scene.finish()
    scene.add("second", range(13), prompt_logprobs=0)
    assert scene.step() == {"second": 13}


def test_without_prefix_caching_nothing_is_kept():
    scene = Scene(enable_prefix_caching=False)
    scene.add("first", range(13))
    scene.finish()
    scene.add("second", range(13))
    assert scene.step() == {"second": 13}


def test_the_newest_is_preempted_and_comes_back_with_the_same_tokens():
    scene = Scene(num_blocks=6, max_num_seqs=2)
    scene.add("old", range(8), max_tokens=12)
    scene.add("new", range(20, 28), max_tokens=12)
    scene.finish()
    assert scene.scheduler.make_stats().num_preemptions >= 1
    assert scene.outputs["old"] == naive_generation(list(range(8)), 12, set())
    assert scene.outputs["new"] == naive_generation(list(range(20, 28)), 12, set())


def test_a_step_that_preempts_admits_nobody():
    scene = Scene(num_blocks=6, max_num_seqs=3, reserve_full_prompt=False)
    scene.add("old", range(8), max_tokens=12)
    scene.add("new", range(20, 28), max_tokens=12)
    while True:
        plan = scene.scheduler.schedule()
        scene.apply(plan)
        if plan.preempted_req_ids:
            break
    assert plan.preempted_req_ids == ["new"]
    assert plan.request_ids == ["old"]


def test_priority_serves_the_lower_value_first_and_preempts_the_worst():
    scene = Scene(num_blocks=6, max_num_seqs=2, policy="priority")
    scene.add("idle", range(40, 48), max_tokens=12, priority=5)
    scene.add("urgent", range(8), max_tokens=12, priority=0)
    plan = scene.scheduler.schedule()
    assert plan.request_ids == ["urgent", "idle"]
    scene.apply(plan)
    scene.finish()
    assert scene.runner.tokens == {}
    assert scene.outputs["idle"] == naive_generation(list(range(40, 48)), 12, set())


def test_a_priority_that_the_policy_would_ignore_is_refused():
    scene = Scene(policy="fcfs")
    with pytest.raises(InvalidRequestError, match="priority is 1, but the scheduler's policy is 'fcfs'"):
        scene.add("urgent", [1], priority=1)


def test_nobody_overtakes_a_head_that_waits_for_blocks():
    scene = Scene(num_blocks=8)
    scene.add("running", range(16), max_tokens=8)
    scene.step()
    scene.add("big", range(20, 40), max_tokens=4)
    scene.add("small", [1], max_tokens=1)
    assert scene.step() == {"running": 1}
    scene.finish()
    assert scene.reasons == dict.fromkeys(["running", "big", "small"], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "empty"),
        (range(64), 1, "64 tokens; at most 63"),
        (range(30), 12, "could reach 42 tokens.*holds 40.*at most 11.*num_kv_blocks"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_limit_and_the_knob(prompt, max_tokens, message):
    scene = Scene(num_blocks=10)
    with pytest.raises(InvalidRequestError, match=message):
        scene.add("never", prompt, max_tokens=max_tokens)
    assert not scene.scheduler.has_request("never")
    scene.scheduler.check_invariants()


def test_the_queue_is_bounded_in_requests_and_tokens():
    scene = Scene(max_num_queued_reqs=2, max_num_queued_tokens=30)
    scene.add("a", range(20))
    with pytest.raises(QueueFullError, match="max_num_queued_tokens 30"):
        scene.add("b", range(11))
    scene.add("b", range(10))
    with pytest.raises(QueueFullError, match="max_num_queued_reqs 2"):
        scene.add("c", [1])
    scene.finish()
    scene.add("c", [1])


def test_a_duplicate_id_is_refused_until_the_first_has_ended():
    scene = Scene()
    scene.add("same", [1])
    with pytest.raises(DuplicateRequestError, match="'same' is in use"):
        scene.add("same", [2])
    scene.step()
    with pytest.raises(DuplicateRequestError):
        scene.add("same", [2])
    scene.finish()
    scene.add("same", [2])


def test_a_fault_in_one_request_ends_only_that_one():
    scene = Scene()
    scene.add("sick", range(8))
    scene.add("well", range(8))
    scene.runner.fail.add("sick")
    scene.finish()
    assert scene.reasons == {"sick": FinishReason.ERROR, "well": FinishReason.LENGTH}
    assert scene.errors == {"sick": "broken", "well": None}
    scene.add("next", range(8), max_tokens=1)
    assert scene.step() == {"next": 4}, "the well one's blocks are cached, the sick one's are not"


def test_stop_tokens_eos_and_their_reasons():
    prompt = [5, 6, 7]
    tokens = naive_generation(prompt, 8, set())
    third = tokens[2]
    scene = Scene()
    scene.add("stop", prompt, max_tokens=8, stop_token_ids=(third, 1000, 1001, 1002, 1003))
    scene.finish()
    assert scene.outputs["stop"] == tokens[: tokens.index(third) + 1]
    assert scene.reasons["stop"] is FinishReason.STOP
    scene.add("not yet", prompt, max_tokens=8, min_tokens=8, stop_token_ids=(third,))
    scene.finish()
    assert scene.outputs["not yet"] == tokens


def test_blocks_of_a_request_that_ends_in_mid_step_are_free_at_once_and_its_slot_when_the_step_lands():
    scene = Scene(max_num_seqs=1)
    scene.add("a", range(8))
    plan = scene.scheduler.schedule()
    (request,) = scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert scene.scheduler.get_kv_cache_usage() == 0
    scene.scheduler.check_invariants()
    scene.apply(plan)
    assert scene.scheduler.get_kv_cache_usage() == 0
    assert scene.outputs["a"] == []
    assert scene.scheduler.has_finished_requests()
    assert scene.scheduler.schedule().finished_req_ids == ["a"]
    assert not scene.scheduler.has_requests()


def test_a_step_can_be_dropped_and_planned_again():
    scene = Scene()
    scene.add("a", range(8), max_tokens=2)
    dropped = scene.scheduler.schedule()
    again = scene.scheduler.schedule()
    assert dict(again.num_scheduled_tokens) == dict(dropped.num_scheduled_tokens)
    assert again.num_computed_tokens.tolist() == [0]
    runner_output = FakeRunner(16, BLOCK_SIZE).execute(dropped)
    with pytest.raises(ValueError, match="in flight"):
        scene.scheduler.update_from_output(dropped, runner_output)


def test_pausing_holds_newcomers_or_everybody():
    scene = Scene()
    scene.add("running", [1, 2])
    scene.step()
    scene.add("new", [3, 4])
    scene.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scene.step() == {"running": 1}
    scene.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scene.step() == {}
    scene.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scene.step() == {"running": 1, "new": 2}


def test_reset_prefix_cache_needs_idle_blocks_or_leave_to_preempt():
    scene = Scene()
    scene.add("a", range(9), max_tokens=6)
    scene.step()
    scene.step()
    assert not scene.scheduler.reset_prefix_cache()
    assert scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scene.scheduler.get_kv_cache_usage() == 0
    assert scene.step() == {"a": 11}, "computed anew, nothing found in the cache"
    scene.finish()
    assert scene.outputs["a"] == naive_generation(list(range(9)), 6, set())


def test_a_new_request_data_is_sent_once_and_then_only_differences():
    scene = Scene()
    scene.add("a", range(4), max_tokens=6)
    first = scene.scheduler.schedule()
    scene.apply(first)
    (new,) = first.scheduled_new_reqs
    assert new.prompt_token_ids.tolist() == [0, 1, 2, 3]
    assert new.block_ids.shape == (1, 1)
    second = scene.scheduler.schedule()
    scene.apply(second)
    assert second.scheduled_new_reqs == []
    assert second.scheduled_cached_reqs.block_index.tolist() == [1]
    third = scene.scheduler.schedule()
    assert third.scheduled_cached_reqs.block_ids.tolist() == [[]]


# -- whole prompts apart from decoding ---------------------------------------------------------------------


def test_without_split_fuse_prompts_and_decoding_do_not_share_a_step():
    scene = Scene(dynamic_split_fuse=False, max_num_batched_tokens=12)
    scene.add("a", range(5), max_tokens=4)
    scene.add("b", range(5, 11), max_tokens=4)
    assert scene.step() == {"a": 5, "b": 6}
    scene.add("c", range(11, 21), max_tokens=4)
    assert scene.step() == {"a": 1, "b": 1}
    assert scene.step() == {"c": 10}
    assert scene.step() == {"a": 1, "b": 1, "c": 1}
    scene.finish()
    scene.check_naive()


def test_without_split_fuse_a_prompt_that_is_left_no_room_waits_for_the_next_step():
    scene = Scene(dynamic_split_fuse=False, max_num_batched_tokens=12)
    scene.add("a", range(8))
    scene.add("b", range(8, 16))
    scene.add("c", range(2))
    assert scene.step() == {"a": 8}
    assert scene.step() == {"a": 1}
    assert scene.step() == {"b": 8, "c": 2}
    scene.finish()
    scene.check_naive()


def test_without_split_fuse_arrivals_do_not_hold_up_decoding():
    scene = Scene(dynamic_split_fuse=False, max_num_batched_tokens=12)
    scene.add("long", range(8), max_tokens=6)
    for number in range(12):
        scene.add(f"short {number}", range(number, number + 4), max_tokens=1)
        scene.step()
    assert scene.reasons["long"] is FinishReason.LENGTH


def test_without_split_fuse_a_prompt_longer_than_a_step_is_refused():
    scene = Scene(dynamic_split_fuse=False, max_num_batched_tokens=8)
    with pytest.raises(InvalidRequestError, match=r"9 tokens.*max_num_batched_tokens 8.*dynamic_split_fuse"):
        scene.add("a", range(9))
    scene.add("a", range(8))
    scene.finish()


def test_without_split_fuse_what_was_preempted_may_be_longer_than_a_step():
    scene = Scene(
        dynamic_split_fuse=False, max_num_batched_tokens=8, num_blocks=6, enable_prefix_caching=False
    )
    scene.add("old", range(8), max_tokens=14)
    scene.add("new", range(20, 28), max_tokens=14)
    scene.finish()
    assert scene.scheduler.make_stats().num_preemptions > 0
    scene.check_naive()


# -- who hears what ----------------------------------------------------------------------------------------


def test_outputs_and_notices_go_to_the_client_of_each_request():
    scene = Scene(request_timeout=5.0)
    scene.add("a", range(4), client_index=0, timeout=0.0)
    scene.add("b", range(4, 8), client_index=7, timeout=0.0)
    scene.add("c", range(4), client_index=2)
    plan = scene.plan()
    by_client = scene.scheduler.update_from_output(plan, scene.compute(plan))
    heard = {client: [output.request_id for output in one.outputs] for client, one in by_client.items()}
    assert heard == {0: ["a"], 7: ["b"], 2: ["c"]}
    scene.clock.advance(6)
    plan = scene.plan()
    by_client = scene.scheduler.update_from_output(plan, scene.compute(plan))
    (ended,) = by_client[2].outputs
    assert (ended.request_id, ended.finish_reason) == ("c", FinishReason.ERROR)


def test_a_chunk_that_samples_nothing_says_nothing():
    scene = Scene(max_num_batched_tokens=4)
    scene.add("a", range(9))
    plan = scene.plan()
    messages = scene.scheduler.update_from_output(plan, scene.compute(plan))
    assert all(not message.outputs for message in messages.values())


# -- ids ---------------------------------------------------------------------------------------------------


def test_the_same_id_again_while_a_step_of_its_predecessor_is_in_flight():
    scene = Scene()
    scene.add("a", range(8))
    plan = scene.plan()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scene.add("a", range(20, 30))
    scene.apply(plan)
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("field", ["salt", "tenant"])
def test_what_is_no_unicode_text_is_refused(field):
    scene = Scene(policy="longest-prefix")
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        scene.add("a", range(8), **{field: "half \ud83d"})
    scene.add("b", range(8), **{field: "whole \U0001f600"})
    scene.finish()


def test_the_last_token_needs_no_block():
    """Its KV is never written, because nothing follows it."""
    scene = Scene(num_blocks=4)
    scene.add("a", range(16), max_tokens=1)
    scene.finish()
    scene.add("b", range(9), max_tokens=8)
    scene.finish()
    scene.check_naive()
    with pytest.raises(InvalidRequestError, match="lower max_tokens to at most 8"):
        scene.add("c", range(9), max_tokens=9)
    scene.add("beams", range(8), max_tokens=5, beam_width=2, logprobs=2, n=2, beam_sequence_ids=("x", "y"))
    scene.finish()
    with pytest.raises(InvalidRequestError, match="2 beams could need 6 KV blocks"):
        scene.add("more", range(8), max_tokens=6, beam_width=2, logprobs=2, n=2)


def test_what_a_preempted_request_finds_again_is_counted_apart():
    scene = Scene()
    scene.add("a", range(9))
    scene.step()
    assert scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    scene.step()
    preempt(scene.scheduler, scene.scheduler.accounts.running.in_order()[0])
    scene.finish()
    stats = scene.scheduler.make_stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (9, 0)
    assert (stats.resumed_queried_tokens, stats.resumed_hit_tokens) == (10 + 11, 8)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {}])
def test_only_what_is_looked_up_counts(options):
    scene = Scene(**options)
    scene.add("a", range(9), prompt_logprobs=0 if not options else None)
    scene.finish()
    assert scene.scheduler.make_stats().prefix_queried_tokens == 0


def test_only_a_terminal_status_ends_a_request():
    scene = Scene()
    scene.add("a", range(8))
    for status in (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED):
        with pytest.raises(ValueError, match=f"{status.name}, which ends no request"):
            scene.scheduler.finish_requests("a", status)
    scene.finish()
    scene.check_naive()


def test_a_refused_request_leaves_nothing():
    scene = Scene()
    with pytest.raises(InvalidRequestError, match="no grammar backend"):
        scene.add("a", range(8), structured_outputs=CLASSES)
    scene.scheduler.check_invariants()
    assert not scene.scheduler.has_requests()


# -- pins --------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_stays_until_its_time_is_over():
    scene = Scene(num_blocks=8)
    scene.add("pinned", range(9), max_tokens=1, pin_prefix=10.0)
    scene.finish_but_pins()
    assert scene.scheduler.make_stats().num_leased_blocks == 2
    for number in range(3):
        scene.add(f"other {number}", range(20 * number + 20, 20 * number + 40), max_tokens=1)
    scene.finish_but_pins()
    scene.add("again", range(9), max_tokens=1, pin_prefix=10.0)
    assert scene.step() == {"again": 1}
    scene.clock.advance(11)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 0


def test_a_prefix_that_is_pinned_again_is_pinned_for_longer_and_held_once():
    scene = Scene(num_blocks=8)
    for _ in range(3):
        scene.add("pinned", range(9), max_tokens=1, pin_prefix=10.0)
        scene.finish_but_pins()
        scene.clock.advance(6)
    assert scene.scheduler.make_stats().num_leased_blocks == 2
    scene.clock.advance(5)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 0


def test_an_idle_scheduler_has_something_to_do_when_a_pin_ends():
    scene = Scene(num_blocks=8)
    assert scene.scheduler.next_due() is None
    for start, pin_prefix in ((0, 20.0), (100, 10.0)):
        scene.add(f"pinned {start}", range(start, start + 9), max_tokens=1, pin_prefix=pin_prefix)
        scene.finish_but_pins()
    assert not scene.scheduler.has_requests()
    for _ in range(2):
        assert scene.scheduler.next_due() == scene.clock.now + 10
        scene.clock.advance(10)
        scene.step()
    assert scene.scheduler.next_due() is None
