"""Faults in a step, all-or-nothing admission, and what the core leaves behind."""

from __future__ import annotations

import re

import pytest

from engine_checks import check_after_every_step, tiny_config
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.messages import (
    AbortRequests,
    EngineCoreRequest,
    GetStats,
    Reply,
    RequestRefused,
    Shutdown,
    StepOutputs,
    StopRequests,
)
from quire.errors import InvalidRequestError, QueueFullError
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from quire.status import FinishReason


def request(*ids: str, length: int = 20, **params) -> EngineCoreRequest:
    settings = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "seed": 0, **params}
    return EngineCoreRequest(
        list(ids), [0] * len(ids), list(range(3, 3 + length)), SamplingParams(**settings)
    )


class Engine:
    """A loop whose messages are collected."""

    def __init__(self, checkpoint, **scheduler) -> None:
        from pathlib import Path

        self.messages = []
        self.core = check_after_every_step(EngineCore(tiny_config(checkpoint, **scheduler), Path(checkpoint)))
        self.loop = EngineLoop(self.core, self.messages.append)

    def run(self) -> None:
        while self.core.has_requests():
            self.loop.step_and_send()

    @property
    def terminal(self) -> dict[str, list]:
        """Terminal outputs by request."""
        found: dict[str, list] = {}
        for message in self.messages:
            for output in message.outputs if isinstance(message, StepOutputs) else ():
                if output.finish_reason is not None:
                    found.setdefault(output.request_id, []).append(output)
        return found

    @property
    def reasons(self) -> dict[str, FinishReason]:
        assert all(len(outputs) == 1 for outputs in self.terminal.values())
        return {name: outputs[0].finish_reason for name, outputs in self.terminal.items()}

    def tokens(self, name: str) -> list[int]:
        outputs = [one for message in self.messages for one in getattr(message, "outputs", ())]
        return [token for one in outputs if one.request_id == name for token in one.new_token_ids]

    def assert_empty(self) -> None:
        stats = self.core.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert (stats.num_running, stats.num_waiting) == (0, 0)


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def engine(checkpoint, request) -> Engine:
    return Engine(checkpoint, overlap_steps=request.param)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fault_while_computing_ends_the_request_at_fault_only(engine, monkeypatch, caplog, when):
    execute = engine.core.runner.execute

    def faulty(scheduled, grammar=None):
        if "bad" in scheduled.request_ids:
            if when == "after":
                execute(scheduled, grammar)
            raise ZeroDivisionError("no luck")
        return execute(scheduled, grammar)

    monkeypatch.setattr(engine.core.runner, "execute", faulty)
    engine.loop.handle(request("early", max_tokens=3))
    engine.run()
    engine.loop.handle(request("bad"))
    engine.loop.handle(request("with it"))
    engine.loop.step_and_send()
    engine.loop.handle(request("later"))
    engine.run()
    assert engine.reasons == {"early": "length", "bad": "error", "with it": "length", "later": "length"}
    assert "ZeroDivisionError: no luck" in engine.terminal["bad"][0].error
    assert "Traceback" in caplog.text
    engine.assert_empty()


def test_a_fault_does_not_reach_what_was_planned_before_it_was_known(checkpoint, monkeypatch, caplog):
    """With a new request in every plan, a failure would else be handed on from step to step."""
    requests = [request(str(number), length=20 + number) for number in range(8)]
    undisturbed = Engine(checkpoint)
    for one in requests:
        undisturbed.loop.handle(one)
    undisturbed.run()

    engine = Engine(checkpoint, overlap_steps=True)
    execute = engine.core.runner.execute
    at_fault = []

    def faulty(scheduled, grammar=None):
        if scheduled.step == 3:
            at_fault.extend(scheduled.request_ids)
            raise ZeroDivisionError("no luck")
        return execute(scheduled, grammar)

    monkeypatch.setattr(engine.core.runner, "execute", faulty)
    for one in requests:
        engine.loop.handle(one)
        engine.loop.step_and_send()
    engine.run()
    assert len(at_fault) > 1
    assert set(engine.reasons.values()) == {"length"}
    assert all(engine.tokens(name) == undisturbed.tokens(name) for name in engine.reasons)
    engine.assert_empty()


