"""One request and the engines that may answer it: retries, errors that name their cause, lost clients."""

import asyncio
import json
import time
from typing import Any

import aiohttp.connector
import httpx
import pytest
from fake_upstream import ANSWER, EVENTS, PARAMS, TIMEOUT, FakeEngine, check_health

from quire.cluster.answering import MAX_ATTEMPTS
from quire.cluster.app import create_app
from quire.cluster.engines.registry import Engine, Role
from quire.cluster.router import Router

BODY = {"model": "m", "prompt": "Hi"}
STREAM = {**BODY, "stream": True}
FAULTS = [
    "429", "503", "dies", "garbage", "dies in the head", "dies before the body", "hangs",
    "hangs before the body", "gone",
    "dies at no agreed end",
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [*FAULTS, "dies in the body"])
async def test_another_engine_answers_if_one_fails_before_the_first_byte(routed, fault, stream):
    if stream and fault == "dies in the body":
        return  # see below
    first, second = FakeEngine(fault), FakeEngine()
    first.may_go_on.set()
    http, router = await routed(engine=[first, second], first_byte_timeout=TIMEOUT, hanging_times_out=True)
    if fault == "gone":
        await first.stop()
    answer = await http.post("/v1/completions", json=STREAM if stream else BODY)
    assert answer.status_code == 200
    assert answer.content == (b"".join(EVENTS) if stream else ANSWER)
    if fault != "gone":
        assert b"quire_route_retries_total 1.0" in router.metrics.exposition()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_without_another_engine_the_error_names_its_cause(routed, fault, stream):
    engine = FakeEngine(fault)
    http, _ = await routed(engine=[engine], first_byte_timeout=TIMEOUT, hanging_times_out=True)
    if fault == "gone":
        await engine.stop()
    answer = await http.post("/v1/completions", json=STREAM if stream else BODY)
    error = answer.json()["error"]
    assert engine.url in error["message"]
    if fault.isdecimal():
        assert answer.status_code == int(fault)
        assert answer.headers["retry-after"] == "7"
    else:
        assert answer.status_code == (504 if fault.startswith("hangs") else 502)


@pytest.mark.parametrize("fault", ["400", "404", "500"])
async def test_an_engines_own_errors_are_passed_on(routed, fault):
    engines = [FakeEngine(fault), FakeEngine(fault)]
    http, _ = await routed(engine=engines)
    answer = await http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (int(fault), "7")
    assert "refused by" in answer.json()["error"]["message"]
    assert sum(len(one.seen) for one in engines) == 1


@pytest.mark.parametrize("fault", ["dies in the body", "hangs in the body"])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(routed, clock, fault):
    engine, other = FakeEngine(fault), FakeEngine()
    http, router = await routed(engine=[engine, other], idle_timeout=TIMEOUT)
    events = []
    async with http.stream("POST", "/v1/completions", json=STREAM) as answer:
        async for line in answer.aiter_lines():
            if line:
                events.append(line)
            if len(events) == 1:
                engine.may_go_on.set()
                clock.skip()
                asyncio.get_running_loop().call_later(0, clock.skip)  # it is noticed the second time
    assert answer.status_code == 200
    assert events[0].encode() == EVENTS[0].strip()
    error = json.loads(events[1].removeprefix("data: "))["error"]
    assert engine.url in error["message"]
    assert error["code"] == "engine_failed"
    assert len(events) == 2, "the event that was not complete is not sent"
    assert not other.seen
    assert b"quire_route_broken_answers_total 1.0" in router.metrics.exposition()


async def test_a_machine_that_came_back_is_not_asked_over_its_old_connections(routed, engine, monkeypatch):
    http, _ = await routed(engine=[engine])
    engine.fault = "waits"
    asked = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(MAX_ATTEMPTS)]
    while len(engine.seen) < MAX_ATTEMPTS:
        await asyncio.sleep(0.01)
    engine.may_go_on.set()
    await asyncio.gather(*asked)
    engine.forgets_connections = True
    monkeypatch.setattr(aiohttp.connector, "monotonic", lambda: time.monotonic() + 3)
    answer = await http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.content) == (200, ANSWER)


