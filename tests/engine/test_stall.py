"""An engine in which nothing moves: how long it pauses, what it says, and that it counts as alive."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from pathlib import Path

import pytest

from engine_checks import tiny_config
from faulty_connector import FaultyConnector
from quire.engine import loop as engine_loop
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.messages import EngineCoreRequest, Explain, Reply, Shutdown, StepOutputs
from quire.grammar.llguidance_backend import LLGuidanceBackend
from quire.request_options import RequestOptions
from quire.sampling_params import SamplingParams
from quire.scheduling.interface import PauseState
from quire.scheduling.phases.admission import AdmissionPhase
from quire.structured_outputs import StructuredOutputsParams


class Engine:
    """A loop on a clock that stands still unless it is moved."""

    def __init__(self, checkpoint: str, **options) -> None:
        self.messages = []
        self.now = 100.0
        config = dataclasses.replace(tiny_config(checkpoint), **options)
        self.core = EngineCore(config, Path(checkpoint))
        self.loop = EngineLoop(self.core, self.messages.append, clock=lambda: self.now)

    def add(self, name: str, prompt=(3, 4, 5), **params) -> None:
        settings = {"max_tokens": 2, "temperature": 0.0, "seed": 0, **params}
        self.loop.handle(EngineCoreRequest([name], [0], list(prompt), SamplingParams(**settings)))

    def run(self) -> None:
        while self.core.has_requests():
            self.loop.step_and_send()

    @property
    def finished(self) -> dict[str, str]:
        found = [
            one for message in self.messages if isinstance(message, StepOutputs) for one in message.outputs
        ]
        return {one.request_id: one.finish_reason for one in found if one.finish_reason}


@pytest.fixture
def engine(checkpoint):
    engine = Engine(checkpoint)
    yield engine
    engine.core.shutdown()


@pytest.fixture
def may_compile(monkeypatch):
    """Set it, and grammars are compiled."""
    event = threading.Event()
    compile_now = LLGuidanceBackend.compile

    def compile_later(backend, spec):
        assert event.wait(60)
        return compile_now(backend, spec)

    monkeypatch.setattr(LLGuidanceBackend, "compile", compile_later)
    yield event
    event.set()


def test_waiting_for_a_grammar_is_in_order(engine, may_compile, caplog):
    engine.add("structured", structured_outputs=StructuredOutputsParams(choice=("a", "b")))
    assert not engine.loop.step_and_send()
    assert engine.loop.stall_wait == engine_loop.AWAITING_WAIT < engine_loop.STALL_WAIT
    assert engine.core.stats().num_awaiting == 1
    assert not caplog.records, "nobody wants to hear of a grammar that has been compiling for a moment"
    engine.now += engine_loop.STALL_NOTICE
    for _ in range(3):
        assert not engine.loop.step_and_send()
    assert engine.loop.stall_wait == engine_loop.MAX_AWAITING_WAIT, "it looks ever more rarely"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'structured'" in record.getMessage()
    assert "grammar is being compiled" in record.getMessage()
    may_compile.set()
    engine.run()
    assert list(engine.finished) == ["structured"]
    assert engine.core.stats().num_awaiting == 0


def test_others_go_on_while_a_grammar_is_compiled(engine, may_compile, caplog):
    engine.add("structured", structured_outputs=StructuredOutputsParams(choice=("a", "b")))
    engine.add("plain")
    while "plain" not in engine.finished:
        assert engine.loop.step_and_send()
    assert not engine.finished.get("structured")
    assert not caplog.records


class SlowConnector(FaultyConnector):
    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, load_steps=1)


def test_a_load_that_takes_long_is_no_stall(checkpoint, caplog):
    engine = Engine(checkpoint, kv_connector="test_stall.SlowConnector")
    prompt = range(40)
    engine.add("first", prompt)
    engine.run()
    connector = engine.core.scheduler.get_kv_connector()
    assert engine.core.scheduler.reset_prefix_cache()
    connector.never_answer_next_loads(1)
    engine.add("loading", prompt)
    engine.loop.step_and_send()
    for _ in range(3):
        assert not engine.loop.step_and_send()
        engine.now += engine_loop.STALL_NOTICE
    assert engine.core.stats().num_loading == 1
    assert not caplog.records
    connector.answer()
    while engine.core.stats().num_loading:
        assert not engine.loop.step_and_send()
    assert engine.loop.stall_wait == engine_loop.AWAITING_WAIT, "what has come is used at once"
    engine.run()
    assert engine.core.stats().num_loaded_tokens == 32
    assert set(engine.finished) == {"first", "loading"}
    engine.core.shutdown()


class AskingConnector(FaultyConnector):
    """Knows at the third time whether it has KV."""

    num_asked = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int):
        self.num_asked += 1
        return (None, False) if self.num_asked < 3 else (0, False)


def test_what_a_connector_has_found_is_used_at_once(checkpoint):
    engine = Engine(checkpoint, kv_connector="test_stall.AskingConnector")
    engine.add("asked")
    for _ in range(2):
        assert not engine.loop.step_and_send()
        assert engine.loop.stall_wait == engine_loop.AWAITING_WAIT
        assert engine.core.stats().num_awaiting == 1
    assert engine.loop.step_and_send()
    assert engine.core.stats().num_awaiting == 0
    engine.run()
    engine.core.shutdown()


def test_a_pause_is_in_order_and_the_engine_counts_as_alive(engine, caplog):
    engine.add("first")
    engine.add("second")
    engine.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(3):
        assert not engine.loop.step_and_send()
        engine.now += engine_loop.STALL_NOTICE
    assert engine.loop.stall_wait == engine_loop.STALL_WAIT
    signs_of_life = [
        message for message in engine.messages if isinstance(message, StepOutputs) and message.stats
    ]
    assert len(signs_of_life) == 3
    (record,) = caplog.records
    assert "'first'" in record.getMessage()
    assert "paused" in record.getMessage()
    engine.core.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert set(engine.finished) == {"first", "second"}


def test_a_standstill_that_nothing_explains_is_an_error_at_once(engine, monkeypatch, caplog):
    engine.add("stuck")
    with monkeypatch.context() as patched:
        patched.setattr(AdmissionPhase, "plan", lambda phase, plan: None)
        for _ in range(3):
            assert not engine.loop.step_and_send()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "'stuck'" in record.getMessage()
    assert not [message for message in engine.messages if isinstance(message, StepOutputs)], "no sign of life"


def test_each_sequence_is_explained_in_order(engine):
    engine.add("first", max_tokens=9)
    engine.loop.step_and_send()
    engine.add("second")
    engine.loop.handle(Explain(7, ["second", "unknown", "first"]))
    reply = engine.messages[-1]
    assert isinstance(reply, Reply)
    assert reply.call_id == 7
    assert [text.split()[0] for text in reply.texts] == ["waiting", "not", "running:"]


@pytest.mark.parametrize(("seconds", "num_texts"), [(0, 9), (0.4, 3), (7, 1)])
def test_explanations_have_a_time_between_two_steps(engine, monkeypatch, seconds, num_texts):
    def explain(name):
        engine.now += seconds * engine_loop.EXPLAIN_TIME
        return name

    monkeypatch.setattr(engine.core, "explain", explain)
    names = list("abcdefghi")
    engine.loop.handle(Explain(7, names))
    assert engine.messages[-1].texts == names[:num_texts]


class SlowFront:
    """A front that reads for a while, is behind for a while, and then ends the engine."""

    def __init__(self, engine: Engine) -> None:
        self.has_room = True
        self.sent_before = 0
        self.waits: list[int | None] = []
        self._engine = engine
        self._turns = iter([True, True, False, False, False, True])

    def deliver(self, handle, *, wait) -> None:
        self.waits.append(wait)
        if not self.has_room:
            assert wait is None, "it sleeps until the front has read"
            assert len(self._engine.messages) == self.sent_before, "no step while the front is behind"
        self.sent_before = len(self._engine.messages)
        self.has_room = next(self._turns, None)
        if self.has_room is None:
            handle(Shutdown())


class IdleFront:
    """A front that says nothing, and ends an engine that waits for a message only."""

    has_room = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_leased: list[int] = []

    def deliver(self, handle, *, wait) -> None:
        self.num_leased.append(self._engine.core.stats().num_leased_blocks)
        if wait is None and len(self.num_leased) > 1:
            handle(Shutdown())
        elif wait is not None:
            self._engine.now = time.monotonic()
            threading.Event().wait(wait / 1000)
            self._engine.now = time.monotonic()


def test_an_idle_engine_ends_pins_when_their_time_is_over(engine):
    engine.now = time.monotonic()
    options = RequestOptions(pin_prefix=0.2)
    params = SamplingParams(max_tokens=2)
    engine.loop.handle(EngineCoreRequest(["a"], [0], list(range(40)), params, options=options))
    front = IdleFront(engine)
    engine.loop.run(front)
    assert max(front.num_leased) == 2
    assert front.num_leased[-1] == 0


def test_an_idle_engine_waits_no_longer_than_sockets_can(engine, monkeypatch):
    monkeypatch.setattr(engine.core, "next_due", lambda: math.inf)
    waits = []

    class Front:
        has_room = True

        def deliver(self, handle, *, wait):
            waits.append(wait)
            if wait is not None:
                handle(Shutdown())

    engine.loop.run(Front())
    assert waits == [None, engine_loop.MAX_IDLE_WAIT * 1000]


def test_no_step_begins_while_the_front_is_behind(engine):
    engine.add("a", max_tokens=50, ignore_eos=True)
    front = SlowFront(engine)
    engine.loop.run(front)
    num_steps = sum(len(message.outputs) for message in engine.messages)
    assert num_steps == 3 + 1, "a token for each turn with room, and the end"
    assert len(front.waits) == 7