@pytest.mark.parametrize("method", ["schedule", "update_from_output"])
def test_a_fault_in_the_scheduler_is_answered_too(engine, monkeypatch, caplog, method):
    original = getattr(engine.core.scheduler, method)
    calls = []

    def faulty(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("lost the thread")
        return original(*args)

    monkeypatch.setattr(engine.core.scheduler, method, faulty)
    engine.loop.handle(request("a", "b"))
    engine.run()
    assert engine.reasons == {"a": "error", "b": "error"}
    assert "lost the thread" in engine.terminal["a"][0].error
    engine.loop.handle(request("later"))
    engine.run()
    assert engine.reasons["later"] == "length"
    engine.assert_empty()


def test_sequences_are_admitted_all_or_none(checkpoint):
    engine = Engine(checkpoint, max_num_queued_reqs=3)
    engine.loop.handle(request("a", "b"))
    engine.loop.handle(request("c", "d"))
    (refused,) = engine.messages
    assert isinstance(refused, RequestRefused)
    assert refused.sequence_ids == ["c", "d"]
    assert isinstance(refused.error.to_exception(), QueueFullError)
    engine.run()
    assert engine.reasons == {"a": "length", "b": "length"}
    engine.assert_empty()


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"max_num_queued_reqs": 2}, "n is 3.*max_num_queued_reqs 2.*lower n to that"),
        ({"max_num_queued_tokens": 50}, "n is 3.*20 tokens.*60.*max_num_queued_tokens 50.*at most 2"),
        ({"max_num_queued_tokens": 19}, "lower n to at most 1"),
    ],
)
def test_more_sequences_than_can_ever_wait_are_not_told_to_try_again(checkpoint, bounds, words):
    engine = Engine(checkpoint, **bounds)
    engine.loop.handle(request("a", "b", "c"))
    (refused,) = engine.messages
    error = refused.error.to_exception()
    assert isinstance(error, InvalidRequestError)
    assert re.search(words, str(error))
    assert error.param == "n"
    engine.loop.handle(request("alone"))
    engine.run()
    assert engine.reasons == {"alone": "length"}
    engine.assert_empty()


def test_an_unexpected_fault_in_admission_is_an_answer(engine, monkeypatch, caplog):
    monkeypatch.setattr(engine.core.scheduler, "add_request", lambda request: 1 / 0)
    engine.loop.handle(request("a"))
    (refused,) = engine.messages
    assert "ZeroDivisionError" in str(refused.error.to_exception())


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_aborts_are_answered_and_stops_are_not(checkpoint, num_steps):
    engine = Engine(checkpoint, max_num_batched_tokens=16)
    engine.loop.handle(request("a", "b", "c"))
    for _ in range(num_steps):
        engine.loop.step_and_send()
    engine.loop.handle(AbortRequests(["a", "unknown"]))
    engine.loop.handle(StopRequests(["b", "unknown"]))
    engine.loop.handle(AbortRequests(["a"]))
    engine.run()
    assert engine.reasons == {"a": "abort", "c": "length"}
    engine.assert_empty()


def test_shutdown_answers_what_is_left(engine):
    engine.loop.handle(request("a", "b"))
    engine.loop.step_and_send()
    engine.loop.handle(Shutdown())
    assert engine.loop.stopped
    assert engine.reasons == {"a": "abort", "b": "abort"}


def test_the_last_statistics_show_an_idle_engine(engine):
    engine.loop.handle(request("a"))
    engine.run()
    last = [
        message.stats for message in engine.messages if isinstance(message, StepOutputs) and message.stats
    ][-1]
    assert (last.num_running, last.num_finished) == (0, 1)
    engine.loop.handle(GetStats(9))
    assert isinstance(engine.messages[-1], Reply)
    assert engine.messages[-1].call_id == 9


def test_prompt_logprobs_are_computed_once_for_n(engine):
    engine.loop.handle(request("a", "b", prompt_logprobs=1))
    engine.run()
    with_them = {
        output.request_id
        for message in engine.messages
        if isinstance(message, StepOutputs)
        for output in message.outputs
        if output.prompt_logprobs
    }
    assert with_them == {"a"}


def test_a_request_with_unusable_logits_ends_alone(engine, monkeypatch):
    """NaN logits of one row are that request's own fault."""
    logits = Decoder.logits

    def poisoned(model, hidden, num_largest):
        result = logits(model, hidden, num_largest)
        result[0] = float("nan")
        return result

    engine.loop.handle(request("a"))
    engine.loop.handle(request("b"))
    monkeypatch.setattr(Decoder, "logits", poisoned)
    engine.loop.step_and_send()
    monkeypatch.undo()
    engine.run()
    assert sorted(engine.reasons.values()) == ["error", "length"]
    engine.assert_empty()
