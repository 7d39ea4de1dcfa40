"""What clients see when the engine fails, and what the engine sees when clients leave."""

import asyncio
import contextlib
import json
import logging
import socket

import httpx
import openai
import pytest
from fake_llm import REPLY

USER = {"role": "user", "content": "hold on"}


def events_of(text):
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


async def complete(http, prompt, **fields):
    return await http.post("/v1/completions", json={"model": "fake", "prompt": prompt, **fields})


@pytest.mark.parametrize(
    ("prompt", "status", "code"),
    [
        ("die", 503, "engine_dead"),
        ("poison", 500, "quarantined"),
        ("fail", 500, "generation_failed"),
        ("late", 500, "generation_failed"),
        ("cut", 500, None),
        ("empty", 500, None),
        ("crash", 500, "internal_error"),
    ],
)
async def test_failures_are_never_an_empty_success(http, llm, prompt, status, code):
    response = await complete(http, prompt)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert not llm.live


@pytest.mark.parametrize(
    ("prompt", "code"), [("die", "engine_dead"), ("fail", "generation_failed"), ("cut", None)]
)
async def test_failures_in_a_stream_are_its_last_event(http, prompt, code):
    response = await complete(http, prompt, stream=True)
    assert response.status_code == 200
    *good, last = events_of(response.text)
    assert good
    assert json.loads(last)["error"]["code"] == code
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("others", [[], ["late"]])
async def test_a_slow_reader_gets_what_was_generated_before_the_failure(http, others):
    response = await complete(http, ["late", *others], stream=True)
    assert response.status_code == 200
    *pieces, last = [json.loads(event) for event in events_of(response.text)]
    assert [piece["choices"][0]["text"] for piece in pieces] == [REPLY[:4]]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None]
    assert last["error"]["code"] == "generation_failed"


async def test_openai_client_raises_on_a_failure_in_a_stream(client):
    stream = await client.completions.create(model="fake", prompt="fail", stream=True)
    with pytest.raises(openai.APIError, match="NaN in the logits"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("prompt", ["crash", "empty"])
async def test_failures_before_the_first_event_have_their_status(http, prompt):
    assert (await complete(http, prompt, stream=True)).status_code == 500


async def test_unexpected_errors_are_logged_once_and_not_disclosed(http, caplog):
    with caplog.at_level(logging.ERROR):
        response = await complete(http, "crash")
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in response.text
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "secret detail" in str(record.exc_info[1])


async def test_one_failed_prompt_fails_the_call_and_ends_the_others(http, llm):
    response = await complete(http, ["hold", "fail", "hold"])
    assert response.status_code == 500
    assert len(llm.aborted) == 2
    assert not llm.live


async def test_after_the_engine_died_everything_says_so(http):
    await complete(http, "die")
    for path in ("/health", "/ready", "/ping"):
        health = await http.get(path)
        assert health.status_code == 503
        assert health.json() == {"status": "unavailable", "reason": "the engine process ended with signal 9"}
    assert (await complete(http, "Hi")).status_code == 503
    assert "quire_engine_up 0.0" in (await http.get("/metrics")).text


async def test_health(http):
    response = await http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "reason": None})


def test_head_is_answered_like_get_without_the_body(live):
    with httpx.Client(base_url=live) as http:  # a body would be read as the next answer
        for path in ("/health", "/ping", "/v1/models", "/version", "/docs"):
            head, get = http.head(path), http.get(path)
            assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
            assert head.headers["content-length"] == get.headers["content-length"]


async def test_cancelled_stream_aborts_in_the_engine(live, llm):
    async with openai.AsyncOpenAI(base_url=f"{live}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(model="fake", messages=[USER], stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
    assert await asyncio.to_thread(llm.abort_seen.wait, 60)
    assert not llm.live


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hold", ["hold", "hold"]])
async def test_client_that_leaves_aborts_in_the_engine(live, llm, stream, prompt):
    async with httpx.AsyncClient() as client:
        body = {"model": "fake", "prompt": prompt, "stream": stream}
        task = asyncio.create_task(client.post(f"{live}/v1/completions", json=body))
        assert await asyncio.to_thread(llm.held_seen.wait, 60)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert await asyncio.to_thread(llm.abort_seen.wait, 60)


async def test_openai_timeout_aborts_in_the_engine(live, llm):
    async with openai.AsyncOpenAI(base_url=f"{live}/v1", api_key="x", max_retries=0) as client:
        while not llm.held_seen.is_set():  # on a busy machine, a request may be given up before it is read
            with pytest.raises(openai.APITimeoutError):
                await client.completions.create(model="fake", prompt="hold", timeout=0.5)
    assert await asyncio.to_thread(llm.abort_seen.wait, 60)


def test_client_that_leaves_while_it_sends_its_body(live, llm):
    with socket.create_connection(("127.0.0.1", int(live.rsplit(":", 1)[1]))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
    assert httpx.get(f"{live}/health").status_code == 200
    assert not llm.seen


async def test_draining_refuses_new_requests_and_finishes_running_ones(app, http, llm):
    calls = app.state.context.calls
    task = asyncio.create_task(complete(http, "hold"))
    await llm.held.wait()
    calls.begin_drain()
    refused = await complete(http, "Hi")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    health = await http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    [request_id] = calls.request_ids
    llm.abort(request_id)
    assert (await task).status_code == 503
    await asyncio.wait_for(calls.wait_idle(), 10)
    assert calls.request_ids == []
