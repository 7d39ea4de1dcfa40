"""A prompt is computed by one engine and continued by another; whatever fails, the client gets its answer."""

import asyncio
import json

import pytest
from fake_upstream import ANSWER, EVENTS, PARAMS, TIMEOUT, FakeEngine, releases_end

PROMPT = "a prompt that is worth the detour " * 4
BODY = {
    "model": "m", "prompt": PROMPT, "max_tokens": 9, "n": 2, "stream": False, "temperature": 0.5,
    "cache_salt": "s", "min_tokens": 3, "logprobs": 2, "stop": ["x"], "n_predict": 9,
}  # fmt: skip
FAULTS = [
    "429", "500", "503", "dies", "garbage", "dies in the head", "dies before the body", "hangs",
    "hangs before the body", "dies in the body", "dies in a long body", "not json", "no params",
    "dies at no agreed end",
]  # fmt: skip


async def test_the_prompt_goes_to_a_prefill_engine_and_its_kv_to_a_decode_engine(routed):
    prefill, decode = FakeEngine(), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[decode])
    answer = await http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "r" * 128})
    assert answer.content == ANSWER
    assert answer.headers["x-kind"] == "plain"
    [computed], [continued] = prefill.seen, decode.seen
    assert computed.path == continued.path == "/v1/completions"
    assert computed.body == {
        "model": "m", "prompt": PROMPT, "max_tokens": 1, "n": 1, "stream": False, "temperature": 0.5,
        "cache_salt": "s", "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip
    assert continued.body == {**BODY, "kv_transfer_params": PARAMS}
    assert continued.headers["x-request-id"] == "r" * 128
    assert computed.headers["x-request-id"] == "r" * 120 + "-prefill"


async def test_a_chat_is_split_too_and_its_stream_comes_byte_for_byte(routed):
    prefill, decode = FakeEngine(), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[decode])
    chat = {
        "model": "m", "messages": [{"role": "user", "content": PROMPT}], "stream": True,
        "stream_options": {"include_usage": True}, "max_completion_tokens": 5, "tools": [{"a": 1}],
    }  # fmt: skip
    answer = await http.post("/v1/chat/completions?x=1", json=chat)
    assert answer.content == b"".join(EVENTS)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    [computed], [continued] = prefill.seen, decode.seen
    assert continued.path == "/v1/chat/completions?x=1"
    assert continued.body == {**chat, "kv_transfer_params": PARAMS}
    assert computed.body == {
        "model": "m", "messages": chat["messages"], "tools": [{"a": 1}], "max_tokens": 1, "n": 1,
        "stream": False, "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/completions/", "/completions", "/chat/completions/", "/completions%2F"]
)
@pytest.mark.parametrize("fields", [{"prompt": PROMPT}, {"prompt": "short"}])
async def test_a_clients_own_transfer_parameters_go_nowhere(routed, fields, path):
    prefill, decode = FakeEngine(), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[decode])
    await http.post(path, json={**fields, "kv_transfer_params": {"remote_host": "evil"}})
    assert b"evil" not in b"".join(one.content for one in prefill.seen + decode.seen)
    assert len(prefill.seen) == (fields["prompt"] == PROMPT)
    assert [one.path for one in decode.seen] == [path]


@pytest.mark.parametrize(
    "prompt", ["[INST] " + PROMPT, " [" + PROMPT, '"' + PROMPT, list(range(40)), [PROMPT], [list(range(40))]]
)
async def test_one_prompt_is_split_however_it_begins_and_in_a_list_of_its_own(routed, prompt):
    prefill, decode = FakeEngine(), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[decode])
    assert (await http.post("/v1/completions", json={"prompt": prompt})).content == ANSWER
    [computed], [continued] = prefill.seen, decode.seen
    assert computed.body["prompt"] == prompt
    assert continued.body == {"prompt": prompt, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "short"},
        {"prompt": [PROMPT, PROMPT]},
        {"prompt": ["", PROMPT]},
        {"prompt": []},
        {"prompt": [[1, 2, 3] * 20, [4, 5, 6] * 20]},
        {"prompt": PROMPT, "echo": True, "logprobs": 1},
        {"prompt": PROMPT, "prompt_logprobs": 1},
        {"prompt": PROMPT, "truncate_prompt_tokens": -1},
    ],
)
async def test_what_gains_nothing_from_a_prefill_engine_goes_past_it_as_the_client_wrote_it(routed, fields):
    prefill, decode = FakeEngine(), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[decode])
    content = json.dumps(fields, indent=3).encode()
    answer = await http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.content == ANSWER
    assert not prefill.seen
    assert [one.content for one in decode.seen] == [content]


async def test_token_ids_are_a_prompt_as_well(routed):
    prefill, decode = FakeEngine(), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[decode])
    await http.post("/v1/completions", json={"prompt": list(range(40))})
    assert decode.seen[0].body["kv_transfer_params"] == PARAMS


async def test_a_prompt_that_its_decode_engine_knows_but_for_a_little_goes_there_directly(routed):
    prefill, decode = FakeEngine(), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[decode], min_prefill_bytes=1000)
    for num_words in (1000, 1050, 2000):
        await http.post("/v1/completions", json={"prompt": "word " * num_words})
    assert len(prefill.seen) == 2
    assert ["kv_transfer_params" in one.body for one in decode.seen] == [True, False, True]


