"""Messages between front and engine that cannot be written or read: one request's end, or one engine's."""

from __future__ import annotations

import contextlib
import logging

import msgspec
import pytest
import zmq
from test_engine_core import Engine, request

from quire.engine.loop import EngineLoop
from quire.engine.messages import (
    Acknowledge,
    EngineCoreRequest,
    ErrorInfo,
    Explain,
    GetStats,
    Reply,
    RequestRefused,
    RestoreKV,
    SaveKV,
    decode_from_engine,
    decode_to_engine,
    encode,
    input_address,
    output_address,
    refusal_of,
)
from quire.engine.process.main import Connection
from quire.errors import InvalidRequestError, QueueFullError
from quire.kv.connectors.stats import KVConnectorStats
from quire.sampling_params import SamplingParams
from quire.scheduling.outputs import SchedulerStats


@pytest.fixture(params=[False, True], ids=["one by one", "overlapped"])
def engine(checkpoint, request) -> Engine:
    """An engine whose messages are written and read."""
    engine = Engine(checkpoint, overlap_steps=request.param)

    def send(message):
        engine.messages.append(decode_from_engine(encode(message)))

    engine.loop = EngineLoop(engine.core, send)
    return engine


# -- from the engine ----------------------------------------------------------------------------------------

UNSENDABLE = {
    "surrogate": {"stop_reason": "\udc80"},
    "object": {"kv_transfer_params": {"a": object()}},
    "too long": {"stop_reason": 1 << 64},
    "not text": {"error": "\udfff"},
}


def spoil(monkeypatch, engine: Engine, fields: dict, *, name: str, only_last: bool) -> None:
    """Give the outputs of a request, or only its last one, fields that cannot be sent."""
    step = engine.core.step

    def spoiled():
        outputs, progressed = step()
        for output in outputs:
            if output.request_id == name and (output.finish_reason or not only_last):
                for field, value in fields.items():
                    setattr(output, field, value)
        return outputs, progressed

    monkeypatch.setattr(engine.core, "step", spoiled)


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("what", UNSENDABLE)
def test_an_output_that_cannot_be_sent_ends_its_request_only(engine, monkeypatch, caplog, what, only_last):
    spoil(monkeypatch, engine, UNSENDABLE[what], name="bad", only_last=only_last)
    for name in ("before", "bad", "after"):
        engine.loop.handle(request(name))
    engine.run()
    assert engine.reasons == {"before": "length", "bad": "error", "after": "length"}
    assert "an output of this request cannot be sent" in engine.terminal["bad"][0].error
    assert "Traceback" in caplog.text
    assert len(engine.tokens("before")) == len(engine.tokens("after")) == 6
    engine.assert_empty()


def test_one_completion_of_several_that_cannot_be_sent_spares_the_others(engine, monkeypatch):
    spoil(monkeypatch, engine, UNSENDABLE["object"], name="b", only_last=False)
    engine.loop.handle(request("a", "b", "c"))
    engine.run()
    assert engine.reasons == {"a": "length", "b": "error", "c": "length"}
    engine.assert_empty()


@pytest.mark.parametrize("stats", [SchedulerStats(num_running=object()), ZeroDivisionError("no luck")])
def test_statistics_that_cannot_be_had_or_sent_lose_no_output(engine, monkeypatch, stats):
    def faulty():
        if isinstance(stats, Exception):
            raise stats
        return stats

    monkeypatch.setattr(engine.core.scheduler, "make_stats", faulty)
    monkeypatch.setattr("quire.engine.loop.STATS_INTERVAL", 0.0)
    engine.loop.handle(request("a"))
    engine.loop.handle(GetStats(7))
    engine.run()
    assert engine.reasons == {"a": "length"}
    assert len(engine.tokens("a")) == 6
    [reply] = [message for message in engine.messages if isinstance(message, Reply)]
    assert (reply.call_id, reply.done) == (7, False)
    signs_of_life = [message for message in engine.messages if getattr(message, "stats", None) is not None]
    assert len(signs_of_life) >= 6


def test_a_clock_that_fails_loses_no_output(engine, monkeypatch):
    def faulty():
        raise OSError("no clock")

    monkeypatch.setattr(engine.loop, "_clock", faulty)
    engine.loop.handle(request("a"))
    engine.run()
    assert engine.reasons == {"a": "length"}


