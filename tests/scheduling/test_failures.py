"""What raises or fails may not lose a request, a block or a promise: policies, connectors, steps."""

from __future__ import annotations

import dataclasses

import pytest
from fake_grammar import FakeGrammarBackend
from fake_runner import naive_generation
from scene import Scene

from faulty_connector import FaultyConnector
from quire.scheduling.interface import StepWithdrawnError
from quire.status import FinishReason, RequestStatus
from quire.step import NO_TOKEN
from quire.structured_outputs import StructuredOutputsParams


class Failing(FaultyConnector):
    """Raises in the calls that it is told to, and knows nothing of `unsure`."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.fails: set[tuple[str, str]] = set()  # (call, request id)

    def _raise_if_told(self, call, request_id=""):
        if (call, request_id) in self.fails:
            raise RuntimeError("the network is gone")

    def request_arrived(self, request):
        self._raise_if_told("arrive", request.request_id)

    def lease_ended(self, request_id):
        self._raise_if_told("lease", request_id)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._raise_if_told("find", request.request_id)
        if request.request_id == "unsure":
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self._raise_if_told("load", request.request_id)
        super().update_state_after_alloc(request, block_ids, num_external_tokens)

    def cancel_load(self, request_id):
        super().cancel_load(request_id)
        self._raise_if_told("cancel", request_id)

    def build_connector_meta(self, scheduler_output):
        self._raise_if_told("metadata")
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request, block_ids):
        self._raise_if_told("end", request.request_id)
        return super().request_finished(request, block_ids)

    def leases_renewed(self):
        self._raise_if_told("renew")
        return super().leases_renewed()

    def reset(self):
        self._raise_if_told("reset")
        return super().reset()


def three_stored(**options) -> Scene:
    """A scene whose connector has the prompts of three requests that are about to start."""
    settings = options.pop("scene_settings", {})
    scene = Scene(connector=Failing(4, **options), num_blocks=40, enable_prefix_caching=False, **settings)
    for name in ("before", ""):
        for number in range(3):
            scene.add(f"{name}{number}", range(10 * number, 10 * number + 9))
        if name:
            scene.finish()
    return scene


def test_a_request_that_a_connector_fails_to_look_up_is_computed(caplog):
    scene = three_stored()
    scene.connector.fails = {("find", "1")}
    assert scene.step() == {"0": 1, "1": 9, "2": 1}
    scene.finish()
    scene.check_naive()
    assert "'1'" in caplog.text


@pytest.mark.parametrize("load_steps", [0, 1])
def test_a_connector_that_fails_to_begin_a_load_costs_only_that_load(load_steps):
    scene = three_stored(load_steps=load_steps)
    scene.connector.fails = {("load", "1")}
    scene.finish()
    scene.check_naive()
    assert [scene.cached[name] for name in "012"] == [8, 0, 8]
    stats = scene.scheduler.make_stats()
    assert (stats.num_failed_loads, stats.num_loaded_tokens) == (1, 16)


@pytest.mark.parametrize("load_steps", [0, 1])
def test_a_load_that_cannot_begin_ends_its_request_if_so_configured(load_steps):
    scene = three_stored(load_steps=load_steps, scene_settings={"kv_load_failure": "fail"})
    scene.connector.fails = {("load", "1")}
    scene.finish()
    assert "KV of this request could not be loaded" in scene.errors["1"]
    scene.check_naive("0", "2")


def test_a_connector_that_fails_to_cancel_a_load_keeps_nobody_from_ending():
    scene = three_stored(load_steps=3)
    scene.step()
    scene.connector.fails = {("cancel", "1")}
    scene.scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    scene.finish()
    scene.check_naive("0", "2")


@pytest.mark.parametrize("overlap_steps", [False, True])
def test_a_step_without_metadata_is_taken_back_and_told_again(overlap_steps):
    scene = three_stored(scene_settings={"overlap_steps": overlap_steps})
    first = scene.plan()
    if not overlap_steps:
        scene.apply(first)
    scene.scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    scene.connector.fails = {("metadata", "")}
    with pytest.raises(StepWithdrawnError, match="connector"):
        scene.scheduler.schedule()
    scene.scheduler.check_invariants()
    scene.connector.fails = set()
    if overlap_steps:
        scene.apply(first)
    scene.finish()
    scene.check_naive("1", "2")


def test_a_connector_that_fails_to_name_the_living_peers_stops_no_step():
    scene = three_stored()
    scene.connector.fails = {("renew", "")}
    scene.finish()
    scene.check_naive()


def test_a_connector_that_fails_to_reset_is_not_reset():
    scene = three_stored()
    scene.finish()
    scene.connector.fails = {("reset", "")}
    assert not scene.scheduler.reset_prefix_cache(reset_connector=True)
    assert scene.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("load_steps", [0, 2])
@pytest.mark.parametrize("raises", [False, True])
def test_a_reset_that_the_connector_refuses_disturbs_nobody(load_steps, raises):
    scene = three_stored(load_steps=load_steps)
    scene.add("running", range(50, 59), max_tokens=9)
    scene.step()
    if raises:
        scene.connector.fails = {("reset", "")}
    else:
        scene.connector.reset = lambda: False
    assert not scene.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    scene.finish()
    scene.check_naive()
    stats = scene.scheduler.make_stats()
    assert (stats.num_preemptions, stats.num_loaded_tokens) == (0, 24)


def test_no_reset_while_a_peer_reads_what_was_promised():
    connector = FaultyConnector(4, send_steps=2)
    scene = Scene(connector=connector)
    scene.add("sent", range(9), max_tokens=1)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks
    assert not scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    scene.finish_but_pins()
    assert scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    scene.check_nothing_is_held()


def test_a_connector_that_raises_when_a_request_arrives_or_its_lease_ends_changes_nothing(caplog):
    connector = Failing(4, send_steps=2)
    connector.fails = {("arrive", "a"), ("lease", "a")}
    scene = Scene(connector=connector)
    scene.add("a", range(9), max_tokens=2)
    scene.finish()
    scene.check_naive("a")
    scene.check_nothing_is_held()
    assert "when request 'a' arrived" in caplog.text
    assert "the lease of request 'a' ended" in caplog.text


def test_a_connector_that_raises_at_a_requests_end_takes_no_answer_away(caplog):
    connector = Failing(4)
    connector.fails = {("end", "b")}
    scene = Scene(connector=connector)
    for name, prompt in (("a", range(5)), ("b", range(10, 15)), ("c", range(20, 25))):
        scene.add(name, prompt, max_tokens=2)
    scene.finish()
    assert scene.reasons == dict.fromkeys("abc", FinishReason.LENGTH)
    assert "'b'" in caplog.text


def test_a_pin_holds_what_can_be_found_and_is_not_ended_early_by_another():
    scene = Scene(num_blocks=12, max_num_batched_tokens=64)
    scene.add("first", range(9), max_tokens=1)
    scene.add("same", range(9), max_tokens=1, pin_prefix=1000.0)
    scene.finish_but_pins()
    scene.add("brief", range(9), max_tokens=1, pin_prefix=1.0)
    scene.finish_but_pins()
    scene.clock.advance(5)
    for number in (30, 31):
        scene.add(f"churn {number}", [number] * 30, max_tokens=8)
        scene.finish_but_pins()
    scene.add("later", range(9), max_tokens=1)
    scene.finish_but_pins()
    assert scene.cached["later"] == 8


def test_nobody_starts_on_blocks_that_the_first_waits_for():
    """The first in order lacks a block that a peer still reads; a newcomer would only be preempted for it."""
    connector = FaultyConnector(4, send_steps=1, is_peer_alive=False)
    scene = Scene(num_blocks=6, connector=connector, max_num_seqs=2)
    scene.add("sent", range(12), max_tokens=1)
    while scene.scheduler.has_unfinished_requests():
        scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks
    scene.add("first", range(20, 26), max_tokens=14)
    scene.add("second", range(30, 34), max_tokens=4)
    for _ in range(12):
        scene.step()
    assert scene.scheduler.make_stats().num_preemptions <= 1
    for _ in range(4):  # what ends is sent to the dead peer too
        scene.clock.advance(scene.config.kv_transfer_timeout + 1)
        for _ in range(20):
            scene.step()
    scene.check_nothing_is_held()
    assert scene.outputs["first"] == naive_generation(list(range(20, 26)), 14, set())
    assert scene.outputs["second"] == naive_generation(list(range(30, 34)), 4, set())


def test_a_refused_reset_breaks_no_pin():
    scene = Scene()
    scene.add("pinned", range(9), max_tokens=1, pin_prefix=1000.0)
    scene.finish_but_pins()
    scene.add("running", range(20, 29), max_tokens=4)
    scene.step()
    assert not scene.scheduler.reset_prefix_cache()
    assert scene.scheduler.make_stats().num_leased_blocks == 2
    scene.finish_but_pins()
    assert scene.scheduler.reset_prefix_cache()
    scene.check_nothing_is_held()


# -- runners that return something else ---------------------------------------------------------------------


def without_sample(computed, *request_ids):
    sampled = computed.sampled_token_ids.copy()
    sampled[[computed.request_ids.index(name) for name in request_ids]] = NO_TOKEN
    return dataclasses.replace(computed, sampled_token_ids=sampled)


def test_a_grammar_that_cannot_be_followed_is_the_requests_own_fault():
    scene = Scene(grammars=FakeGrammarBackend())
    for name, pattern in (("bad", "bad-0-6"), ("dies", "dies-0-6"), ("good", "good-0-6")):
        spec = StructuredOutputsParams(regex=pattern)
        scene.add(name, range(5), max_tokens=9, structured_outputs=spec)
    scene.finish(max_steps=100_000)
    ends = {name: (end.error_type, end.error_param) for name, end in scene.ends.items()}
    fault = ("InvalidRequestError", "structured_outputs")
    assert ends == {"bad": fault, "dies": fault, "good": ("", None)}
    assert scene.outputs["dies"], "it fails on the way"


@pytest.mark.parametrize("param", [None, "allowed_token_ids"])
def test_a_parameter_that_is_at_fault_is_named(param):
    scene = Scene()
    scene.runner.param_at_fault = param
    scene.add("plain", range(5))
    scene.add("search", range(5), beam_width=2, logprobs=2, n=2, beam_sequence_ids=("beam.0", "beam.1"))
    scene.step()
    scene.runner.fail |= set(scene.runner.slot_of)
    scene.finish()
    fault = ("", None) if param is None else ("InvalidRequestError", param)
    ends = {name: (end.error_type, end.error_param) for name, end in scene.ends.items()}
    assert ends == dict.fromkeys(("plain", "beam.0", "beam.1"), fault)


@pytest.mark.parametrize("step", [0, 1])
def test_a_request_that_gets_no_token_ends_with_the_reason(step):
    scene = Scene()
    scene.add("a", range(5))
    scene.add("b", range(10, 15))
    for _ in range(step):
        scene.step()
    plan = scene.plan()
    scene.apply(plan, without_sample(scene.compute(plan), "a"))
    assert "returned no token" in scene.errors["a"]
    scene.finish()
    scene.check_naive("b")


def test_a_request_that_gets_no_token_while_the_next_step_is_planned_ends_too():
    scene = Scene(overlap_steps=True)
    scene.add("a", range(5))
    first = scene.plan()
    computed = scene.compute(first)
    second = scene.plan()
    also = scene.compute(second)
    scene.apply(first, without_sample(computed, "a"))
    scene.apply(second, also)
    assert "returned no token" in scene.errors["a"]
    scene.finish()


def test_a_search_whose_beam_gets_no_candidates_ends_with_the_reason():
    scene = Scene()
    scene.add("a", range(5), beam_width=2, logprobs=2, n=2, beam_sequence_ids=("a.0", "a.1"))
    plan = scene.plan()
    scene.apply(plan, dataclasses.replace(scene.compute(plan), logprobs={}))
    assert "returned no token" in scene.errors["a.0"]
    assert "returned no token" in scene.errors["a.1"]
    scene.finish()


@pytest.mark.parametrize("fault", ["order", "missing", "rows"])
def test_an_output_of_other_requests_fails_the_step(fault):
    scene = Scene()
    scene.add("a", range(5))
    scene.add("b", range(10, 15))
    plan = scene.plan()
    computed = scene.compute(plan)
    match fault:
        case "order":
            computed = dataclasses.replace(computed, request_ids=["b", "a"])
        case "missing":
            computed = dataclasses.replace(computed, request_ids=["a"])
        case "rows":
            computed = dataclasses.replace(computed, sampled_token_ids=computed.sampled_token_ids[:1])
    scene.apply(plan, computed)
    scene.finish()
    scene.check_naive("a")
    scene.check_naive("b")


def test_an_error_of_a_request_that_has_ended_is_not_that_of_its_namesake():
    scene = Scene(overlap_steps=True)
    scene.add("a", range(5))
    first = scene.plan()
    scene.runner.fail = {"a"}
    computed = scene.compute(first)
    scene.runner.fail = set()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scene.add("a", range(20, 25), beam_width=2, logprobs=2, n=1)
    second = scene.plan()
    assert "a" in second.request_ids
    also = scene.compute(second)
    scene.apply(first, computed)
    scene.apply(second, also)
    scene.finish()
    assert scene.reasons["a"] is FinishReason.LENGTH
