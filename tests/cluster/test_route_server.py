"""The router's own endpoints and limits: what it refuses, which engines it has, how it stops."""

import asyncio
import json
import logging
import signal
import subprocess
import sys

import pytest
from fake_upstream import ANSWER, EVENTS, FakeEngine, running, watched_urls

from quire.cluster.engines.registry import Engine, Role
from quire.config import RouterConfig
from quire.errors import ConfigError
from subprocesses import started

BODY = {"model": "m", "prompt": "Hi"}
STREAM = {**BODY, "stream": True}


async def test_what_is_refused_says_why(routed, engine):
    http, _ = await routed(engine=[engine], max_body_bytes=1000)
    for method, path, options, status, words in (
        ("GET", "/v2", {}, 404, "/v2"),
        ("PUT", "/health", {}, 405, "GET"),
        ("POST", "/v1/completions", {"content": b"[1]"}, 400, "not a JSON object"),
        ("POST", "/v1/completions", {"content": b'{"a": tru}'}, 400, "not a JSON object"),
        ("POST", "/v1/completions", {"content": b'{"a":' + b"[" * 900}, 400, "not a JSON object"),
        ("POST", "/v1/completions", {"content": b'{"a": "%s"}' % (b"x" * 1000)}, 413, "max_body_bytes"),
        (
            "POST",
            "/v1/completions",
            {"content": b"{}", "headers": {"Content-Encoding": "gzip"}},
            415,
            "uncompressed",
        ),
    ):
        answer = await http.request(method, path, **options)
        assert answer.status_code == status, path
        assert words in answer.json()["error"]["message"]
    assert not engine.seen


async def test_no_more_requests_are_served_at_once_than_allowed(routed):
    engine = FakeEngine("hangs")
    http, router = await routed(engine=[engine], max_in_flight=1)
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await engine.got_one.wait()
    refused = await http.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "max_in_flight" in refused.json()["error"]["message"]
    assert (await http.get("/health")).status_code == 200
    asking.cancel()
    await router.calls.wait_idle()
    engine.fault = ""
    assert (await http.post("/v1/completions", json=BODY)).content == ANSWER


async def test_the_api_key_guards_all_but_health_and_metrics_and_stays_here(routed, engine):
    http, _ = await routed(engine=[engine], api_key="clé")
    for path in ("/v1/models", "/route/engines", "/nowhere"):
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers={"Authorization": "Bearer wrong"})).status_code == 401
    for path in ("/health", "/ready", "/ping", "/live", "/metrics"):
        assert (await http.get(path)).status_code == 200
    key = {"Authorization": "Bearer clé".encode()}
    assert (await http.post("/v1/completions", json=BODY, headers=key)).content == ANSWER
    other = {"x-api-key": "clé".encode()}
    assert (await http.post("/v1/completions", json=BODY, headers=other)).content == ANSWER
    for seen in engine.seen:
        assert not {"authorization", "x-api-key"} & {name.lower() for name in seen.headers}


@pytest.mark.parametrize(("engine_api_key", "sent"), [("", "Bearer mine"), ("theirs", "Bearer theirs")])
async def test_engines_get_the_clients_key_or_their_own(routed, engine, engine_api_key, sent):
    http, _ = await routed(engine=[engine], engine_api_key=engine_api_key)
    await http.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer mine"})
    assert engine.seen[0].headers["authorization"] == sent


async def test_clients_keys_are_passed_on_and_do_not_change_engines(routed, engine):
    http, _ = await routed(engine=[engine], engine_api_key="theirs", pass_client_keys=True)
    for headers in ({"Authorization": "Bearer mine"}, {"X-Api-Key": "mine"}):
        await http.post("/v1/completions", json=BODY, headers=headers)
        assert set(headers.items()) <= {
            (name.title(), value) for name, value in engine.seen[-1].headers.items()
        }
    assert (await http.get("/route/engines", headers={"Authorization": "Bearer mine"})).status_code == 401
    assert (await http.get("/route/engines", headers={"Authorization": "Bearer theirs"})).is_success