async def check_answered_by(other: FakeEngine, router: Router, answering: asyncio.Task[Any]) -> None:
    """Check that an engine which joins gives a request its answer."""
    await other.start()
    await router.add(Engine(other.url, Role.BOTH))
    answer = await answering
    await other.stop()
    assert (answer.status_code, answer.content) == (200, ANSWER)


async def is_down(engine: Engine) -> None:
    while not engine.failure:
        await asyncio.sleep(0.01)


async def is_served(router: Router) -> None:
    while not router.num_serving:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("fault", ["hangs", "hangs before the body"])
async def test_another_engine_answers_in_place_of_one_of_which_nothing_is_heard(routed, fault, is_removed):
    engine, other = FakeEngine(fault), FakeEngine()
    http, router = await routed(
        engine=[engine], connect_timeout=0.2, health_interval=0.05, recovery_timeout=60
    )
    answering = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await engine.got_one.wait()
    await other.start()
    await router.add(Engine(other.url, Role.BOTH))
    if is_removed:
        await router.remove(router.engines.by_url[engine.url])
    engine.health = None
    answer = await answering
    await other.stop()
    assert (answer.status_code, answer.content) == (200, ANSWER)


async def test_an_engine_that_fails_is_asked_again_by_another_id(routed):
    engine = FakeEngine("dies before the body")
    http, _ = await routed(engine=[engine], recovery_timeout=60, health_interval=0.05)
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
    while len(engine.seen) < 2:
        await asyncio.sleep(0.01)
    asking.cancel()
    ids = [one.headers["x-request-id"] for one in engine.seen[:2]]
    assert ids[1] == f"{ids[0]}-again1"


async def test_engines_that_cannot_be_reached_do_not_end_a_request(routed):
    engines, other = [FakeEngine() for _ in range(3)], FakeEngine()
    http, router = await routed(engine=engines, recovery_timeout=60)
    for engine in engines:
        await engine.stop()
    answering = asyncio.create_task(http.post("/v1/completions", json=BODY))
    for engine in engines:
        await is_down(router.engines.by_url[engine.url])
    await check_answered_by(other, router, answering)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_request_that_comes_while_no_engine_is_up_waits_for_one(routed, path):
    engine, other = FakeEngine(), FakeEngine()
    http, router = await routed(engine=[engine], recovery_timeout=60, health_interval=0.05)
    await engine.stop()
    await is_down(router.engines.by_url[engine.url])
    answering = asyncio.create_task(http.post(path, json=BODY))
    await is_served(router)
    await check_answered_by(other, router, answering)


async def test_a_request_that_waits_for_an_engine_is_prefilled_elsewhere_once_one_is_up(routed):
    prefill, decode = FakeEngine(), FakeEngine()
    http, router = await routed(
        prefill=[prefill], decode=[decode], recovery_timeout=60, health_interval=0.05, min_prefill_bytes=1
    )
    await decode.stop()
    await is_down(router.engines.by_url[decode.url])
    answering = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await is_served(router)
    assert not prefill.seen, "its KV would be held for nothing"
    await decode.start()
    assert (await answering).status_code == 200
    assert len(prefill.seen) == 1


async def test_a_request_waits_for_an_engine_that_goes_down_during_its_prefill(routed):
    prefill, decode = FakeEngine("waits"), FakeEngine()
    http, router = await routed(
        prefill=[prefill], decode=[decode], recovery_timeout=60, health_interval=0.05, min_prefill_bytes=1
    )
    answering = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await prefill.got_one.wait()
    await decode.stop()
    await is_down(router.engines.by_url[decode.url])
    prefill.may_go_on.set()
    while router.engines.by_url[prefill.url].num_requests:
        await asyncio.sleep(0.01)
    await decode.start()
    assert (await answering).status_code == 200
    assert decode.seen[-1].body["kv_transfer_params"] == PARAMS


