"""Supervision of engine processes that die, hang or cannot be started, on a clock that tests set."""

from __future__ import annotations

import contextlib
import math
import os

import msgspec
import pytest

from quire import EngineConfig
from quire.config import KVEventsConfig, SupervisionConfig
from quire.engine.kv_events import KVEventSubscriber
from quire.engine.messages import (
    EngineInfo,
    ErrorInfo,
    KVEvents,
    Ready,
    Starting,
    StartupFailed,
    StepOutputs,
    encode,
)
from quire.errors import CrashLoopError, EngineDeadError
from quire.front.process import supervision
from quire.front.process.supervision import LATE, EngineCrashed, EngineSupervisor, EngineSuspended
from quire.kv.blocks.events import AllBlocksCleared, BlockRemoved
from quire.scheduling.outputs import EngineCoreOutput
from quire.status import FinishReason

INFO = EngineInfo("fake", 64, 100, 8, 16, 0, "float32", 0.0)
OUTPUT = StepOutputs([EngineCoreOutput("a", [1])])
ROW = StepOutputs([EngineCoreOutput("a", [], FinishReason.STOP, pooled=b"1234")])


class FakeProcess:
    """An engine process that does what a test says."""

    started: list[FakeProcess]
    cannot_start: int

    def __init__(self, config, model_path, num_blocks_before=0, standby=None):
        self.standby = standby
        self.num_blocks_before = num_blocks_before
        if FakeProcess.cannot_start:
            FakeProcess.cannot_start -= 1
            raise OSError(11, "no process for you")
        self.config = config
        self.pid = 100 + len(self.started)
        self.messages = []
        self.sent = []
        self.done = []
        self.death = ""
        self.has_more = False
        self.acknowledged_at = -math.inf
        self.message_fd, self._message_end = os.pipe()
        self.death_fd, self._death_end = os.pipe()
        self.started.append(self)

    def send(self, message):
        self.sent.append(message)

    def receive(self, timeout):
        messages, self.messages = self.messages, []
        if not messages and self.death:
            raise EngineDeadError(self.death)
        return messages

    def log_stacks(self):
        self.done.append("stacks")

    def kill(self):
        self.done.append("kill")

    def close(self, timeout):
        self.done.append("close")
        for descriptor in (self.message_fd, self._message_end, self.death_fd, self._death_end):
            os.close(descriptor)


class Waiting:
    """Somebody whom the engine owes a step since a certain time."""

    waiting_since = None


class Scene:
    def __init__(self, kv_events=None, **fields):
        self.now = 1000.0
        config = EngineConfig(
            record_path="/calls",
            supervision=SupervisionConfig(**fields),
            kv_events=kv_events or KVEventsConfig(),
        )
        self.supervisor = EngineSupervisor(config, "/model", read_clock=lambda: self.now)
        self.waiting = Waiting()
        self.supervisor.watch_for(self.waiting)

    @property
    def process(self):
        return FakeProcess.started[-1]

    def hears(self, *messages):
        self.process.messages += messages
        return self.supervisor.receive(0)

    def crash(self, reason="it was killed"):
        """Let the engine die; return the seconds until the next is started."""
        self.process.death = reason
        assert self.supervisor.receive(0) == [EngineCrashed(reason)]
        return self.supervisor.next_due - self.now

    def pass_time(self, seconds):
        self.now += seconds
        return self.supervisor.receive(0)


@pytest.fixture
def scene(monkeypatch):
    monkeypatch.setattr(supervision, "EngineProcess", FakeProcess)
    FakeProcess.started, FakeProcess.cannot_start = [], 0
    with contextlib.ExitStack() as stack:

        def make(**fields):
            made = Scene(**fields)
            stack.callback(made.supervisor.close)
            return made

        yield make


def test_an_engine_that_dies_is_replaced_each_time_later(scene):
    one = scene()
    assert one.hears(Starting(), Ready(INFO)) == [Starting(), Ready(INFO)]
    delays = []
    for number in range(1, 6):
        delays.append(one.crash())
        assert one.process.done == ["close"]
        one.supervisor.send("lost")
        assert one.pass_time(delays[-1]) == []
        assert len(FakeProcess.started) == number + 1 == one.supervisor.num_restarts + 1
        assert one.process.config.record_path == f"/calls.{number}"
        assert one.hears(Ready(INFO)) == [Ready(INFO)]
    assert delays == [0, 0.25, 0.5, 1, 2]
    one.process.death = "the last"
    with pytest.raises(CrashLoopError, match=r"died 6 times within 300 s.*max_engine_crashes 6.*the last"):
        one.supervisor.receive(0)
    with pytest.raises(EngineDeadError, match="shut down"):
        one.supervisor.receive(0)
    assert one.supervisor.next_due is None


