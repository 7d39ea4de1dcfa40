"""An engine whose messages cannot be read is replaced, and what cannot be sent to one ends alone."""

from __future__ import annotations

import contextlib
import subprocess

import msgspec
import pytest
import zmq
from test_resumption import INFO, Scene

from quire.config import EngineConfig
from quire.engine.messages import (
    EngineCoreRequest,
    GetStats,
    LoadProgress,
    Ready,
    SaveKV,
    encode,
    input_address,
    output_address,
)
from quire.errors import EngineDeadError
from quire.front.process import client as process_client
from quire.front.process.client import EngineProcess
from quire.status import FinishReason

UNREADABLE = [
    b"",
    b"\xc1",
    encode(GetStats(7)),
    msgspec.msgpack.encode([99]),
    msgspec.msgpack.encode([5, [["a", ["no token"]]], None]),
]


@contextlib.contextmanager
def engine(monkeypatch):
    """A process that does nothing, and the socket to which the engine in it would send."""

    def start():
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)

    monkeypatch.setattr(process_client, "start_process", start)
    monkeypatch.setattr(EngineProcess, "_write", lambda *_: None)
    with contextlib.closing(EngineProcess(EngineConfig(model="mini"), "mini")) as process:
        with zmq.Context() as context, context.socket(zmq.PUSH) as output, context.socket(zmq.PULL) as inbox:
            directory = process._directory
            inbox.connect(input_address(directory))
            output.connect(output_address(directory))
            yield process, output
        process.kill()


@pytest.mark.parametrize("garbage", UNREADABLE)
def test_what_came_before_a_message_that_cannot_be_read_counts_and_nothing_after_it(monkeypatch, garbage):
    with engine(monkeypatch) as (process, output):
        for data in (encode(Ready(INFO)), garbage, encode(LoadProgress(1, 2))):
            output.send(data)
        assert process.receive(60) == [Ready(INFO)]
        if not process.has_more:  # the others had not arrived yet
            assert process.receive(60) == []
        for _ in range(2):
            assert process.has_more
            with pytest.raises(EngineDeadError, match="a message that cannot be read"):
                process.receive(60)


def refusing(scene: Scene, name: str) -> None:
    """Let this request fail to be sent."""
    send = scene.client.send

    def faulty(message):
        if isinstance(message, EngineCoreRequest | SaveKV) and name in repr(message):
            raise TypeError("objects of this type cannot be encoded")
        send(message)

    scene.client.send = scene.requests.resumption._send = faulty


def test_a_request_that_cannot_be_sent_ends_alone_and_the_engine_owes_nothing(monkeypatch):
    scene = Scene(monkeypatch)
    refusing(scene, "wrong")
    with pytest.raises(TypeError):
        scene.submit("wrong")
    with pytest.raises(TypeError):
        scene.requests.call(lambda call_id: SaveKV(call_id, "wrong", []), lambda reply: None)
    assert scene.requests.waiting_since is None
    assert not scene.requests.outputs
    scene.taken()
    scene.submit("good")
    assert scene.names() == ["good"]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_request_that_cannot_be_sent_to_the_next_engine_keeps_no_other_from_it(monkeypatch, is_new):
    scene = Scene(monkeypatch)
    first = scene.submit("first")
    bad = None if is_new else scene.submit("wrong")
    for state in (first, bad):
        if state is not None:
            scene.output(state, 5)
    scene.crash()
    bad = bad or scene.submit("wrong")
    scene.submit("last")
    refusing(scene, "wrong")
    scene.taken()
    scene.hear(Ready(INFO))
    assert scene.names() == ["first", "last"]
    assert bad.completions[0].finish_reason is FinishReason.ERROR
    assert "this request cannot be sent to the engine" in bad.completions[0].error
    scene.output(first, 6, reason=FinishReason.LENGTH)
    assert first.finished