async def test_a_client_that_leaves_while_no_engine_is_up_is_not_served_any_more(routed):
    engine = FakeEngine()
    http, router = await routed(engine=[engine], recovery_timeout=60, health_interval=0.05)
    await engine.stop()
    await is_down(router.engines.by_url[engine.url])
    answering = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await is_served(router)
    answering.cancel()
    while router.num_serving:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_request_waits_once(routed, clock, path):
    engine = FakeEngine()
    http, router = await routed(engine=[engine], recovery_timeout=TIMEOUT, health_interval=0.05)
    await engine.stop()
    await is_down(router.engines.by_url[engine.url])
    answering = asyncio.create_task(http.post(path, json=BODY))
    await is_served(router)
    await asyncio.sleep(0.01)  # it waits
    clock.skip()
    assert (await answering).json()["error"]["code"] == "no_engine"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_does_not_wait_for_an_engine(routed, method):
    engine = FakeEngine()
    http, router = await routed(engine=[engine], recovery_timeout=TIMEOUT, health_interval=0.05)
    router.engines.by_url[engine.url].is_draining = method == "POST"
    await engine.stop()
    await is_down(router.engines.by_url[engine.url])
    answer = await http.request(method, "/v1/anything")
    assert answer.json()["error"]["code"] == "no_engine"


async def test_a_request_does_not_wait_for_an_engine_that_was_never_up(routed):
    engine = FakeEngine()
    engine.health = None
    http, router = await routed(recovery_timeout=TIMEOUT, connect_timeout=0.1, health_interval=0.05)
    await engine.start()
    await router.add(Engine(engine.url, Role.BOTH))
    answer = await http.post("/v1/completions", json=BODY)
    await engine.stop()
    assert answer.json()["error"]["code"] == "no_engine"


async def test_a_stream_of_an_engine_of_which_nothing_is_heard_ends(routed):
    engine = FakeEngine("hangs in the body")
    http, _ = await routed(engine=[engine], connect_timeout=0.2, health_interval=0.05, recovery_timeout=60)
    answering = asyncio.create_task(http.post("/v1/completions", json=STREAM))
    await engine.got_one.wait()
    engine.health = None
    assert "answers nothing any more" in (await answering).text


async def test_a_long_answer_that_breaks_off_does_not_look_complete(routed):
    http, _ = await routed(engine=[FakeEngine("dies in a long body")])
    with pytest.raises(httpx.RemoteProtocolError):
        await http.post("/v1/completions", json=BODY)


@pytest.mark.parametrize("fault", ["hangs", "hangs before the body", "hangs in the body"])
async def test_a_client_that_leaves_frees_its_engine(routed, fault):
    engine = FakeEngine(fault)
    http, router = await routed(engine=[engine])
    asking = asyncio.create_task(http.post("/v1/completions", json=STREAM))
    await engine.got_one.wait()
    asking.cancel()
    await engine.lost_one.wait()
    await router.calls.wait_idle()
    assert router.engines.by_url[engine.url].num_requests == 0
    assert router.num_serving == 0
    assert b'quire_route_answers_total{status="499"} 1.0' in router.metrics.exposition()


@pytest.mark.parametrize("fault", ["hangs", "hangs before the body", "hangs in the body"])
async def test_a_client_that_leaves_a_server_that_cancels_is_counted_once(routed, fault):
    engine = FakeEngine(fault)
    _, router = await routed(engine=[engine])
    transport = httpx.ASGITransport(create_app(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as cancelling:
        asking = asyncio.create_task(cancelling.post("/v1/completions", json=STREAM))
        await engine.got_one.wait()
        asking.cancel()
        await asyncio.wait([asking])
    counts = [line for line in router.metrics.exposition().splitlines() if b"answers_total{" in line]
    assert counts == [b'quire_route_answers_total{status="499"} 1.0']


async def test_a_client_that_leaves_frees_the_prefill_engine(routed):
    prefill, decode = FakeEngine("hangs"), FakeEngine()
    http, router = await routed(prefill=[prefill], decode=[decode])
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "word " * 50}))
    await prefill.got_one.wait()
    asking.cancel()
    await prefill.lost_one.wait()
    await router.calls.wait_idle()
    assert not decode.seen


async def test_a_slow_reader_holds_up_its_engine_and_not_the_routers_memory(routed):
    engine = FakeEngine("long stream")
    http, _ = await routed(engine=[engine])
    async with http.stream("POST", "/v1/completions", json=STREAM) as answer:
        await engine.may_go_on.wait()  # the engine cannot send any more
        assert engine.num_sent < 20_000_000
        num_bytes = 0
        async for piece in answer.aiter_raw():
            num_bytes += len(piece)
    assert num_bytes == 4000 * 9998