def test_kv_events_of_all_engines_are_one_sequence_with_a_clearing_between_them(scene):
    anywhere = "tcp://127.0.0.1:*"
    one = scene(kv_events=KVEventsConfig(kv_events_endpoint=anywhere, kv_events_replay_endpoint=anywhere))
    removed = [BlockRemoved(block_hashes=[number], medium="GPU") for number in range(4)]

    def publish(event):
        assert one.hears(KVEvents(msgspec.Raw(encode([event])))) == []

    [ready] = one.hears(Ready(INFO))
    ports = ready.info.kv_events_ports
    with contextlib.closing(KVEventSubscriber(*(f"tcp://127.0.0.1:{port}" for port in ports))) as subscriber:
        publish(removed[1])
        batches = []
        while not batches:  # until the subscription has taken hold
            publish(removed[0])
            batches = subscriber.receive(0.02)
        one.crash()
        one.pass_time(0)
        assert one.hears(Ready(INFO)) == [ready]
        for event in removed[2:]:
            publish(event)
        while batches[-1].events != [removed[3]]:
            batches += subscriber.receive()
    events = [event for batch in batches for event in batch.events if event != removed[0]]
    assert events == [AllBlocksCleared(), removed[1], AllBlocksCleared(), *removed[2:]]


def test_an_engine_is_suspended_and_resumed(scene):
    one = scene()
    one.hears(Ready(INFO))
    one.supervisor.suspend()
    assert one.process.done == ["kill"]
    assert not one.supervisor.is_suspended
    one.process.death = "it was killed"
    assert one.supervisor.receive(0) == [EngineSuspended()]
    assert one.supervisor.is_suspended
    assert one.supervisor.next_due is None
    assert one.pass_time(10_000) == []
    one.supervisor.resume()
    assert one.pass_time(0) == []
    assert one.process.num_blocks_before == INFO.num_blocks
    assert one.process.config.record_path == "/calls.1"
    assert one.hears(Ready(INFO)) == [Ready(INFO)]
    assert one.supervisor.num_restarts == 0
    assert one.crash() == 0


def test_an_engine_that_waits_to_be_replaced_is_suspended(scene):
    one = scene()
    one.hears(Ready(INFO))
    one.crash()
    one.supervisor.suspend()
    assert one.supervisor.is_suspended
    assert one.pass_time(100) == []
    assert len(FakeProcess.started) == 1
    one.supervisor.retire()
    with pytest.raises(EngineDeadError, match="shut down"):
        one.supervisor.receive(0)


def test_output_or_time_ends_a_series_of_crashes(scene):
    one = scene(max_engine_crashes=3, crash_window=50)
    one.hears(Ready(INFO))
    for output in (OUTPUT, ROW, OUTPUT, ROW):
        for delay in (0, 0.25):
            assert one.crash() == delay
            one.pass_time(delay)
            one.hears(Ready(INFO), StepOutputs([]))
        one.hears(output)
    for _ in range(4):
        assert one.crash() == 0
        one.pass_time(51)


def test_a_blocking_wait_ends_with_the_pause(scene, monkeypatch):
    one = scene()
    one.hears(Ready(INFO))
    one.crash()
    one.pass_time(0)
    assert one.crash() == 0.25
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        one.now += seconds

    monkeypatch.setattr(supervision.time, "sleep", sleep)
    assert one.supervisor.receive(0.1) == []
    assert one.supervisor.receive(None) == []
    assert slept == [0.1, pytest.approx(0.15)]
    assert len(FakeProcess.started) == 3


@pytest.mark.parametrize("fields", [{}, {"recovery": "off"}])
def test_an_engine_that_was_never_ready_is_not_replaced(scene, fields):
    one = scene(**fields)
    failed = StartupFailed(ErrorInfo("ConfigError", "no"))
    assert one.hears(failed) == [failed]
    one.process.death = "ended with code 1"
    with pytest.raises(EngineDeadError, match="code 1"):
        one.supervisor.receive(0)
    assert len(FakeProcess.started) == 1


def test_without_recovery_no_engine_is_replaced(scene):
    one = scene(recovery="off")
    one.hears(Ready(INFO))
    one.process.death = "killed"
    with pytest.raises(EngineDeadError, match="killed"):
        one.supervisor.receive(0)