async def test_engines_are_added_drained_and_removed(routed):
    first, second = FakeEngine(), FakeEngine()
    http, router = await routed(engine=[first])
    await second.start()
    added = await http.post("/route/engines", json={"url": second.url + "/", "role": "both"})
    new = {"role": "both", "state": "up", "reason": None, "models": [], "in_flight": 0, "waiting_bytes": 0}
    assert added.json()["data"] == [{"url": one.url, **new} for one in (first, second)]
    drained = await http.post("/route/engines", json={"url": first.url, "draining": True})
    assert [one["state"] for one in drained.json()["data"]] == ["draining", "up"]
    for _ in range(3):
        await http.post("/v1/completions", json=BODY)
    assert (len(first.seen), len(second.seen)) == (0, 3)
    await http.post("/route/engines", json={"url": first.url})
    removed = await http.delete("/route/engines", params={"url": second.url})
    assert [one["url"] for one in removed.json()["data"]] == [first.url]
    assert second.url.encode() not in router.metrics.exposition()
    await http.post("/v1/completions", json=BODY)
    assert len(first.seen) == 1
    assert (await http.delete("/route/engines", params={"url": second.url})).status_code == 404
    await second.stop()


async def test_an_engine_that_is_added_twice_at_once_is_watched_once(routed, engine):
    added = FakeEngine()
    await added.start()
    http, router = await routed(engine=[engine])
    change = {"url": added.url, "role": "both"}
    await asyncio.gather(*(http.post("/route/engines", json=change) for _ in range(3)))
    assert sorted(watched_urls(router)) == sorted([engine.url, added.url])
    await http.delete("/route/engines", params={"url": added.url})
    assert watched_urls(router) == [engine.url]
    await added.stop()


async def test_adding_an_engine_ends_if_it_is_removed_before_it_is_checked(routed, engine):
    _, router = await routed(engine=[engine])
    added = Engine("http://127.0.0.1:1", Role.BOTH)
    adding = asyncio.ensure_future(router.add(added))
    await asyncio.sleep(0)  # what checks it has not begun
    await router.remove(added)
    async with asyncio.timeout(60):
        await adding
    assert list(router.engines.by_url) == [engine.url]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "http://127.0.0.1:1"}, "role is missing"),
        ({"url": "http://127.0.0.1:1", "role": "other"}, "Invalid enum value"),
        ({"url": "file:///etc/passwd", "role": "both"}, "must be a URL such as"),
        ({"url": "http://127.0.0.1:1", "role": "both", "dran": True}, "unknown field `dran`"),
        ([], "Expected `object`"),
    ],
)
async def test_a_change_that_is_not_possible_is_refused(routed, engine, change, words):
    http, router = await routed(engine=[engine])
    answer = await http.post("/route/engines", json=change)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    other_role = await http.post("/route/engines", json={"url": engine.url, "role": "decode"})
    assert "remove it first" in other_role.json()["error"]["message"]
    assert list(router.engines.by_url) == [engine.url]


async def test_a_removed_engine_completes_what_it_has(routed):
    engine = FakeEngine("pauses")
    http, _ = await routed(engine=[engine])
    asking = asyncio.create_task(http.post("/v1/completions", json=STREAM))
    await engine.got_one.wait()
    await http.delete("/route/engines", params={"url": engine.url})
    engine.may_go_on.set()
    assert (await asking).content == b"".join(EVENTS)


async def test_a_removed_engine_that_fails_is_not_counted_again(routed):
    engine = FakeEngine("dies in the body")
    http, router = await routed(engine=[engine])
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await engine.got_one.wait()
    await http.delete("/route/engines", params={"url": engine.url})
    engine.may_go_on.set()
    assert (await asking).status_code == 502
    assert engine.url.encode() not in router.metrics.exposition()


async def test_an_engine_that_fails_is_out_until_it_answers_again(routed, caplog):
    engine = FakeEngine()
    caplog.set_level(logging.INFO, "quire.cluster")
    http, router = await routed(engine=[engine], health_interval=0.01)
    known = router.engines.by_url[engine.url]

    async def until(state):
        while known.state != state:
            await asyncio.sleep(0)  # the checks go on

    engine.health = 503
    await until("down")
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 503
    assert "/health answered 503" in answer.json()["error"]["message"]
    assert (await http.get("/health")).json() == {
        "status": "unavailable",
        "reason": "no engine that generates is up",
    }
    engine.health = 200
    await until("up")
    assert (await http.post("/v1/completions", json=BODY)).content == ANSWER
    await engine.stop()
    await until("down")
    await engine.start()
    await until("up")
    assert [record.message.split(" ")[2].rstrip(":") for record in caplog.records] == [
        "up", "down", "up", "down", "up",
    ]  # fmt: skip


