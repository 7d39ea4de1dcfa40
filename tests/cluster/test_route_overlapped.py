"""A decode engine reads KV while a prefill engine computes it, and does not wait for what will not come."""

import asyncio

import pytest
from fake_upstream import ANSWER, EVENTS, TIMEOUT, FakeEngine, releases_end

BODY = {"model": "m", "prompt": "a prompt that is worth the detour " * 4, "stream": True}
FAULTS = [
    "429",
    "500",
    "503",
    "dies",
    "garbage",
    "dies in the head",
    "dies before the body",
    "hangs",
    "no params",
]


def lender(fault="", port=7001) -> FakeEngine:
    engine = FakeEngine(fault)
    engine.kv_port = port
    return engine


async def test_both_engines_are_asked_at_once(routed):
    prefill, decode = lender("waits"), FakeEngine("waits")
    http, router = await routed(prefill=[prefill], decode=[decode])
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await decode.got_one.wait()
    await prefill.got_one.wait()
    prefill.may_go_on.set()
    decode.may_go_on.set()
    assert (await asking).content == b"".join(EVENTS)
    lent, read = (one.seen[0].body["kv_transfer_params"] for one in (prefill, decode))
    transfer_id = lent.pop("transfer_id")
    assert len(bytes.fromhex(transfer_id)) == 16
    assert lent == {"do_remote_decode": True}
    assert read == {
        "do_remote_prefill": True, "transfer_id": transfer_id, "remote_host": "10.0.0.1", "remote_port": 7001,
    }  # fmt: skip
    await http.post("/v1/completions", json={**BODY, "prompt": "another one " * 9})
    assert prefill.seen[1].body["kv_transfer_params"]["transfer_id"] != transfer_id
    assert b"quire_route_prefill_fallbacks_total 0.0" in router.metrics.exposition()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_decode_engine_whose_kv_will_not_come_is_asked_again_without_it(routed, fault, stream):
    prefill, decode = lender(fault), FakeEngine()
    decode.waits_for = 7001
    http, router = await routed(
        prefill=[prefill], decode=[decode], prefill_timeout=TIMEOUT, hanging_times_out=True
    )
    answer = await http.post(
        "/v1/completions", json={**BODY, "stream": stream}, headers={"X-Request-Id": "r" * 128}
    )
    assert answer.content == (b"".join(EVENTS) if stream else ANSWER)
    assert ["kv_transfer_params" in one.body for one in decode.seen] == [True, False]
    assert [one.headers["x-request-id"] for one in decode.seen] == ["r" * 128, "r" * 121 + "-again1"]
    await decode.lost_one.wait()
    assert b"quire_route_prefill_fallbacks_total 1.0" in router.metrics.exposition()
    assert {one.num_requests for one in router.engines.by_url.values()} == {0}


async def test_another_prefill_engine_takes_over(routed):
    first, second, decode = lender("503"), lender(port=7002), FakeEngine()
    decode.waits_for = 7001
    http, _ = await routed(prefill=[first, second], decode=[decode])
    assert (await http.post("/v1/completions", json=BODY)).content == b"".join(EVENTS)
    ports = [one.body["kv_transfer_params"]["remote_port"] for one in decode.seen]
    assert ports == [7001, 7002]


async def test_what_is_wrong_with_a_request_its_decode_engine_says(routed):
    prefill, decode = lender("400"), FakeEngine("400")
    http, router = await routed(prefill=[prefill], decode=[decode])
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.json()["error"]["message"] == f"refused by {decode.url}"
    assert b"quire_route_prefill_fallbacks_total 0.0" in router.metrics.exposition()


async def test_kv_that_its_decode_engine_does_not_read_is_released(routed):
    prefill, decode = lender(), FakeEngine("waits")
    http, router = await routed(prefill=[prefill], decode=[decode])
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await decode.got_one.wait()
    await prefill.got_one.wait()
    while router.engines.by_url[prefill.url].num_requests:
        await asyncio.sleep(0.001)
    decode.fault = "400"
    decode.may_go_on.set()
    assert (await asking).status_code == 400
    await releases_end(router)
    lent, released = prefill.seen
    transfer_id = lent.body["kv_transfer_params"]["transfer_id"]
    assert (released.method, released.path) == ("DELETE", f"/v1/kv_transfers/{transfer_id}")


@pytest.mark.parametrize(("model", "port"), [("m", 7001), ("n", 7002), ("n:latest", 7002), ("other", 7000)])
async def test_kv_is_read_where_the_engine_of_the_model_is(routed, model, port):
    prefill, decode = lender(), FakeEngine()
    prefill.models, prefill.other_kv_ports = ["m", "n", "other"], {"n": 7002, "other": 0}
    http, _ = await routed(prefill=[prefill], decode=[decode])
    await http.post("/v1/completions", json={**BODY, "model": model})
    assert decode.seen[0].body["kv_transfer_params"]["remote_port"] == port  # 7000 is told by the prefill


async def test_a_prefill_that_fails_after_the_answer_has_begun_costs_nothing(routed):
    prefill, decode = lender("waits"), FakeEngine("pauses")
    http, _ = await routed(prefill=[prefill], decode=[decode])
    async with http.stream("POST", "/v1/completions", json=BODY) as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == EVENTS[0]
        await prefill.stop()
        decode.may_go_on.set()
        assert b"".join([piece async for piece in pieces]) == b"".join(EVENTS[1:])


async def test_a_client_that_leaves_frees_both_engines(routed):
    prefill, decode = lender("hangs"), FakeEngine()
    decode.waits_for = 7001
    http, router = await routed(prefill=[prefill], decode=[decode])
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await prefill.got_one.wait()
    await decode.got_one.wait()
    asking.cancel()
    await prefill.lost_one.wait()
    await decode.lost_one.wait()
    await router.calls.wait_idle()


@pytest.mark.parametrize(("kv_transfer", "port"), [("sequential", 7001), ("overlapped", 0)])
async def test_kv_is_read_afterwards_on_demand_or_if_an_engine_does_not_say_where(routed, kv_transfer, port):
    prefill, decode = lender(port=port), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[decode], kv_transfer=kv_transfer)
    await http.post("/v1/completions", json=BODY)
    assert prefill.seen[0].body["kv_transfer_params"] == {"do_remote_decode": True}
    assert decode.seen[0].body["kv_transfer_params"]["transfer_id"] == "ab"