def test_a_start_that_fails_is_a_crash(scene):
    one = scene()
    one.hears(Ready(INFO))
    one.crash()
    one.pass_time(0)
    assert one.hears(StartupFailed(ErrorInfo("ModelError", "no memory"))) == [], "nobody else's business"
    one.process.death = "ended with code 1"
    assert one.supervisor.receive(0) == [EngineCrashed("the engine could not be built: no memory")]
    FakeProcess.cannot_start = 2
    for _ in range(2):
        [crashed] = one.pass_time(10)
        assert "no process for you" in crashed.reason
    assert one.pass_time(10) == []
    assert len(FakeProcess.started) == 3


def test_an_engine_that_hangs_logs_its_stacks_and_is_killed(scene):
    one = scene(watchdog_timeout=7)
    one.hears(Ready(INFO))
    assert one.supervisor.next_due is None, "it is idle"
    one.pass_time(1000)
    one.waiting.waiting_since = one.now
    assert one.supervisor.next_due == one.now + 7
    one.pass_time(6.9)
    assert one.process.done == []
    one.process.messages.append(OUTPUT)
    one.pass_time(1)
    assert one.process.done == [], "what has come is looked at first"
    one.pass_time(0)
    assert one.process.done == ["stacks"]
    one.pass_time(one.supervisor.next_due - one.now)
    assert one.process.done == ["stacks", "kill"]
    one.process.death = "killed by SIGKILL"
    [crashed] = one.supervisor.receive(0)
    assert "not finished a step for 7 s (watchdog_timeout)" in crashed.reason
    assert one.supervisor.num_hangs == 1


def test_a_front_that_was_held_up_gives_the_engine_its_time_once_more(scene):
    one = scene(watchdog_timeout=7)
    one.hears(Ready(INFO))
    one.waiting.waiting_since = one.now
    one.pass_time(7 + LATE + 0.1)
    assert one.process.done == [], "messages may still be on their way"
    assert one.supervisor.next_due == one.now + 7
    one.pass_time(6.9)
    assert one.process.done == []
    one.pass_time(LATE + 5)
    assert one.process.done == ["stacks"], "a front that is always late notices it all the same"


def test_after_each_sign_of_life_the_front_may_be_held_up_again(scene):
    one = scene(watchdog_timeout=7)
    one.hears(Ready(INFO))
    for _ in range(3):
        one.waiting.waiting_since = one.now
        one.pass_time(100)
        assert one.process.done == []


def test_an_engine_that_had_to_wait_for_the_front_has_its_time_from_then_on(scene):
    one = scene(watchdog_timeout=7)
    one.hears(Ready(INFO))
    one.waiting.waiting_since = one.now
    one.process.acknowledged_at = one.now + 5
    one.pass_time(7.5)
    assert one.process.done == []
    one.pass_time(4.5)
    assert one.process.done == ["stacks"]


def test_an_engine_that_never_gets_ready_is_killed(scene):
    one = scene(watchdog_timeout=7)
    one.pass_time(60)
    one.hears(Starting())
    one.pass_time(69)
    assert one.process.done == []
    one.pass_time(1)
    one.pass_time(1)
    assert one.process.done == ["stacks", "kill"]
    one.process.death = "killed"
    with pytest.raises(EngineDeadError, match="silent for 70 s"):
        one.supervisor.receive(0)


def test_no_watchdog(scene):
    one = scene(watchdog_timeout=0)
    one.hears(Ready(INFO))
    one.waiting.waiting_since = one.now
    one.pass_time(10**6)
    assert one.process.done == []
    assert one.supervisor.next_due is None


def test_a_retired_engine_is_not_replaced(scene):
    one = scene()
    one.hears(Ready(INFO))
    one.supervisor.retire()
    one.process.death = "ended with code 0"
    with pytest.raises(EngineDeadError, match="code 0"):
        one.supervisor.receive(0)
    two = scene()
    two.hears(Ready(INFO))
    two.crash()
    two.supervisor.retire()
    with pytest.raises(EngineDeadError, match="shut down"):
        two.pass_time(10)


def test_each_engine_is_to_have_the_blocks_of_the_first(scene):
    one = scene()
    one.hears(Ready(INFO))
    for smaller in (INFO, msgspec.structs.replace(INFO, num_blocks=INFO.num_blocks - 1)):
        one.crash()
        one.pass_time(10)
        one.hears(Ready(smaller))
    assert [process.num_blocks_before for process in FakeProcess.started] == [0, 8, 8]
