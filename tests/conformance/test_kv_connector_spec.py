"""The scheduler's specification, section 4: the KV connector."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import row
from fake_runner import naive_generation
from scene import BAD, CLASSES, GatedGrammars, Scene

from faulty_connector import FaultyConnector
from preempting import preempt
from quire.kv.blocks.groups import NULL_BLOCK, WindowBlocks
from quire.status import RequestStatus

# -- the connector's scheduler side ------------------------------------------------------------------------


class Witness(FaultyConnector):
    """Writes down which calls were made, in order."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.calls: list[tuple] = []


def _noting(name: str):
    def method(self, *arguments):
        self.calls.append((name, *arguments))
        return getattr(FaultyConnector, name)(self, *arguments)

    return method


SCHEDULER_SIDE = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "cancel_load", "build_connector_meta",
    "request_finished", "leases_renewed", "reset", "request_arrived", "lease_ended",
)  # fmt: skip
WORKER_SIDE = (
    "register_kv_caches", "start_load_kv", "wait_for_save", "get_finished", "get_block_ids_with_load_errors",
)  # fmt: skip
for _name in (*SCHEDULER_SIDE, *WORKER_SIDE):
    setattr(Witness, _name, _noting(_name))


def names(connector: Witness, wanted=SCHEDULER_SIDE[:-2]) -> list[str]:
    return [call[0] for call in connector.calls if call[0] in wanted]


def with_stored_prompt(num_tokens: int = 9, **options) -> Scene:
    settings = {name: options.pop(name) for name in list(options) if name in ("max_num_seqs", "num_blocks")}
    scene = Scene(connector=Witness(4, **options), enable_prefix_caching=False, **settings)
    scene.add("before", range(num_tokens), max_tokens=1)
    while scene.scheduler.has_unfinished_requests() or scene.scheduler.has_finished_requests():
        scene.step()
    scene.connector.calls.clear()
    return scene


@row("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta")
def test_a_load_is_asked_for_then_given_blocks_then_told_to_the_worker():
    scene = with_stored_prompt()
    request = scene.add("a", range(9))
    plan = scene.plan()
    _, asked, allocated, built = [call for call in scene.connector.calls if call[0] != "leases_renewed"]
    assert asked == ("get_num_new_matched_tokens", request, 0)
    table = plan.scheduled_new_reqs[0].block_ids[0].tolist()
    assert allocated == ("update_state_after_alloc", request, table, 8)
    assert built[0] == "build_connector_meta"
    scene.apply(plan)
    scene.finish()
    scene.check_naive()
    assert names(scene.connector).count("get_num_new_matched_tokens") == 1
    assert names(scene.connector).count("update_state_after_alloc") == 1


@row("get_num_new_matched_tokens")
def test_asking_may_be_repeated_and_none_means_later():
    scene = with_stored_prompt()
    answers = iter([(None, False), (None, False), (8, False)])
    scene.connector.get_num_new_matched_tokens = lambda request, num_computed: (
        FaultyConnector.get_num_new_matched_tokens(scene.connector, request, num_computed) and next(answers)
    )
    scene.add("a", range(9))
    assert [scene.step() for _ in range(3)] == [{}, {}, {"a": 1}]
    scene.finish()
    scene.check_naive()


@row("update_state_after_alloc")
def test_blocks_of_an_asynchronous_load_are_told_when_it_begins():
    scene = with_stored_prompt(load_steps=2)
    request = scene.add("a", range(9))
    scene.step()
    (told,) = [call for call in scene.connector.calls if call[0] == "update_state_after_alloc"]
    assert told[1] is request
    assert (len(told[2]), told[3]) == (2, 8)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    scene.finish()
    scene.check_naive()


@row("build_connector_meta")
def test_metadata_is_built_once_for_every_plan_also_for_one_without_tokens():
    scene = Scene(connector=Witness(4))
    scene.add("a", range(9), max_tokens=3)
    num_plans = 0
    while scene.scheduler.has_requests():
        plan = scene.plan()
        num_plans += 1
        assert names(scene.connector, ("build_connector_meta",)) == ["build_connector_meta"] * num_plans
        scene.apply(plan)
    assert num_plans == 4


def _abort(scene, *names):
    scene.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    scene.finish()


def _run(scene, count):
    for _ in range(count):
        scene.step()


def _preempt(scene):
    while "a" not in scene.runner.slot_of:
        scene.step()
    preempt(scene.scheduler, scene.runner.slot_of["a"])