async def test_other_requests_are_passed_on(routed, engine):
    http, _ = await routed(engine=[engine])
    answer = await http.get(
        "/v1/models/a%2Fb?x=%20y", headers={"X-Mine": "é".encode(), "Connection": "close"}
    )
    assert answer.content == ANSWER
    [seen] = engine.seen
    assert (seen.method, seen.path) == ("GET", "/v1/models/a%2Fb?x=%20y")
    assert seen.headers["x-mine"].encode("latin-1").decode() == "é"
    await http.post("/v1/embeddings", content=b"not json")
    assert engine.seen[1].content == b"not json"
    refused = await http.get("/v1/models", headers={"X-Mine": b"\xe9"})
    assert (refused.status_code, len(engine.seen)) == (400, 2)
    assert "x-mine" in refused.json()["error"]["message"]
    for path in ("requests", "kv_transfers/x"):
        refused = await http.get(f"/v1/{path}")
        assert (refused.status_code, len(engine.seen)) == (404, 2)


async def test_prompts_that_begin_alike_go_to_one_engine_until_that_has_much_more_to_do(routed):
    engines = [FakeEngine(), FakeEngine()]
    http, router = await routed(engine=engines)
    head = "word " * 600
    for n in range(6):
        await http.post("/v1/completions", json={"prompt": f"{head}{n}"})
    [favourite] = [one for one in engines if one.seen]
    [other] = [one for one in engines if one is not favourite]
    assert len(favourite.seen) == 6
    with router.engines.by_url[favourite.url].serving(15_000):
        await http.post("/v1/completions", json={"prompt": head})
    assert (len(favourite.seen), len(other.seen)) == (6, 1)


async def test_prompts_with_nothing_in_common_are_spread(routed):
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    http, _ = await routed(engine=engines)
    for n in range(9):
        await http.post("/v1/completions", json={"prompt": f"{n} " * 1000})
    assert [len(one.seen) for one in engines] == [3, 3, 3]


async def test_what_an_engine_had_cached_counts_no_longer_after_it_was_down(routed):
    engines = [FakeEngine(), FakeEngine()]
    http, router = await routed(engine=engines)
    for _ in range(2):
        await http.post("/v1/completions", json={"prompt": "word " * 600})
    [favourite] = [one for one in engines if one.seen]
    known = router.engines.by_url[favourite.url]
    known.mark_down("it was restarted")
    await check_health(router, known)
    await http.post("/v1/completions", json={"prompt": "word " * 600})
    assert len(favourite.seen) == 2


OWNER_CALLS = [("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses"), ("DELETE", "/v1/responses/resp_1")]


@pytest.mark.parametrize(("method", "path"), OWNER_CALLS)
async def test_the_engine_is_found_that_has_a_response(routed, method, path):
    engines = [FakeEngine("404"), FakeEngine("404"), FakeEngine("404"), FakeEngine()]
    http, _ = await routed(engine=engines)
    answer = await http.request(method, path, content=b'{"previous_response_id": "resp_1"}')
    assert (answer.status_code, answer.content) == (200, ANSWER)
    assert {one.content for engine in engines for one in engine.seen} == {
        b'{"previous_response_id": "resp_1"}'
    }
    assert len(engines[-1].seen) == 1


@pytest.mark.parametrize(
    ("faults", "status"), [(["404", "404"], 404), (["404", "429"], 429), (["404", "dies"], 502)]
)
async def test_a_response_that_no_engine_has(routed, faults, status):
    engines = [FakeEngine(fault) for fault in faults]
    http, _ = await routed(engine=engines)
    answer = await http.get("/v1/responses/resp_1")
    assert answer.status_code == status
    assert engines[0].seen


async def test_a_response_may_be_with_an_engine_that_is_down(routed):
    up, down = FakeEngine("404"), FakeEngine()
    down.health = 503
    http, _ = await routed(engine=[up, down])
    answer = await http.get("/v1/responses/resp_1")
    assert answer.status_code == 503
    assert f"{down.url} is down" in answer.json()["error"]["message"]


async def test_a_model_that_is_not_served_is_not_looked_for(routed):
    engines = [FakeEngine("404"), FakeEngine("404")]
    for engine in engines:
        engine.error_code = "model_not_found"
    http, _ = await routed(engine=engines)
    assert (await http.post("/v1/responses", json=BODY)).status_code == 404
    assert sum(len(one.seen) for one in engines) == 1
