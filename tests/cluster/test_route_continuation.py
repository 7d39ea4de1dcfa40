"""Streams whose engines break off: another engine continues them, and their clients notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import preloaded
from quire import AsyncLLM, EngineConfig, SchedulerConfig
from quire.cluster.route import routing
from quire.config import ConnectionConfig, RouterConfig, ServerConfig
from quire.server.app import create_app
from quire.server.http.listening import bound_socket, url_of
from quire.server.http.server import HttpServer

MESSAGES = [{"role": "user", "content": "Who is it?"}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CHAT, COMPLETIONS, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
BODIES = [
    (CHAT, {"messages": MESSAGES, "n": 2, "logprobs": True, "stop": ["er "], "temperature": 1.0}),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}, "ignore_eos": True}),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"json": SCHEMA}, "temperature": 1.0}),
    (COMPLETIONS, {"prompt": "Once upon", "logprobs": 1, "frequency_penalty": 1.0, "seed": 7}),
    (COMPLETIONS, {"prompt": "Once upon", "echo": True, "return_token_ids": True, "temperature": 0.5}),
    (ANTHROPIC, {"messages": MESSAGES}),
]


class Breaking:
    """ASGI application that breaks off: the connection closes after so many bytes of an answer."""

    def __init__(self, app, cuts):
        self._app = app
        self._cuts = cuts  # shared; one for each answer, and none after the last

    async def __call__(self, scope, receive, send):
        if not (scope["path"].startswith("/v1/") and scope["method"] == "POST" and self._cuts):
            await self._app(scope, receive, send)
            return
        left = self._cuts.pop(0)

        async def send_some(message):
            nonlocal left
            body = message.get("body", b"")
            await send({**message, "body": body[:left]} if "body" in message else message)
            if len(body) > left:
                raise ConnectionError("the engine dies")
            left -= len(body)

        with contextlib.suppress(ConnectionError):
            await self._app(scope, receive, send_some)


class Engines:
    """One model behind two servers that break off, and a router in front of these."""

    def __init__(self, llm):
        self.cuts = []
        self._llm = llm
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self):
        urls = []
        app = create_app(self._llm, ServerConfig())
        self.direct = await self._client(httpx.ASGITransport(app=app), "http://localhost")
        for _ in range(2):
            bound = bound_socket("127.0.0.1", 0)
            self._stack.callback(bound.close)
            server = HttpServer(
                Breaking(create_app(self._llm, ServerConfig()), self.cuts), ConnectionConfig(), None, None
            )
            await self._stack.enter_async_context(server.serving(bound))
            urls.append(url_of("127.0.0.1", bound))
        front = bound_socket("127.0.0.1", 0)
        self._stack.callback(front.close)
        self.router = await self._stack.enter_async_context(routing(RouterConfig(engine=tuple(urls)), front))
        self.routed = await self._client(None, url_of("127.0.0.1", front))
        return self

    async def _client(self, transport, url):
        client = httpx.AsyncClient(transport=transport, base_url=url, timeout=60)
        return await self._stack.enter_async_context(client)

    async def __aexit__(self, *error):
        await self._stack.aclose()


@pytest.fixture(scope="module")
def engines():
    with preloaded.engines():
        llm = AsyncLLM(EngineConfig(num_threads=1, scheduler=SchedulerConfig(num_kv_blocks=256)))
    with asyncio.Runner() as runner:
        runner.run(llm.wait_until_ready())
        started = Engines(llm)
        runner.run(started.__aenter__())
        yield runner, started
        runner.run(started.__aexit__(None, None, None))
        runner.run(llm.shutdown())


def answer_of(answer):
    """What a client makes of a stream: for each choice its text, log-probabilities and end; and the usage."""
    assert answer.status_code == 200, answer.text
    assert b"\n:" not in answer.content
    ids, choices, others = set(), {}, []
    for event in answer.text.split("\n\n"):
        data = event.rpartition("data: ")[2]
        if data in ("", "[DONE]"):
            others.append(data)
            continue
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        ids.add((chunk.get("id"), chunk.get("created")))
        for one in chunk.get("choices", ()):
            text, logprobs, end = choices.setdefault(one["index"], ([], [], []))
            text.append(one.get("text") or one.get("delta", {}).get("content") or "")
            logprobs += (one.get("logprobs") or {}).get("content") or ()
            end += [one["finish_reason"]] if one["finish_reason"] else []
        if usage := chunk.get("usage"):
            others.append({key: value for key, value in usage.items() if "details" not in key})
        if "delta" in chunk:
            others.append(chunk["delta"].get("stop_reason"))
            choices.setdefault(0, ([], [], []))[0].append(chunk["delta"].get("text", ""))
    assert len(ids) <= 2
    return {index: ("".join(one[0]), *one[1:]) for index, one in choices.items()}, [
        one for one in others if one is not None
    ]


def response_of(answer):
    """The same of a stream of /v1/responses, whose events name each other's items."""
    assert answer.status_code == 200, answer.text
    events = [json.loads(block.rpartition("data: ")[2]) for block in answer.text.split("\n\n") if block]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert {event["response"]["id"] for event in events if "response" in event} == {response["id"]}
    items = {item["id"] for item in response["output"]}
    assert {event["item_id"] for event in events if "item_id" in event} <= items
    kinds = [event["type"] for event in events if not event["type"].endswith(".delta")]
    text = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    assert text == "".join(part["text"] for item in response["output"] for part in item["content"])
    return kinds, text, response["status"], response["usage"]["output_tokens"]


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 12_000), min_size=1, max_size=2))
def test_another_engine_continues_a_response(engines, cuts):
    runner, servers = engines
    body = {"model": "mini", "input": "Who is it?", "max_output_tokens": 24, "stream": True, "temperature": 0}
    expected = response_of(runner.run(servers.direct.post(RESPONSES, json=body)))
    servers.cuts[:] = cuts
    assert response_of(runner.run(servers.routed.post(RESPONSES, json=body))) == expected
    servers.cuts.clear()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(BODIES), st.lists(st.integers(0, 8000), min_size=1, max_size=2))
def test_another_engine_continues_a_stream_wherever_it_breaks_off(engines, sent, cuts):
    runner, servers = engines
    path, body = sent
    body = {"model": "mini", "max_tokens": 24, "stream": True, **body}
    if path != ANTHROPIC:
        body.setdefault("seed", 3)
    else:
        body["temperature"] = 0
    expected = answer_of(runner.run(servers.direct.post(path, json=body)))
    servers.cuts[:] = cuts
    answer = runner.run(servers.routed.post(path, json=body))
    assert answer_of(answer) == expected
    servers.cuts.clear()
