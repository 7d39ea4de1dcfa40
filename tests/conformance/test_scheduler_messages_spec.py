"""The scheduler's specification, section 1: statuses, finish reasons, what passes to and from the runner."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import row
from fake_runner import naive_generation
from scene import BAD, CLASSES, GatedGrammars, Scene

from faulty_connector import FaultyConnector
from quire.status import FinishReason, RequestStatus
from quire.step import PositionLogprobs

# -- statuses and reasons ----------------------------------------------------------------------------------


@row("WAITING", "RUNNING", "PREEMPTED", "FINISHED_LENGTH_CAPPED", "reason length")
def test_the_statuses_on_the_usual_way():
    scene = Scene(num_blocks=6, enable_prefix_caching=False)
    scene.add("old", range(8), max_tokens=12)
    request = scene.add("a", range(20, 28), max_tokens=12)
    seen = [request.status]
    while scene.scheduler.has_requests():
        scene.step()
        if request.status is not seen[-1]:
            seen.append(request.status)
    assert [status.name for status in seen] == [
        "WAITING",
        "RUNNING",
        "PREEMPTED",
        "RUNNING",
        "FINISHED_LENGTH_CAPPED",
    ]
    assert scene.reasons["a"] is FinishReason.LENGTH
    scene.check_naive()


@row("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "FINISHED_ERROR", "reason error")
def test_the_status_of_a_request_whose_grammar_compiles():
    grammars = GatedGrammars(is_open=False)
    scene = Scene(grammars=grammars)
    good = scene.add("good", range(4), structured_outputs=CLASSES)
    bad = scene.add("bad", range(4), structured_outputs=BAD)
    scene.step()
    assert good.status is bad.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    grammars.gate.set()
    scene.finish(max_steps=100_000)
    assert good.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert bad.status is RequestStatus.FINISHED_ERROR
    assert (scene.reasons["bad"], scene.errors["bad"]) == (FinishReason.ERROR, "the pattern is bad")


@row("WAITING_FOR_REMOTE_KVS", "ModelRunnerOutput: finished receiving")
def test_the_status_of_a_request_whose_kv_is_on_its_way():
    scene = Scene(connector=FaultyConnector(4, load_steps=2), enable_prefix_caching=False)
    scene.add("before", range(9), max_tokens=1)
    scene.finish()
    request = scene.add("a", range(9))
    scene.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    scene.step()
    assert request.status is RequestStatus.WAITING, "it has been received"
    assert scene.step() == {"a": 1}
    scene.finish()
    scene.check_naive()


@row("FINISHED_STOPPED", "reason stop")
def test_the_status_after_a_stop_token():
    prompt = list(range(5))
    stop = naive_generation(prompt, 2, set())[1]
    scene = Scene()
    request = scene.add("a", prompt, max_tokens=9, stop_token_ids=(stop,))
    scene.finish()
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert (scene.reasons["a"], scene.ends["a"].stop_reason) == (FinishReason.STOP, stop)


@row("FINISHED_IGNORED")
def test_the_status_of_a_request_that_is_passed_over():
    scene = Scene()
    scene.add("a", range(5))
    (request,) = scene.scheduler.finish_requests("a", RequestStatus.FINISHED_IGNORED)
    assert request.status is RequestStatus.FINISHED_IGNORED
    assert FinishReason.of(request.status) is FinishReason.LENGTH


@row("reason stop", "reason length", "reason abort", "reason error")
def test_every_end_has_a_reason_and_nothing_else_has():
    assert {reason.value for reason in FinishReason} == {"stop", "length", "abort", "error"}
    for status in RequestStatus:
        if status >= RequestStatus.FINISHED_STOPPED:
            assert FinishReason.of(status) in FinishReason
        else:
            with pytest.raises(KeyError):
                FinishReason.of(status)


# -- what passes between scheduler and runner --------------------------------------------------------------


@row(
    "SchedulerOutput: new requests, full data, sent once",
    "SchedulerOutput: cached requests, the difference only",
)
def test_a_request_is_sent_whole_once_and_then_only_what_changed():
    scene = Scene()
    request = scene.add("a", range(6), max_tokens=8, stop_token_ids=(77,))
    plan = scene.plan()
    (new,) = plan.scheduled_new_reqs
    assert (new.request_id, list(new.prompt_token_ids)) == ("a", list(range(6)))
    assert new.sampling_params == request.sampling_params
    assert (new.block_ids.shape, new.num_computed_tokens) == ((1, 2), 0)
    scene.apply(plan)
    num_blocks = 2
    while scene.scheduler.has_unfinished_requests():
        plan = scene.plan()
        assert plan.scheduled_new_reqs == []
        changed = plan.scheduled_cached_reqs
        assert changed.block_index.tolist() == list(
            range(num_blocks, num_blocks + changed.block_ids.shape[1])
        )
        num_blocks += changed.block_ids.shape[1]
        scene.apply(plan)
    assert num_blocks == 4


@row("SchedulerOutput: num_scheduled_tokens", "SchedulerOutput: total_num_scheduled_tokens")
def test_the_tokens_of_a_step_by_request_and_in_all():
    scene = Scene()
    scene.add("a", range(6))
    scene.add("b", range(3))
    plan = scene.plan()
    assert plan.num_scheduled_tokens == {"a": 6, "b": 3}
    assert plan.total_num_scheduled_tokens == 9
    assert (list(plan.num_scheduled_tokens), len(plan.num_scheduled_tokens)) == (["a", "b"], 2)
    assert "c" not in plan.num_scheduled_tokens


@row("SchedulerOutput: preempted ids", "SchedulerOutput: cached requests, the difference only")
def test_preempted_ids_and_what_comes_back_are_named():
    scene = Scene(num_blocks=6, enable_prefix_caching=False)
    scene.add("old", range(8), max_tokens=12)
    scene.add("new", range(20, 28), max_tokens=12)
    preempted, resumed = [], []
    while scene.scheduler.has_requests():
        plan = scene.plan()
        preempted += plan.preempted_req_ids
        resumed += [data.request_id for data in plan.scheduled_cached_reqs.resumed]
        scene.apply(plan)
    assert preempted == resumed != []
    assert set(preempted) == {"new"}


@row("SchedulerOutput: KV-connector metadata")
def test_a_plan_carries_the_connectors_metadata():
    connector = FaultyConnector(4)
    scene = Scene(connector=connector)
    scene.add("a", range(9), max_tokens=1)
    built = []
    build = connector.build_connector_meta
    connector.build_connector_meta = lambda plan: built.append(build(plan)) or built[-1]
    assert scene.plan().kv_connector_metadata is built[0]
    assert Scene().plan().kv_connector_metadata is None


@row("SchedulerOutput: block copies")
def test_copies_on_write_are_named():
    scene = Scene(enable_prefix_caching=False)
    scene.add("a", range(6))
    scene.add("b", range(6), shares_prompt_with="a")
    scene.step()
    source = scene.runner.tables[scene.runner.slot_of["a"]][1]
    plan = scene.plan()
    ((copied, target),) = plan.block_copies[:, :, 0].tolist()
    assert (copied, target) == (source, plan.scheduled_new_reqs[0].block_ids[0, 1])
    scene.apply(plan)
    scene.finish()
    scene.check_naive()


@row("ModelRunnerOutput: request ids", "ModelRunnerOutput: sampled token ids", "ModelRunnerOutput: drafts")
def test_none_to_k_tokens_for_each_request_and_drafts_for_the_next_step():
    scene = Scene(max_num_batched_tokens=12, draft_length=lambda num_running: 3, draft_accuracy=1.0)
    scene.add("a", range(5), max_tokens=30)
    scene.step()
    scene.add("b", range(30, 50))
    counts = set()
    for _ in range(6):
        plan = scene.plan()
        computed = scene.compute(plan)
        assert computed.request_ids == plan.request_ids
        counts |= set(np.count_nonzero(computed.sampled_token_ids >= 0, axis=1).tolist())
        scene.apply(plan, computed)
    assert {0, 1} < counts
    assert max(counts) <= 4
    scene.finish()
    scene.check_naive()


@row("ModelRunnerOutput: logprobs", "ModelRunnerOutput: prompt logprobs")
def test_log_probabilities_are_passed_on():
    scene = Scene()
    scene.add("a", range(5), logprobs=2)
    plan = scene.plan()
    computed = scene.compute(plan)
    computed.prompt_logprobs["a"] = [PositionLogprobs([1], [-0.5], [1])]
    messages = scene.scheduler.update_from_output(plan, computed)
    (output,) = messages[0].outputs
    assert output.logprobs == computed.logprobs["a"]
    assert output.prompt_logprobs == computed.prompt_logprobs["a"]


@row("ModelRunnerOutput: errors", "FINISHED_ERROR", "reason error")
def test_an_error_ends_the_request_that_it_names():
    scene = Scene()
    sick = scene.add("sick", range(5))
    scene.add("well", range(5))
    scene.runner.fail.add("sick")
    scene.finish()
    assert sick.status is RequestStatus.FINISHED_ERROR
    assert scene.errors["sick"] == "broken"
    scene.check_naive("well")


@row("ModelRunnerOutput: finished sending")
def test_blocks_are_free_when_the_runner_says_that_they_were_sent():
    scene = Scene(connector=FaultyConnector(4, send_steps=2))
    scene.add("a", range(9), max_tokens=1)
    scene.step()
    assert scene.scheduler.get_kv_cache_usage() > 0
    scene.step()
    assert scene.scheduler.get_kv_cache_usage() > 0
    scene.step()
    assert scene.scheduler.get_kv_cache_usage() == 0


@row("ModelRunnerOutput: failed blocks")
def test_nothing_is_built_on_blocks_that_could_not_be_loaded():
    connector = FaultyConnector(4)
    scene = Scene(connector=connector, enable_prefix_caching=False)
    scene.add("before", range(9), max_tokens=1)
    scene.finish()
    connector.fail_next_loads(1)
    scene.add("a", range(9))
    plan = scene.plan()
    computed = scene.compute(plan)
    assert len(computed.kv_connector_output.failed_block_ids) == 2
    scene.apply(plan, computed)
    assert scene.outputs["a"] == []
    scene.finish()
    scene.check_naive()
