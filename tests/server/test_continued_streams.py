"""Streams that another server has begun: what is behind the body is checked before anything is made of it."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

import preloaded
from quire import AsyncLLM, EngineConfig, SchedulerConfig
from quire.config import ServerConfig
from quire.server.app import create_app

CHAT = "/v1/chat/completions"
BODY = {"model": "mini", "messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 12}
START = '["id", 1000, 5]'


@pytest.fixture(scope="module")
def engine():
    with preloaded.engines():
        llm = AsyncLLM(EngineConfig(num_threads=1, scheduler=SchedulerConfig(num_kv_blocks=64)))
    asyncio.run(llm.wait_until_ready())
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture
async def http(engine):
    transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield client


async def continued(http, lines, path=CHAT, size=None, **fields):
    body = json.dumps({**BODY, "stream": True, **fields}).encode()
    behind = "\n".join(lines).encode()
    headers = {
        "Content-Type": "application/json",
        "X-Quire-Continuation": str(len(behind)) if size is None else size,
        "X-Quire-Progress": "1",
    }
    return await http.post(path, content=body + behind, headers=headers)


def progress_of(answer):
    blocks = answer.text.split("\n\n")
    return [line for block in blocks if block.startswith(":") for line in block[1:].split("\n:") if line]


async def test_a_stream_continues_with_the_same_tokens_id_and_time(http):
    answer = await http.post(CHAT, json={**BODY, "stream": True}, headers={"X-Quire-Progress": "1"})
    lines = progress_of(answer)
    assert len(lines) > 2
    for num_lines in (1, 2, len(lines) // 2, len(lines)):
        again = await continued(http, lines[:num_lines])
        assert again.headers["X-Quire-Progress"] == "1"
        [start, *outputs] = progress_of(again)
        assert start == lines[0]
        tokens = [
            [token for one in output for token in json.loads(one)[0][1]] for output in (outputs, lines[1:])
        ]
        assert tokens[0] == tokens[1]
        event = json.loads(again.text.partition("data: ")[2].partition("\n\n")[0])
        assert [event["id"], event["created"]] == json.loads(start)[:2]


async def test_a_stream_without_a_router_has_no_progress(http):
    answer = await http.post(CHAT, json={**BODY, "stream": True})
    assert "\n:" not in answer.text
    assert "X-Quire-Progress" not in answer.headers


@pytest.mark.parametrize(
    "lines",
    [
        ["x"],
        ["[1]"],
        ['["id", "now", 5]'],
        ["[" * 100_000],
        [START, "[[0, [1.5]]]"],
        [START, "[[0, [1], 7]]"],
        [START, '[[0, [1], "bored"]]'],
        [START, "[[0, [-1]]]"],
        [START, "[[0, [99999]]]"],
        [START, "[[1, [1]]]"],
        [START, "[[-1, [1]]]"],
        [START, json.dumps([[0, [1] * 12]])],
        [START, json.dumps([[0, [1] * 13, "length"]])],
        [START, '[[0, [1], "stop"]]', "[[0, [1]]]"],
    ],
)
async def test_progress_that_cannot_be_is_refused(http, lines):
    answer = await continued(http, lines)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("X-Quire-Continuation", "outputs_so_far")


@pytest.mark.parametrize("size", ["", "0", "-1", "1.5", "x", "99999999", "1048577", "9" * 50, "\u0664"])
async def test_a_size_that_cannot_be_is_refused(http, size):
    answer = await continued(http, [START], size=size.encode())
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"stream": False}),
        ("/v1/completions", {"prompt": "a", "messages": None, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": ["a", "b"], "messages": None}),
        ("/v1/responses", {"input": "Who is it?", "include": ["message.output_text.logprobs"]}),
        ("/v1/responses", {"input": "Who is it?", "background": True}),
    ],
)
async def test_a_call_that_cannot_be_continued_is_refused_by_name(http, path, fields):
    if path == "/v1/responses":
        fields |= {"messages": None, "max_tokens": None}
    answer = await continued(http, [START, "[[0, [1]]]"], path, **fields)
    assert answer.status_code == 400, answer.text
    assert "continued" in answer.json()["error"]["message"]


async def test_tokens_that_a_grammar_forbids_end_only_their_request(http):
    grammar = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer, other = await asyncio.gather(
        continued(http, [START, "[[0, [300, 301]]]"], **grammar), http.post(CHAT, json=BODY)
    )
    assert other.status_code == 200
    assert answer.status_code == 400 or '"error"' in answer.text
    assert (await http.post(CHAT, json=BODY)).status_code == 200