@pytest.mark.parametrize(
    "stats", [KVConnectorStats(stored_bytes="many"), KVConnectorStats(stored_bytes=object()), 7]
)
def test_statistics_of_a_connector_that_nobody_could_read_are_left_out(engine, stats, caplog, monkeypatch):
    class Connector:
        def stats(self):
            return stats

        def close(self):
            raise OSError("no luck")

    monkeypatch.setattr(engine.core, "_connector", Connector())
    engine.loop.handle(request("a"))
    engine.run()
    assert engine.reasons == {"a": "length"}
    assert engine.core.stats().kv_connector is None
    assert "could not report its statistics" in caplog.text
    engine.loop.handle(request("b"))
    assert [output.request_id for output in engine.core.shutdown()] == ["b"]
    assert "the KV connector could not be closed" in caplog.text


class Mute(Exception):  # noqa: N818
    """Cannot even say what it is."""

    def __str__(self):
        raise ZeroDivisionError

    __repr__ = __str__


@pytest.fixture
def unlogged():
    """Logs nothing: pytest's own processes cannot tell each other of a log with lone surrogates."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("make_error", "kind", "message"),
    [
        (lambda: ValueError("\udc80"), "ValueError", r"\udc80"),
        (Mute, "Mute", "its message cannot be shown: ZeroDivisionError"),
        (lambda: InvalidRequestError("no", param=object()), "InvalidRequestError", "no"),
        (lambda: QueueFullError("full", retry_after="later"), "QueueFullError", "full"),
    ],
)
def test_whatever_an_error_says_can_be_sent(engine, monkeypatch, unlogged, make_error, kind, message):
    def faulty(*_):
        raise make_error()

    with monkeypatch.context() as patched:
        patched.setattr(engine.core.scheduler, "add_request", faulty)
        engine.loop.handle(request("a"))
    assert engine.messages == [RequestRefused(["a"], ErrorInfo(kind, message))]
    with monkeypatch.context() as patched:
        patched.setattr(engine.core.runner, "execute", faulty)
        engine.loop.handle(request("b"))
        engine.loop.step_and_send()
    engine.run()


# -- from the front -----------------------------------------------------------------------------------------

REQUEST = EngineCoreRequest(["a", "b"], [0, 1], [3, 4, 5], SamplingParams(seed=0))


def unreadable(message, **fields) -> bytes:
    """A message with fields of other types."""
    builtins = msgspec.to_builtins(message)
    names = list(message.__struct_fields__)
    for name, value in fields.items():
        builtins[1 + names.index(name)] = value
    return msgspec.msgpack.encode(builtins)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (unreadable(REQUEST, prompt_token_ids=["x"]), ["a", "b"]),
        (unreadable(REQUEST, eos_token_ids=-1.5), ["a", "b"]),
        (unreadable(REQUEST, sampling_params={"temperature": -1}), ["a", "b"]),
        (unreadable(REQUEST, options=None), ["a", "b"]),
        (unreadable(REQUEST, seeds=["seed"]), ["a", "b"]),
        (unreadable(SaveKV(7, "/file", [1]), token_ids=[None]), 7),
        (unreadable(RestoreKV(8, "/file"), path=1), 8),
        (unreadable(Explain(9, ["a"]), sequence_ids=None), 9),
    ],
)
def test_what_the_engine_cannot_read_is_refused_and_it_goes_on(tmp_path, message, answer):
    with zmq.Context() as context, context.socket(zmq.PUSH) as front, context.socket(zmq.PULL) as output:
        front.bind(input_address(tmp_path))
        output.bind(output_address(tmp_path))
        with contextlib.closing(Connection(tmp_path)) as connection:
            front.send(message)
            front.send(encode(GetStats(0)))
            handled = []
            while not handled:
                connection.deliver(handled.append, wait=None)
            said = decode_from_engine(output.recv())
    assert handled == [GetStats(0)]
    told = said.sequence_ids if isinstance(said, RequestRefused) else said.call_id
    assert told == answer
    assert isinstance(said.error.to_exception(), InvalidRequestError)
    assert "the engine cannot read this request" in said.error.message


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([99, 7]),
        unreadable(Acknowledge(5), num_bytes="all"),
        unreadable(REQUEST, sequence_ids=7),
        unreadable(GetStats(7), call_id="seven"),
    ],
)
def test_what_concerns_nobody_ends_the_engine(message):
    with pytest.raises(msgspec.DecodeError) as raised:
        decode_to_engine(message)
    with pytest.raises(msgspec.DecodeError):
        refusal_of(message, raised.value)
