"""Faults anywhere in a step: every request that was accepted ends exactly once, or the engine dies."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_engine_core import Engine, request

from quire.engine.core import MAX_FAILED_STEPS
from quire.engine.memory.cache_warming import CacheWarmer
from quire.engine.messages import (
    AbortRequests,
    EngineCoreRequest,
    Explain,
    GetStats,
    Reply,
    RequestRefused,
    ResetPrefixCache,
    RestoreKV,
    SaveKV,
    StopRequests,
)
from quire.errors import EngineDeadError
from quire.sampling_params import SamplingParams
from quire.scheduling.interface import StepWithdrawnError

INTERNALS = [
    "_lost_steps.drop",
    "_timeout_phase.expire",
    "_step_mix.fill",
    "_running_phase._hand_out_tokens",
    "accounts.kv.grow",
    "accounts.kv.open",
    "accounts.kv.find_prefix",
    "accounts.kv.pools.allocate",
    "accounts.kv.pools.acquire",
    "accounts.waiting.admit",
    "accounts.running.occupy",
    "accounts.running.append",
    "_slots.enter",
    "_slots.leave",
    "_admission_phase._place",
    "_commit_phase.commit",
    "accounts.outbox.take_for_runner",
    "accounts.outbox.add_notices_to",
    "_results_phase._settle",
    "_results_phase._outputs",
    "_finisher.finish",
    "accounts.fences.lift",
    "accounts.grammars.bitmask",
    "accounts.in_flight.launch",
    "accounts.in_flight.land",
]


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def engine(checkpoint, request) -> Engine:
    return Engine(checkpoint, overlap_steps=request.param)


def lose(engine: Engine, name: str) -> None:
    state = engine.core.scheduler.accounts
    state.waiting.remove(name)
    state.kv.forget(name)


def fail_once(monkeypatch, scheduler, path: str, *, at_call: int) -> None:
    *names, method = path.split(".")
    part = scheduler
    for name in names:
        part = getattr(part, name)
    original = getattr(part, method)
    calls = []

    def failing(*arguments, **options):
        calls.append(method)
        if len(calls) == at_call:
            raise ArithmeticError("no luck")
        return original(*arguments, **options)

    monkeypatch.setattr(part, method, failing)


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("path", INTERNALS)
def test_a_fault_anywhere_in_the_scheduler_loses_no_request(engine, monkeypatch, path):
    fail_once(monkeypatch, engine.core.scheduler, path, at_call=2)
    try:
        for number in range(4):
            engine.loop.handle(request(f"{number}", length=20 + number, max_tokens=3 + number))
            engine.loop.step_and_send()
        engine.run()
    except EngineDeadError as error:
        assert "no luck" in str(error)
        return
    assert set(engine.reasons) == {"0", "1", "2", "3"}
    engine.loop.handle(request("later"))
    engine.run()
    assert engine.reasons["later"] == "length"
    engine.assert_empty()


def test_ids_that_no_array_holds_are_refused_and_nothing_is_left(engine):
    bad = EngineCoreRequest(["bad"], [0], [3, 4, 5], SamplingParams(seed=0), eos_token_ids=(2, 2**32 - 1))
    engine.loop.handle(bad)
    [refused] = engine.messages
    assert isinstance(refused, RequestRefused)
    assert refused.error.kind == "InvalidRequestError"
    assert "eos_token_ids contains 4294967295" in refused.error.message
    assert not engine.core.has_requests()


def test_a_request_that_the_scheduler_forgets_ends_with_an_error(engine):
    engine.loop.handle(request("lost"))
    engine.loop.handle(request("other"))
    lose(engine, "lost")
    engine.run()
    assert engine.reasons == {"lost": "error", "other": "length"}
    assert "lost this request" in engine.terminal["lost"][0].error


def test_a_search_that_the_scheduler_forgets_ends_once_for_each_sequence(engine):
    engine.loop.handle(request("a", "b", beam_width=2, n=2, logprobs=4))
    lose(engine, "a")
    engine.run()
    assert engine.reasons == {"a": "error", "b": "error"}


def test_what_the_scheduler_has_lost_is_aborted_with_everything_else(engine):
    engine.loop.handle(request("lost"))
    lose(engine, "lost")
    assert [(one.request_id, one.finish_reason) for one in engine.core.shutdown()] == [("lost", "abort")]


@pytest.mark.parametrize(("num_faults", "reason"), [(2, "length"), (3, "error")])
def test_a_step_that_is_taken_back_ends_nobody_until_it_happens_too_often(
    engine, monkeypatch, num_faults, reason
):
    schedule, faults = engine.core.scheduler.schedule, [StepWithdrawnError("no metadata")] * num_faults

    def faulty():
        if faults:
            raise faults.pop()
        return schedule()

    monkeypatch.setattr(engine.core.scheduler, "schedule", faulty)
    engine.loop.handle(request("a"))
    engine.run()
    assert engine.reasons == {"a": reason}
    engine.assert_empty()


@pytest.mark.parametrize("method", ["scheduler.schedule", "scheduler.update_from_output", "runner.execute"])
def test_steps_that_fail_again_and_again_end_the_engine(engine, monkeypatch, method):
    part, name = method.split(".")

    def faulty(*_):
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(getattr(engine.core, part), name, faulty)

    def serve(number: int) -> None:
        engine.loop.handle(request(f"{number}"))
        engine.run()

    with pytest.raises(EngineDeadError, match=r"failed in a row|even a step of one token: .* no luck"):
        any(map(serve, range(2 * MAX_FAILED_STEPS)))
    assert set(engine.reasons.values()) <= {"error"}


@pytest.mark.histories
@pytest.mark.first_case
def test_steps_that_fail_now_and_then_do_not_end_the_engine(engine, monkeypatch):
    execute = engine.core.runner.execute

    def faulty(scheduled, grammar=None):
        if any(name.startswith("bad") for name in scheduled.request_ids):
            raise ZeroDivisionError("no luck")
        return execute(scheduled, grammar)

    monkeypatch.setattr(engine.core.runner, "execute", faulty)
    for number in range(2 * MAX_FAILED_STEPS):
        for name in (f"bad {number}", f"good {number}"):
            engine.loop.handle(request(name, max_tokens=1))
            engine.run()
    assert len(engine.reasons) == 4 * MAX_FAILED_STEPS


def test_a_scheduler_in_disorder_ends_the_engine(engine, monkeypatch):
    def faulty():
        engine.core.scheduler.accounts.kv.pools.allocate(1)
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(engine.core.scheduler, "schedule", faulty)
    engine.loop.handle(request("a"))
    with pytest.raises(EngineDeadError, match="inconsistent: ZeroDivisionError: no luck; then Asser"):
        engine.core.step()


NONSENSE = {
    "nothing": lambda computed: None,
    "text for tokens": lambda computed: {"sampled_token_ids": "text"},
    "one dimension": lambda computed: {"sampled_token_ids": computed.sampled_token_ids[:, 0]},
    "floats": lambda computed: {"sampled_token_ids": computed.sampled_token_ids.astype(np.float32)},
    "too few rows": lambda computed: {"sampled_token_ids": computed.sampled_token_ids[1:]},
    "too many drafts": lambda computed: {"draft_token_ids": np.zeros((9, 1), np.int32)},
    "one pause for all": lambda computed: {"num_steps_without_drafts": 3},
    "too many pauses": lambda computed: {"num_steps_without_drafts": np.ones(9, np.int32)},
    "half a pause": lambda computed: {"num_steps_without_drafts": np.full(len(computed.request_ids), 0.5)},
    "a pause in the past": lambda computed: {
        "num_steps_without_drafts": np.full(len(computed.request_ids), -1, np.int32)
    },
    "no errors": lambda computed: {"errors": None},
    "no logprobs": lambda computed: {"logprobs": []},
}


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_from_the_runner_ends_the_requests_of_its_step(engine, monkeypatch, what):
    execute = engine.core.runner.execute

    def faulty(scheduled, grammar=None):
        computed = execute(scheduled, grammar)
        if "bad" not in scheduled.request_ids:
            return computed
        fields = NONSENSE[what](computed)
        return fields and dataclasses.replace(computed, **fields)

    monkeypatch.setattr(engine.core.runner, "execute", faulty)
    engine.loop.handle(request("early", max_tokens=1))
    engine.run()
    for name in ("bad", "later"):
        engine.loop.handle(request(name))
        engine.run()
    assert engine.reasons == {"early": "length", "bad": "error", "later": "length"}
    assert "the model runner returned" in engine.terminal["bad"][0].error
    engine.assert_empty()


def test_masks_that_cannot_be_computed_end_the_requests_of_their_step(engine, monkeypatch):
    bitmask = engine.core.scheduler.get_grammar_bitmask

    def faulty(scheduled):
        if "bad" in scheduled.request_ids:
            raise MemoryError
        return bitmask(scheduled)

    monkeypatch.setattr(engine.core.scheduler, "get_grammar_bitmask", faulty)
    engine.loop.handle(request("bad"))
    engine.loop.step_and_send()
    engine.loop.handle(request("good"))
    engine.run()
    assert engine.reasons == {"bad": "error", "good": "length"}


def test_what_comes_after_a_step_cannot_lose_its_outputs(engine, monkeypatch, caplog):
    def faulty(*_):
        raise OSError("no luck")

    class Events:
        def take(self):
            return ["an event"]

    monkeypatch.setattr(CacheWarmer, "resume", faulty)
    monkeypatch.setattr(engine.core, "_kv_events", Events())
    monkeypatch.setattr(engine.core, "_publish_events", faulty)
    engine.loop.handle(request("a"))
    engine.run()
    assert engine.reasons == {"a": "length"}
    assert "KV events of a step could not be published" in caplog.text


@pytest.mark.histories
@pytest.mark.first_case
def test_one_client_cannot_end_the_engine_and_nobody_else_notices(engine, checkpoint, monkeypatch):
    good = [request(f"good {number}", length=20 + number, max_tokens=9) for number in range(5)]
    undisturbed = Engine(checkpoint)
    for one in good:
        undisturbed.loop.handle(one)
    undisturbed.run()
    execute = engine.core.runner.execute

    def faulty(scheduled, grammar=None):
        if any(name.startswith("bad") for name in scheduled.request_ids):
            raise ZeroDivisionError("no luck")
        return execute(scheduled, grammar)

    monkeypatch.setattr(engine.core.runner, "execute", faulty)
    for number, one in enumerate(good):
        engine.loop.handle(one)
        for name in range(4):
            engine.loop.handle(request(f"bad {number} {name}"))
        engine.loop.step_and_send()
    engine.run()
    assert {name for name, reason in engine.reasons.items() if reason == "error"} == {
        f"bad {number} {name}" for number in range(5) for name in range(4)
    }
    for one in good:
        [name] = one.sequence_ids
        assert engine.reasons[name] == "length"
        assert engine.tokens(name) == undisturbed.tokens(name)
    engine.assert_empty()


def test_a_search_that_makes_steps_fail_ends_once_for_each_sequence(engine, monkeypatch):
    execute = engine.core.runner.execute

    def faulty(scheduled, grammar=None):
        if "a" in scheduled.request_ids:
            raise ZeroDivisionError("no luck")
        return execute(scheduled, grammar)

    monkeypatch.setattr(engine.core.runner, "execute", faulty)
    engine.loop.handle(request("a", "b", beam_width=2, n=2, logprobs=4))
    engine.loop.handle(request("c", "d", beam_width=2, n=2, logprobs=4))
    engine.run()
    assert engine.reasons == {"a": "error", "b": "error", "c": "length", "d": "length"}


CALLS = {
    "stats": GetStats(7),
    "explain": Explain(7, ["a", "nobody"]),
    "reset_prefix_cache": ResetPrefixCache(7),
    "save_kv": SaveKV(7, "/file", list(range(40)), ""),
    "restore_kv": RestoreKV(7, "/file", ""),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_call_that_raises_is_answered_and_ends_no_engine(engine, monkeypatch, method):
    def faulty(*_):
        raise ZeroDivisionError("no luck")

    engine.loop.handle(request("a"))
    with monkeypatch.context() as patched:
        patched.setattr(engine.core, method, faulty)
        engine.loop.handle(CALLS[method])
    [reply] = [message for message in engine.messages if isinstance(message, Reply)]
    assert (reply.call_id, reply.done, reply.error.kind) == (7, False, "ZeroDivisionError")
    engine.run()
    assert engine.reasons == {"a": "length"}


def test_the_end_of_requests_that_nobody_knows_is_no_fault(engine):
    engine.loop.handle(request("a"))
    for message in (AbortRequests(["nobody"]), StopRequests(["nobody", ""]), AbortRequests([])):
        engine.loop.handle(message)
    engine.run()
    assert engine.reasons == {"a": "length"}
    engine.assert_empty()