async def test_metrics_count_by_engine(routed):
    prefill, decode = FakeEngine(), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[decode])
    await http.post("/v1/completions", json={"prompt": "word " * 20})
    await http.post("/v1/completions", json=BODY)
    lines = (await http.get("/metrics")).text.splitlines()
    for line in (
        f'quire_route_engine_requests_total{{engine="{prefill.url}",purpose="prefill"}} 1.0',
        f'quire_route_engine_requests_total{{engine="{decode.url}",purpose="answer"}} 2.0',
        f'quire_route_engine_up{{engine="{decode.url}",role="decode"}} 1.0',
        f'quire_route_engine_in_flight{{engine="{decode.url}",role="decode"}} 0.0',
        'quire_route_answers_total{status="200"} 2.0',
        "quire_route_direct_requests_total 1.0",
        "quire_route_in_flight 0.0",
    ):
        assert line in lines


async def test_a_router_that_drains_completes_what_it_has_and_takes_no_more(routed):
    engine = FakeEngine("pauses")
    http, router = await routed(engine=[engine])
    asking = asyncio.create_task(http.post("/v1/completions", json=STREAM))
    await engine.got_one.wait()
    router.calls.begin_drain()
    refused = await http.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert (await http.get("/health")).json()["status"] == "draining"
    engine.may_go_on.set()
    assert (await asking).content == b"".join(EVENTS)
    await router.calls.wait_idle()


@pytest.mark.parametrize("fault", ["pauses", "hangs"])
async def test_a_router_that_is_stopped_says_so_to_those_it_still_serves(routed, fault):
    engine = FakeEngine(fault)
    http, router = await routed(engine=[engine])
    if fault == "hangs":
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await engine.got_one.wait()
        router.stop_serving()
        answer = await asking
        assert answer.status_code == 503
        error = answer.json()["error"]
    else:
        async with http.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).encode() == EVENTS[0].strip()
            router.stop_serving()
            rest = [line async for line in lines if line]
        error = json.loads(rest[0].removeprefix("data: "))["error"]
        assert len(rest) == 1
    assert error["code"] == "router_stopped"


def test_engines_have_urls():
    for url in ("", "127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a/?b", "http://a b:1 "):
        with pytest.raises(ConfigError, match=r"RouterConfig\.decode is .* such as http"):
            RouterConfig(decode=(url,))
    with pytest.raises(ConfigError, match=r"RouterConfig\.engine names http://a a second time"):
        RouterConfig(prefill=("http://a",), engine=("http://a/",))


async def test_headers_that_are_too_long_are_refused(routed, engine):
    http, _ = await routed(engine=[engine])
    answer = await http.post("/v1/completions", json=BODY, headers={"X-Long": "x" * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "header_too_large")
    answer = await http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "x" * 129})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request_id")
    assert not engine.seen


async def test_a_target_with_a_host_of_its_own_goes_to_an_engine_all_the_same(routed, engine):
    http, _ = await routed(engine=[engine])
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write(b"GET http://elsewhere:9/v1/models?a=b%20c HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert [one.path for one in engine.seen] == ["/v1/models?a=b%20c"]


@pytest.mark.processes
async def test_a_client_that_does_not_read_does_not_hold_up_a_second_signal():
    engine = FakeEngine("long stream")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    async with running(engine):
        command = [sys.executable, "-m", "quire.cli.main", "route", "--engine", engine.url, "--port", "0"]
        with started(command, **pipes) as process:
            ready = await asyncio.to_thread(process.stdout.readline)
            port = int(ready.split()[1].rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps(STREAM).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            writer.transport.pause_reading()
            await engine.may_go_on.wait()
            process.send_signal(signal.SIGTERM)
            while not (line := await asyncio.to_thread(process.stderr.readline)).startswith("Stopping: 1"):
                assert line
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0
            writer.close()
