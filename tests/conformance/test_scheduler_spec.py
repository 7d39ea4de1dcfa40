"""The scheduler's specification, section 1: each method of the interface."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from conformance import row
from fake_runner import FakeRunner, naive_generation
from scene import CLASSES, GatedGrammars, Scene, allowed_by_class

from memory_connector import MemoryConnector
from quire.config import EngineConfig, SchedulerConfig
from quire.engine.building.assembly import build_scheduler
from quire.errors import DuplicateRequestError, InvalidRequestError
from quire.scheduling import PauseState, Scheduler, SchedulerInterface
from quire.scheduling.context import SchedulerContext
from quire.status import FinishReason, RequestStatus
from quire.step import DraftTokenIds

ABSTRACT = [
    "schedule", "update_from_output", "add_request", "finish_requests", "get_num_unfinished_requests",
    "has_finished_requests", "get_request_counts", "reset_prefix_cache",
]  # fmt: skip


# -- methods -----------------------------------------------------------------------------------------------


@row("schedule")
def test_the_abstract_methods_are_those_that_vllm_and_esurge_both_have():
    assert inspect.isabstract(SchedulerInterface)
    assert SchedulerInterface.__abstractmethods__ == set(ABSTRACT)
    signature = inspect.signature(SchedulerInterface.schedule)
    assert signature.parameters["throttle_prefills"].default is False


@row("reset_encoder_cache", "get_kv_event_publisher_config")
def test_there_is_no_encoder_and_no_publisher_of_its_own():
    scheduler = Scene().scheduler
    assert scheduler.reset_encoder_cache() is None
    assert scheduler.get_kv_event_publisher_config() is None


@row("schedule")
def test_a_step_gives_all_prompt_tokens_or_one_or_anything_between():
    scene = Scene(max_num_batched_tokens=10)
    scene.add("a", range(6), max_tokens=12)
    assert scene.step() == {"a": 6}
    scene.add("b", range(20, 40))
    assert scene.step() == {"a": 1, "b": 9}
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3]]))
    assert scene.step() == {"a": 4, "b": 6}
    scene.finish()
    scene.add("hit", range(6))
    assert scene.step() == {"hit": 2}
    scene.finish()
    scene.check_naive()


@row("schedule(throttle_prefills=True)")
def test_throttling_lets_decoding_go_on_and_nothing_else():
    scene = Scene(max_num_batched_tokens=8)
    scene.add("decodes", range(3))
    scene.step()
    scene.add("in the middle", range(20))
    scene.step()
    scene.add("waits", range(4))
    plan = scene.scheduler.schedule(throttle_prefills=True)
    assert dict(plan.num_scheduled_tokens) == {"decodes": 1}
    scene.apply(plan)
    assert set(scene.step()) == {"decodes", "in the middle"}
    scene.finish()
    scene.check_naive()


@row("update_from_output")
def test_update_appends_tokens_detects_ends_and_answers_by_client():
    scene = Scene()
    scene.add("short", range(4), max_tokens=1, client_index=1)
    scene.add("long", range(4, 8), max_tokens=2, client_index=2)
    plan = scene.plan()
    messages = scene.scheduler.update_from_output(plan, scene.compute(plan))
    assert set(messages) == {1, 2}
    (short,), (long,) = messages[1].outputs, messages[2].outputs
    assert (short.request_id, short.finish_reason) == ("short", FinishReason.LENGTH)
    assert (long.request_id, long.finish_reason) == ("long", None)
    assert short.new_token_ids == naive_generation([0, 1, 2, 3], 1, set())


@row("update_from_output")
def test_outputs_are_applied_in_the_order_of_the_plans():
    scene = Scene()
    scene.add("a", range(4))
    first = scene.plan()
    scene.apply(first)
    with pytest.raises(ValueError, match="in flight"):
        scene.scheduler.update_from_output(first, FakeRunner(16, 4).execute(first))


@row("add_request")
def test_add_queues_and_refuses_duplicates_and_what_can_never_fit():
    scene = Scene(num_blocks=4)
    scene.add("a", range(4))
    assert scene.scheduler.get_request_counts() == (0, 1)
    with pytest.raises(DuplicateRequestError, match="'a'"):
        scene.add("a", range(4))
    with pytest.raises(InvalidRequestError, match="num_kv_blocks"):
        scene.add("b", range(14), max_tokens=4)
    assert scene.scheduler.get_request_counts() == (0, 1)


@row("has_request")
def test_a_request_is_there_from_its_arrival_to_its_end():
    scene = Scene()
    assert not scene.scheduler.has_request("a")
    scene.add("a", range(4), max_tokens=2)
    assert scene.scheduler.has_request("a")
    scene.step()
    assert scene.scheduler.has_request("a")
    scene.step()
    assert not scene.scheduler.has_request("a")


@row("finish_requests", "FINISHED_ABORTED", "reason abort")
@pytest.mark.parametrize("given", ["b", ["b", "unknown"], iter(["b"]), ("b", "b")], ids=type)
def test_finish_takes_ids_in_any_form_and_ignores_unknown_ones(given):
    scene = Scene()
    for name in ("a", "b"):
        scene.add(name, range(9))
    scene.step()
    (ended,) = scene.scheduler.finish_requests(given, RequestStatus.FINISHED_ABORTED)
    assert (ended.request_id, ended.status) == ("b", RequestStatus.FINISHED_ABORTED)
    assert FinishReason.of(ended.status) is FinishReason.ABORT
    assert ended.output_token_ids == naive_generation(list(range(9)), 1, set())
    scene.finish()
    scene.check_naive("a")


@row("finish_requests")
def test_finish_none_means_all_in_every_state():
    scene = Scene(max_num_seqs=1, grammars=GatedGrammars(is_open=False))
    scene.add("runs", range(9))
    scene.step()
    scene.add("waits", range(9))
    scene.add("compiles", range(9), structured_outputs=CLASSES)
    ended = scene.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert {request.request_id for request in ended} == {"runs", "waits", "compiles"}
    assert scene.scheduler.get_kv_cache_usage() == 0, "blocks are free when it returns"
    scene.finish()


@row("finish_requests", "FINISHED_STOPPED", "reason stop")
def test_a_stop_string_found_by_the_front_end():
    scene = Scene()
    scene.add("a", range(9))
    scene.step()
    (ended,) = scene.scheduler.finish_requests("a", RequestStatus.FINISHED_STOPPED)
    assert FinishReason.of(ended.status) is FinishReason.STOP
    scene.finish()


@row("get_num_unfinished_requests", "has_unfinished_requests", "get_request_counts")
def test_counts_of_requests():
    scene = Scene(max_num_seqs=1)
    assert (scene.scheduler.get_num_unfinished_requests(), scene.scheduler.has_unfinished_requests()) == (
        0,
        False,
    )
    scene.add("a", range(4), max_tokens=2)
    scene.add("b", range(4), max_tokens=2)
    assert scene.scheduler.get_request_counts() == (0, 2)
    scene.step()
    assert scene.scheduler.get_request_counts() == (1, 1), "(running, waiting)"
    assert scene.scheduler.get_num_unfinished_requests() == 2
    assert scene.scheduler.has_unfinished_requests()


@row("has_finished_requests", "has_requests", "SchedulerOutput: finished ids")
def test_finished_requests_are_there_until_a_plan_has_named_them():
    scene = Scene()
    scene.add("a", range(4), max_tokens=1)
    scene.add("b", range(4), max_tokens=3)
    assert not scene.scheduler.has_finished_requests()
    scene.step()
    assert scene.scheduler.has_finished_requests()
    assert scene.scheduler.has_unfinished_requests(), "not the negation of the other"
    plan = scene.plan()
    assert plan.finished_req_ids == ["a"]
    assert not scene.scheduler.has_finished_requests()
    scene.apply(plan)
    scene.step()
    assert not scene.scheduler.has_unfinished_requests()
    assert scene.scheduler.has_requests(), "finished and not yet in a plan"
    assert scene.step() == {}
    assert not scene.scheduler.has_requests()


@row("reset_prefix_cache")
def test_reset_needs_leave_to_preempt_while_blocks_are_in_use():
    scene = Scene(connector=MemoryConnector(4))
    scene.add("a", range(9), max_tokens=5)
    scene.step()
    assert not scene.scheduler.reset_prefix_cache()
    assert scene.scheduler.get_request_counts() == (1, 0)
    assert scene.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert scene.scheduler.get_request_counts() == (0, 1)
    assert scene.step() == {"a": 10}, "nothing was found again"
    scene.finish()
    scene.check_naive()
    assert scene.scheduler.reset_prefix_cache()


@row("pause_state", "set_pause_state")
def test_pause_states():
    assert [state.name for state in PauseState] == ["UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"]
    scene = Scene()
    assert scene.scheduler.pause_state is PauseState.UNPAUSED
    scene.add("runs", range(4))
    scene.step()
    scene.add("new", range(4))
    for state, scheduled in (
        (PauseState.PAUSED_ALL, {}),
        (PauseState.PAUSED_NEW, {"runs": 1}),
        (PauseState.UNPAUSED, {"runs": 1, "new": 1}),
    ):
        scene.scheduler.set_pause_state(state)
        assert scene.scheduler.pause_state is state
        plan = scene.plan()
        assert set(plan.num_scheduled_tokens) == set(scheduled)
        scene.apply(plan)


@row("get_grammar_bitmask")
def test_a_bitmask_row_for_each_token_that_may_be_sampled():
    scene = Scene(grammars=GatedGrammars())
    scene.add("free", range(4), max_tokens=30)
    assert scene.scheduler.get_grammar_bitmask(scene.plan()) is None
    scene = Scene(grammars=GatedGrammars())
    scene.add("bound", range(4), max_tokens=6, structured_outputs=CLASSES)
    while "bound" not in scene.runner.tokens:
        scene.step()
    expected = scene.naive("bound", allowed_by_class)
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["bound"], [expected[1:3]]))
    plan = scene.plan()
    mask = scene.scheduler.get_grammar_bitmask(plan)
    assert mask.request_ids == ["bound"]
    assert mask.num_rows.tolist() == [3]
    assert mask.bitmask.shape == (3, 2)
    bits = np.unpackbits(mask.bitmask.view(np.uint8), axis=1, bitorder="little")
    for place, allowed in enumerate(bits):
        assert set(np.flatnonzero(allowed)) == allowed_by_class(expected[: 1 + place])
    scene.apply(plan)
    scene.finish()
    assert scene.outputs["bound"] == expected


@row("update_draft_token_ids", "SchedulerOutput: scheduled draft tokens")
def test_drafts_are_scheduled_with_the_next_step():
    scene = Scene()
    scene.add("a", range(4), max_tokens=9)
    scene.step()
    drafts = naive_generation([0, 1, 2, 3], 3, set())[1:]
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [drafts]))
    plan = scene.plan()
    assert plan.scheduled_spec_decode_tokens == {"a": drafts}
    assert plan.num_scheduled_tokens["a"] == 3
    scene.apply(plan)
    assert len(scene.outputs["a"]) == 4
    scene.finish()
    scene.check_naive()


@row("update_draft_token_ids_in_output")
def test_drafts_are_replaced_in_a_plan():
    scene = Scene()
    scene.add("a", range(4), max_tokens=9)
    scene.step()
    right = naive_generation([0, 1, 2, 3], 3, set())[1:]
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[40, 41, 42]]))
    plan = scene.plan()
    scene.scheduler.update_draft_token_ids_in_output(DraftTokenIds(["a"], [right]), plan)
    assert plan.scheduled_spec_decode_tokens == {"a": right}
    scene.apply(plan)
    scene.finish()
    scene.check_naive()


@row("get_kv_connector")
def test_the_connector_is_handed_out():
    connector = MemoryConnector(4)
    assert Scene(connector=connector).scheduler.get_kv_connector() is connector
    assert Scene().scheduler.get_kv_connector() is None


@row("explain")
def test_every_request_can_be_explained():
    scene = Scene(max_num_seqs=1)
    scene.add("a", range(4))
    scene.step()
    scene.add("b", range(4))
    assert scene.scheduler.explain("a").startswith("running")
    assert "max_num_seqs" in scene.scheduler.explain("b")
    assert "not known" in scene.scheduler.explain("c")


@row("oldest_waiting_request")
def test_the_oldest_waiting_request_is_the_first_that_came():
    scene = Scene(max_num_seqs=1, policy="priority")
    assert scene.scheduler.oldest_waiting_request() is None
    for name, priority in (("a", 1), ("b", 2), ("c", 1)):
        scene.add(name, range(4), priority=priority)
    assert scene.scheduler.oldest_waiting_request() == "a"
    scene.step()
    assert scene.scheduler.oldest_waiting_request() == "b"
    scene.finish()


@row("get_kv_cache_usage")
def test_usage_is_the_share_of_blocks_that_are_held():
    scene = Scene(num_blocks=16)
    assert scene.scheduler.get_kv_cache_usage() == 0.0
    scene.add("a", range(16), max_tokens=1)
    plan = scene.plan()
    assert scene.scheduler.get_kv_cache_usage() == 0.25
    scene.apply(plan)
    assert scene.scheduler.get_kv_cache_usage() == 0.0


@row("make_stats")
def test_stats_count_what_has_happened():
    scene = Scene(num_blocks=16)
    scene.add("a", range(9), max_tokens=2)
    scene.step()
    stats = scene.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 0, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_scheduled_tokens) == (16, 13, 9)
    scene.finish()
    scene.add("b", range(9), max_tokens=1)
    scene.finish()
    stats = scene.scheduler.make_stats()
    assert (stats.num_finished, stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (2, 18, 8)


@row("check_invariants")
def test_accounts_that_do_not_agree_are_found():
    scene = Scene()
    scene.add("a", range(9))
    scene.step()
    scene.scheduler.check_invariants()
    scene.scheduler.accounts.kv.pools.allocate(1)  # nobody holds it
    with pytest.raises(AssertionError, match="invariant 2"):
        scene.scheduler.check_invariants()


@row("shutdown")
def test_shutdown_lets_go_of_everything():
    connector = MemoryConnector(4, send_steps=100)
    scene = Scene(num_blocks=32, connector=connector)
    scene.add("sent", range(30, 39), max_tokens=1, pin_prefix=100.0)
    scene.add("runs", range(9))
    scene.add("waits", range(9), shares_prompt_with="runs")
    scene.step()
    scene.plan()
    scene.scheduler.shutdown()
    assert scene.scheduler.get_num_unfinished_requests() == 0
    assert scene.scheduler.get_kv_cache_usage() == 0
    scene.scheduler.check_invariants()


class Another(Scheduler):
    """A scheduler from elsewhere."""


@row("scheduler_cls by class or by dotted name")
@pytest.mark.parametrize("scheduler_cls", [Another, f"{__name__}.Another"], ids=["class", "dotted name"])
def test_another_scheduler_can_be_plugged_in(scheduler_cls):
    size = {"scheduler": SchedulerConfig(num_kv_blocks=8)}
    plan = SimpleNamespace(num_blocks=8, max_model_len=32, kv_caches=(None,), windows=(), states=None)
    other = build_scheduler(EngineConfig(scheduler_cls=scheduler_cls, **size), plan, SchedulerContext())
    assert type(other) is Another
    assert type(build_scheduler(EngineConfig(**size), plan, SchedulerContext())) is Scheduler