@pytest.mark.parametrize("fault", FAULTS)
async def test_whatever_a_prefill_engine_does_the_client_gets_its_answer(routed, fault):
    prefill, decode = FakeEngine(fault), FakeEngine()
    prefill.may_go_on.set()
    http, router = await routed(
        prefill=[prefill], decode=[decode], prefill_timeout=TIMEOUT, hanging_times_out=True
    )
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.content == ANSWER
    assert len(prefill.seen) == 1
    assert [one.body for one in decode.seen] == [BODY]
    assert b"quire_route_prefill_fallbacks_total 1.0" in router.metrics.exposition()


@pytest.mark.parametrize("fault", [*FAULTS, "gone"])
async def test_another_prefill_engine_is_asked_if_one_fails(routed, fault):
    first, second, decode = FakeEngine(fault), FakeEngine(), FakeEngine()
    first.may_go_on.set()
    http, router = await routed(
        prefill=[first, second], decode=[decode], prefill_timeout=TIMEOUT, hanging_times_out=True
    )
    if fault == "gone":
        await first.stop()
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.content == ANSWER
    assert decode.seen[0].body["kv_transfer_params"] == PARAMS
    assert b"quire_route_prefill_fallbacks_total 0.0" in router.metrics.exposition()
    assert {one.num_requests for one in router.engines.by_url.values()} == {0}
    assert {one.num_waiting_bytes for one in router.engines.by_url.values()} == {0}


async def test_what_a_prefill_engine_finds_wrong_the_decode_engine_tells_the_client(routed):
    prefill, decode = [FakeEngine("400"), FakeEngine("400")], FakeEngine("400")
    http, _ = await routed(prefill=prefill, decode=[decode])
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"refused by {decode.url}"
    assert sum(len(one.seen) for one in prefill) == 1


@pytest.mark.parametrize("fault", ["400", "500", "503", "dies", "gone"])
async def test_kv_that_no_decode_engine_reads_is_released(routed, fault):
    prefill, decode = FakeEngine(), FakeEngine(fault)
    http, router = await routed(prefill=[prefill], decode=[decode], engine_api_key="key")
    if fault == "gone":
        await decode.stop()
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == (int(fault) if fault.isdecimal() else 502)
    await releases_end(router)
    computed, released = prefill.seen
    assert (released.method, released.path, released.content) == ("DELETE", "/v1/kv_transfers/ab", b"")
    assert released.headers["authorization"] == computed.headers["authorization"] == "Bearer key"
    assert released.headers["x-request-id"].endswith("-release")


@pytest.mark.parametrize("faults", [("dies", ""), ("503", ""), ("503", "400")])
async def test_kv_is_released_unless_the_engine_that_answers_reads_it(routed, faults):
    prefill, decode = FakeEngine(), [FakeEngine(fault) for fault in faults]
    http, router = await routed(prefill=[prefill], decode=decode)
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == int(faults[1] or 200)
    await releases_end(router)
    is_read = faults == ("503", "")
    assert [one.method for one in prefill.seen] == ["POST"] + ["DELETE"] * (not is_read)


@pytest.mark.parametrize("transfer_id", ["", None, 5, "../x?y=/z"])
async def test_only_kv_that_has_a_name_is_released(routed, monkeypatch, transfer_id):
    monkeypatch.setitem(PARAMS, "transfer_id", transfer_id)
    prefill, decode = FakeEngine(), FakeEngine("400")
    http, router = await routed(prefill=[prefill], decode=[decode])
    assert (await http.post("/v1/completions", json=BODY)).status_code == 400
    await releases_end(router)
    released = [one.path for one in prefill.seen[1:]]
    assert released == ["/v1/kv_transfers/..%2Fx%3Fy%3D%2Fz"] * (transfer_id == "../x?y=/z")


async def test_an_engine_that_cannot_release_kv_costs_no_answer(routed):
    prefill, decode = FakeEngine(), FakeEngine("waits")
    http, router = await routed(prefill=[prefill], decode=[decode])
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await decode.got_one.wait()
    await prefill.stop()
    decode.fault = "400"
    decode.may_go_on.set()
    assert (await asking).status_code == 400
    await releases_end(router)


async def test_without_a_decode_engine_nothing_is_computed(routed):
    prefill = FakeEngine()
    http, _ = await routed(prefill=[prefill])
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1000000"
    assert "there is none that generates" in answer.json()["error"]["message"]
    assert not prefill.seen


@pytest.mark.parametrize(("fault", "keeps_kv"), [("gone", True), ("dies", False), ("503", True)])
async def test_the_kv_goes_on_to_another_decode_engine_unless_the_first_may_have_taken_it(
    routed, fault, keeps_kv
):
    prefill, first, second = FakeEngine(), FakeEngine(fault), FakeEngine()
    http, _ = await routed(prefill=[prefill], decode=[first, second])
    if fault == "gone":
        await first.stop()
    assert (await http.post("/v1/completions", json=BODY)).content == ANSWER
    assert ("kv_transfer_params" in second.seen[0].body) == keeps_kv
