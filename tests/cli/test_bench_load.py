"""`quire bench serve`: when requests are sent, and what is understood of a server's answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from quire.cli.bench.http_target import ServerTarget
from quire.cli.bench.load import LoadGenerator
from quire.cli.bench.target import RequestUsage
from quire.cli.bench.targets import open_target
from quire.cli.bench.workload import BenchRequest
from quire.cli.bench_options import TargetConfig
from quire.config import EngineConfig, SchedulerConfig
from quire.errors import ConfigError, EngineDeadError, QueueFullError, QuireError

REQUEST = BenchRequest([5, 6, 7], 3)


class FakeTarget:
    """Answers with one output per token, after giving way to others; knows how many it answered at once."""

    vocabulary = np.arange(10)
    max_model_len = None

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.running = self.most_running = 0
        self.order: list[list[int]] = []

    async def send(self, request: BenchRequest, on_output: Callable[[], None]) -> RequestUsage:
        self.order.append(request.prompt_token_ids)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(request.output_len):
                await asyncio.sleep(0)
                on_output()
            if self.failure is not None:
                raise self.failure
        finally:
            self.running -= 1
        return RequestUsage(request.output_len, 1)


def requests(count: int) -> list[BenchRequest]:
    return [BenchRequest([number], 3) for number in range(count)]


async def test_records_are_in_order_and_their_times_too():
    target = FakeTarget()
    progress: list[tuple[int, int]] = []
    load = LoadGenerator(
        target,
        [0.0, 0.004, 0.002],
        requests(3),
        on_progress=lambda done, tokens: progress.append((done, tokens)),
    )
    records = await load.run()
    assert target.order == [[number] for number in sorted(range(3), key=lambda number: records[number].sent)]
    assert [record.arrived for record in records] == [0.0, 0.004, 0.002]
    for record in records:
        times = [record.arrived, record.sent, *record.output_times, record.ended]
        assert times == sorted(times)
        assert len(record.output_times) == record.num_output_tokens == 3
        assert (record.num_cached_tokens, record.error) == (1, None)
    assert progress == [(1, 3), (2, 6), (3, 9)]


@pytest.mark.parametrize(("limit", "expected"), [(0, 6), (1, 1), (4, 4)])
async def test_concurrency_is_limited(limit: int, expected: int):
    target = FakeTarget()
    await LoadGenerator(target, [0.0] * 6, requests(6), limit).run()
    assert target.most_running == expected
    assert target.order == [[number] for number in range(6)]


async def test_a_request_that_fails_does_not_stop_the_others():
    records = await LoadGenerator(FakeTarget(QueueFullError("full")), [0.0] * 3, requests(3)).run()
    assert [record.error for record in records] == ["full"] * 3
    assert [record.num_output_tokens for record in records] == [0] * 3


async def test_an_engine_that_dies_stops_all():
    target = FakeTarget(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await LoadGenerator(target, [0.0, 0.0, 3600.0], requests(3)).run()
    assert target.order == [[0], [1]]


async def test_an_answer_without_tokens_is_a_failure():
    (record,) = await LoadGenerator(FakeTarget(), [0.0], [BenchRequest([1], 0)]).run()
    assert record.error == "the response had no tokens"


def sse(*events: object) -> bytes:
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


def choice(text: str) -> dict:
    return {"choices": [{"text": text}], "usage": None}


@contextlib.asynccontextmanager
async def server(
    status: int = 200, body: bytes = b"", models: object = None, is_cut_off: bool = False
) -> AsyncIterator[tuple[ServerTarget, list[bytes]]]:
    """A server with one answer, and the bodies that it was sent."""
    seen: list[bytes] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(await request.read())
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        size = max(7, len(body) // 100)
        for start in range(0, len(body), size):
            await response.write(body[start : start + size])
        if is_cut_off:
            request.transport.abort()
        return response

    async def listed(_: web.Request) -> web.Response:
        return web.json_response(models)

    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer), web.get("/v1/models", listed)])
    async with TestServer(app) as server, aiohttp.ClientSession() as client:
        yield ServerTarget(client, str(server.make_url("/v1")), np.arange(3)), seen


async def sent(target: ServerTarget) -> tuple[RequestUsage, int]:
    outputs: list[None] = []
    usage = await target.send(REQUEST, lambda: outputs.append(None))
    return usage, len(outputs)


async def test_events_with_text_are_outputs_and_the_usage_has_the_counts():
    usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    body = sse(choice(""), choice("a"), choice(""), choice("b"), {"choices": [], "usage": usage})
    async with server(body=b": ping\n\n" + body) as (target, seen):
        assert await sent(target) == (RequestUsage(3, 2), 3)
    body = json.loads(seen[0])
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([5, 6, 7], 3, True)
    assert body["stream_options"] == {"include_usage": True}


async def test_without_a_usage_outputs_are_counted():
    async with server(body=sse(choice("a"), choice("b"))) as (target, _):
        assert await sent(target) == (RequestUsage(2, 0), 2)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (429, b'{"error": {"message": "come back later"}}', "HTTP 429: come back later"),
        (502, b"<html>", "HTTP 502: <html>"),
        (200, sse({"error": {"message": "it broke"}}), "it broke"),
        (200, b"data: {\n\n", "not a JSON object: {"),
        (200, b"data: [1]\n\n", r"not a JSON object: \[1\]"),
        (200, b"data: \xff\n\n", "not a JSON object"),
        (200, b"data: " + b" " * (1 << 20), "unreadable response"),
    ],
)
async def test_a_refusal_says_why(status: int, body: bytes, message: str):
    async with server(status, body) as (target, _):
        with pytest.raises(QuireError, match=message):
            await sent(target)


async def test_an_answer_that_breaks_off_is_a_failure():
    async with server(body=sse(choice("a"))[:-20], is_cut_off=True) as (target, _):
        with pytest.raises(QuireError, match="the connection failed: "):
            await sent(target)


async def test_nobody_listens():
    async with aiohttp.ClientSession() as client:
        for url in ("http://127.0.0.1:9/v1", "127.0.0.1", "http://", "ftp://host"):
            with pytest.raises(QuireError, match=r"cannot reach .*; see --base-url"):
                await ServerTarget(client, url, np.arange(3)).choose_model("")


async def test_the_model_is_the_first_that_is_listed_or_the_one_asked_for():
    models = {"data": [{"id": "a", "max_model_len": 77}, {"id": "b"}]}
    async with server(models=models) as (target, _):
        await target.choose_model("")
        assert target.max_model_len == 77
        await target.choose_model("b")
        assert target.max_model_len is None
        with pytest.raises(QuireError, match="lists a, b, not 'c'"):
            await target.choose_model("c")


@pytest.mark.parametrize("models", [[], {"data": None}, {"data": [{}]}])
async def test_what_is_no_list_of_models(models: object):
    async with server(models=models) as (target, _):
        with pytest.raises(QuireError, match="ends in /v1"):
            await target.choose_model("")


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(dtype="float32"),
        EngineConfig(scheduler=SchedulerConfig(max_num_seqs=3)),
    ],
)
def test_flags_of_an_engine_mean_nothing_to_a_server(engine: EngineConfig):
    with pytest.raises(ConfigError, match=r"--\S+ is \S+, but with --base-url no engine is started"):
        open_target(TargetConfig(base_url="http://host/v1"), engine)


def test_a_server_without_aiohttp_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "quire.cli.bench.http_target")
    with pytest.raises(ConfigError, match=r'pip install "quire\[bench\]"'):
        open_target(TargetConfig(base_url="http://host/v1"), EngineConfig())