def _stop_token(scene):
    stop = naive_generation(list(range(9)), 2, set())[1]
    scene.add("a", range(9), stop_token_ids=(stop,))
    scene.finish()


def _abort_waiting(scene):
    scene.add("a", range(9))
    _abort(scene, "a")


def _abort_running(scene):
    scene.add("a", range(9))
    _run(scene, 2)
    _abort(scene, "a")


def _abort_in_flight(scene):
    scene.add("a", range(9))
    plan = scene.plan()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scene.apply(plan)
    scene.finish()


def _abort_preempted(scene):
    scene.add("a", range(9))
    _preempt(scene)
    _abort(scene, "a")


def _abort_loading(scene):
    scene.connector.never_answer_next_loads(1)
    scene.add("a", range(9))
    _run(scene, 1)
    _abort(scene, "a")


def _abort_compiling(scene):
    scene.add("a", range(9), structured_outputs=CLASSES)
    _abort(scene, "a")


def _bad_grammar(scene):
    scene.add("a", range(9), structured_outputs=BAD)
    scene.finish(max_steps=100_000)


def _abort_follower(scene):
    scene.add("leader", range(9))
    scene.add("a", range(9), shares_prompt_with="leader")
    _abort(scene, "a")


def _time_out(scene):
    scene.add("a", range(9), timeout=5.0)
    scene.step()
    scene.clock.advance(6)
    scene.finish()


def _fault(scene):
    scene.add("a", range(9))
    scene.runner.fail.add("a")
    scene.finish()


def _lost_step(scene):
    scene.add("a", range(9))
    scene.plan()
    scene.step()
    scene.clock.advance(31)  # a load that was lost with the step is given up
    scene.finish()


def _preempted_and_done(scene):
    scene.add("a", range(9))
    _preempt(scene)
    scene.finish()


def _beams(scene):
    scene.add("a", range(9), beam_width=3, n=2, logprobs=3, beam_sequence_ids=("a", "a1"))
    scene.finish()


def _beams_aborted(scene):
    scene.add("a", range(9), beam_width=3, n=2, logprobs=3, beam_sequence_ids=("a", "a1"))
    _run(scene, 2)
    _abort(scene, "a")


def _failed_load(scene):
    scene.connector.fail_next_loads(1)
    scene.add("a", range(9))
    scene.finish()


def _shutdown(scene):
    scene.add("a", range(9))
    scene.step()
    scene.scheduler.shutdown()


PATHS = [
    _stop_token, _abort_waiting, _abort_running, _abort_in_flight, _abort_preempted, _abort_loading,
    _abort_compiling, _bad_grammar, _abort_follower, _time_out, _fault, _lost_step, _preempted_and_done,
    _beams, _beams_aborted, _failed_load, _shutdown,
]  # fmt: skip


@row("request_finished exactly once")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
@pytest.mark.parametrize("load_steps", [0, 1])
def test_a_request_is_finished_exactly_once_on_every_path(path, load_steps):
    connector = Witness(4, load_steps=load_steps)
    scene = Scene(num_blocks=30, connector=connector, grammars=GatedGrammars(), enable_prefix_caching=False)
    scene.add("before", range(9), max_tokens=1)
    scene.finish()
    path(scene)
    ended = [call[1] for call in connector.calls if call[0] == "request_finished"]
    assert [request.request_id for request in ended].count("a") == 1
    assert len(ended) == len(scene.requests)
    assert all(request.status >= RequestStatus.FINISHED_STOPPED for request in ended)


@row("request_finished exactly once")
def test_a_request_that_was_refused_is_not_finished():
    scene = Scene(connector=Witness(4), num_blocks=2)
    with pytest.raises(ValueError, match="num_kv_blocks"):
        scene.add("a", range(9))
    scene.step()
    assert "request_finished" not in names(scene.connector)


@row("request_finished: delay_free and kv_transfer_params", "SchedulerOutput: KV-connector metadata")
def test_blocks_are_held_and_the_client_is_told_where_they_are():
    scene = Scene(connector=Witness(4, send_steps=2))
    scene.add("a", range(9), max_tokens=1)
    plan = scene.plan()
    table = plan.scheduled_new_reqs[0].block_ids[0].tolist()
    scene.apply(plan)
    assert scene.ends["a"].kv_transfer_params == {"request_id": "a", "block_ids": table}
    assert np.count_nonzero(scene.scheduler.accounts.kv.pools.first.reference_counts(np.array(table))) == 3
    scene.finish()


