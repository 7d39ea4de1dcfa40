"""A scheduler with only the methods of vLLM's and eSurge's interfaces, and such ones that raise or lie."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path

import pytest

from engine_checks import core_of, requests_of
from faulty_scheduler import FaultyScheduler, OneByOne
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.messages import AbortRequests
from quire.errors import InvalidRequestError, QuireError
from quire.scheduling import PauseState, SchedulerInterface
from quire.status import RequestStatus

OPTIONS = {"num_kv_blocks": 64, "max_num_seqs": 2, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def tokens(**options) -> list[list[int]]:
    with LLM("mini", **OPTIONS, **options) as llm:
        outputs = llm.generate([f"word {index}" for index in range(3)], GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("captured", [False, True])
def test_it_serves_as_quires_own_does(captured: bool, tmp_path: Path):
    options = {"record_path": str(tmp_path / "run")} if captured else {}
    assert tokens(scheduler_cls=OneByOne, **options) == tokens()


def test_abstract_is_what_both_interfaces_ask_for():
    assert SchedulerInterface.__abstractmethods__ == {
        "schedule", "update_from_output", "add_request", "finish_requests", "get_num_unfinished_requests",
        "has_finished_requests", "get_request_counts", "reset_prefix_cache",
    }  # fmt: skip


def test_what_it_cannot_do_is_refused_by_name():
    with LLM("mini", scheduler_cls=OneByOne, **OPTIONS) as llm:
        choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
        with pytest.raises(InvalidRequestError, match=r"does not define get_grammar_bitmask\(\)"):
            llm.generate(["a"], choice)
        assert llm.reset_prefix_cache() is True
        core = core_of(llm)
        scheduler = core.scheduler
        assert core.explain("x") == "OneByOne does not say what a request does or waits for"
        assert scheduler.pause_state is PauseState.UNPAUSED
        scheduler.set_pause_state(PauseState.UNPAUSED)
        with pytest.raises(InvalidRequestError, match=r"OneByOne cannot be paused: .*set_pause_state"):
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for ask in (
            scheduler.reset_encoder_cache, scheduler.get_kv_event_publisher_config,
            scheduler.get_kv_connector, scheduler.make_stats, scheduler.oldest_waiting_request,
        ):  # fmt: skip
            assert ask() is None
        assert scheduler.get_kv_cache_usage() == 0.0
        assert not scheduler.has_request("x")


def test_aborted_requests_end_though_nothing_is_returned():
    with LLM("mini", scheduler_cls=OneByOne, **OPTIONS) as llm:
        llm.wait_until_ready()
        live, core = requests_of(llm), core_of(llm)
        states = [live.submit(live.inputs.process("a", GREEDY)) for _ in range(3)]
        core.step()
        ended = core.withdraw(states[0].live_sequence_ids, RequestStatus.FINISHED_ABORTED)
        assert [output.finish_reason.name for output in ended] == ["ABORT"]
        live.client.send(AbortRequests([*states[1].live_sequence_ids, "unknown"]))
        assert core.scheduler.get_num_unfinished_requests() == 1


def test_a_request_whose_step_cannot_be_computed_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FaultyScheduler, "faulty", "get_grammar_bitmask")
    with LLM("mini", scheduler_cls=FaultyScheduler, **OPTIONS) as llm:
        (output,) = llm.generate(["a"], GREEDY)
        assert "get_grammar_bitmask is broken" in output.outputs[0].error


METHODS = sorted(
    name
    for name, method in vars(SchedulerInterface).items()
    if inspect.isfunction(method) and not name.startswith("_")
)


@pytest.fixture(scope="module")
def llm():
    with LLM("mini", scheduler_cls=FaultyScheduler, **OPTIONS) as llm:
        llm.wait_until_ready()
        yield llm


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("lies", [False, True], ids=["raises", "lies"])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "get_grammar_bitmask"])
def test_a_fault_in_any_call_ends_no_engine(llm, name: str, lies: bool, monkeypatch: pytest.MonkeyPatch):
    """Requests of the faulty time end, well or with an error, and those that come later are served."""
    live, core = requests_of(llm), core_of(llm)
    monkeypatch.setattr(FaultyScheduler, "lies", lies)
    monkeypatch.setattr(FaultyScheduler, "faulty", name)
    aborted = live.submit(live.inputs.process("a", GREEDY))
    live.abort(aborted.request_id)
    for ask in (llm.reset_prefix_cache, core.stats, lambda: core.explain("x"), core.next_due):
        with contextlib.suppress(QuireError, RuntimeError):
            ask()
    try:
        outputs = llm.generate(["a", "b", "c"], GREEDY)
    except QuireError as error:
        assert name == "add_request", error
    else:
        assert all(output.finished for output in outputs)
    monkeypatch.setattr(FaultyScheduler, "faulty", "")
    core.scheduler.finish_requests([*core.scheduler.running], RequestStatus.FINISHED_ABORTED)
    core.scheduler.waiting.clear()
    (output,) = llm.generate(["d"], GREEDY)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 4)