@row("lends_prompt")
@pytest.mark.parametrize("send_steps", [None, 2])
def test_groups_with_windows_keep_what_is_seen_behind_a_prompt_that_is_lent(send_steps):
    windows = (WindowBlocks(4, 16),)
    scene = Scene(connector=Witness(4, send_steps=send_steps, by_group=True), windows=windows)
    scene.add("a", range(13), max_tokens=20)
    while scene.scheduler.has_unfinished_requests():
        scene.step()
    ((_, _, table),) = [call for call in scene.connector.calls if call[0] == "request_finished"]
    assert (table[1, 2:3] == NULL_BLOCK).all() == (send_steps is None)
    assert (table[1, :2] == NULL_BLOCK).all()
    scene.finish()
    scene.check_naive()


@row("cancel_load")
def test_a_load_is_cancelled_when_its_request_ends_or_waits_too_long():
    scene = with_stored_prompt(load_steps=1)
    scene.connector.never_answer_next_loads(2)
    scene.add("aborted", range(9))
    scene.add("late", range(9))
    scene.step()
    scene.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    scene.clock.advance(31)
    scene.finish()
    cancelled = [call[1] for call in scene.connector.calls if call[0] == "cancel_load"]
    assert cancelled == ["aborted", "late"]
    scene.check_naive("late")


@row("leases_renewed", "blocks lent to a peer are leased, with a deadline and heartbeats")
@pytest.mark.parametrize("alive", [True, False])
def test_a_lease_lives_as_long_as_its_heartbeats(alive):
    scene = Scene(
        connector=Witness(4, send_steps=1000, is_peer_alive=alive), kv_transfer_timeout=10.0, num_blocks=8
    )
    scene.add("a", range(9), max_tokens=1)
    scene.step()
    scene.step()
    for _ in range(3):
        scene.clock.advance(8)
        scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == (3 if alive else 0)
    scene.connector.is_peer_alive = False
    scene.clock.advance(11)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 0


@row("request_arrived", "lease_ended")
def test_the_connector_hears_of_every_request_first_and_of_every_lease_last():
    scene = Scene(connector=Witness(4, send_steps=1))
    scene.add("a", range(9), max_tokens=1)
    assert scene.connector.calls[-1][0] == "request_arrived"
    while scene.scheduler.has_requests():
        scene.step()
    told = [call[0] for call in scene.connector.calls if call[0] in SCHEDULER_SIDE]
    assert told.index("request_arrived") < told.index("get_num_new_matched_tokens")
    assert told.index("request_finished") < told.index("lease_ended")
    assert [call for call in scene.connector.calls if call[0] == "lease_ended"] == [("lease_ended", "a")]


@row("reset")
def test_the_connector_is_reset_if_asked_for():
    scene = with_stored_prompt()
    assert scene.scheduler.reset_prefix_cache()
    assert "reset" not in names(scene.connector)
    assert scene.scheduler.reset_prefix_cache(reset_connector=True)
    assert names(scene.connector).count("reset") == 1
    scene.add("a", range(9))
    assert scene.step() == {"a": 9}


# -- the connector's worker side ---------------------------------------------------------------------------


@row("register_kv_caches", "start_load_kv", "wait_for_save", "get_finished", "get_block_ids_with_load_errors")
def test_the_worker_side_takes_part_in_every_step_with_that_steps_metadata():
    scene = Scene(connector=Witness(4))
    assert names(scene.connector, WORKER_SIDE) == ["register_kv_caches"]
    scene.add("a", range(9), max_tokens=2)
    while scene.scheduler.has_requests():
        scene.connector.calls.clear()
        plan = scene.plan()
        scene.apply(plan)
        calls = {call[0]: call[1:] for call in scene.connector.calls}
        assert calls["start_load_kv"] == (plan.kv_connector_metadata,)
        assert calls["get_finished"] == (plan.finished_req_ids,)
        assert {"wait_for_save", "get_block_ids_with_load_errors"} <= set(calls)


@row("get_finished", "get_block_ids_with_load_errors")
def test_each_end_and_each_failure_is_reported_once():
    scene = with_stored_prompt(load_steps=1)
    scene.connector.fail_next_loads(1, num_good_blocks=1)
    scene.add("a", range(9))
    reports = []
    while scene.scheduler.has_requests():
        plan = scene.plan()
        computed = scene.compute(plan)
        reports.append(computed.kv_connector_output)
        scene.apply(plan, computed)
    assert sum("a" in report.finished_receiving for report in reports) == 1
    assert sum(len(report.failed_block_ids) for report in reports) == 1
    assert scene.scheduler.make_stats().num_loaded_tokens == 4
    scene.check_naive()
