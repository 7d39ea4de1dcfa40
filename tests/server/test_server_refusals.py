"""Every request that cannot be served gets its status, OpenAI's error shape, and a message to act on."""

import asyncio
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import MAX_BODY_BYTES
from starlette.requests import Request

from quire.config import ServerConfig
from quire.errors import InvalidRequestError
from quire.server.app import create_app
from quire.server.openai.bodies import CompletionRequest
from quire.server.wire import validation
from quire.server.wire.leniency import Leniency
from quire.server.wire.validation import MAX_OBJECTS, MAX_VALUES, count_outside_strings

USER = {"role": "user", "content": "Hi"}


def refusal(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error


async def complete(http, **fields):
    return await http.post("/v1/completions", json={"model": "fake", "prompt": "Hi", **fields})


async def chat(http, **fields):
    return await http.post("/v1/chat/completions", json={"model": "fake", "messages": [USER], **fields})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "0.5"}, "temperature", ['"0.5"', "number"]),
        ({"temperature": -1}, "temperature", ["-1", "from 0"]),
        ({"temperature": True}, "temperature", ["true"]),
        ({"n": True}, "n", ["true", "integer"]),
        ({"n": 0}, "n", ["0", "from 1 to 128"]),
        ({"n": 1.0}, "n", ["integer"]),
        ({"n": 2**40}, "n", [str(2**40)]),
        ({"seed": 2**63}, "seed", [str(2**63)]),
        ({"top_p": 0}, "top_p", ["above 0"]),
        ({"max_tokens": 0}, "max_tokens", ["at least 1", "echo"]),
        ({"min_tokens": 20}, "min_tokens", ["20", "16"]),
        ({"logprobs": 21}, "logprobs", ["21", "20"]),
        ({"n": 3, "best_of": 2}, "best_of", ["2", "at least n", "3"]),
        ({"best_of": 2, "temperature": 0}, "best_of", ["2", "temperature 0"]),
        ({"use_beam_search": True}, "use_beam_search", ["1 beams", "2 to 10"]),
        ({"use_beam_search": True, "best_of": 11}, "use_beam_search", ["11 beams", "2 to 10"]),
        ({"use_beam_search": False, "beam_width": 4}, "use_beam_search", ["false", "4"]),
        ({"use_beam_search": True, "n": 2, "top_k": 5}, "top_k", ["5", "beam search"]),
        ({"length_penalty": 0.5}, "length_penalty", ["0.5", "beam_width"]),
        ({"stop": 5}, "stop", ["5", "string"]),
        ({"stop": ""}, "stop", ['""', "at least 1 character"]),
        ({"stop": "x" * 1025}, "stop", ["at most 1024 characters"]),
        ({"stop": [str(i) for i in range(17)]}, "stop", ["17", "at most 16"]),
        ({"stop": ["a"] * 17}, "stop", ["at most 16"]),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", ['"x"']),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", ["101", "100"]),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", ["1024"]),
        ({"kv_transfer_params": [1]}, "kv_transfer_params", ["[1]", "it must map at most 16 names"]),
        ({"kv_transfer_params": {"a": 1.5}}, "kv_transfer_params", ['{"a": 1.5}', "whole numbers"]),
        ({"kv_transfer_params": {"a": "x" * 257}}, "kv_transfer_params", ["256"]),
        (
            {"kv_transfer_params": {str(i): i for i in range(17)}},
            "kv_transfer_params",
            ["an object of 17 items", "at most 16"],
        ),
        (
            {"kv_transfer_params": {"a": 1}, "prompt": ["b", "c"]},
            "kv_transfer_params",
            ["2 prompts", "a request for each"],
        ),
        ({"suffix": "end"}, "suffix", ["not supported"]),
        ({"temprature": 1}, "temprature", ["unknown", "'temperature'"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream to be true"]),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", ["'include_usage'"]),
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": []}, "prompt", ["at least 1"]),
        ({"prompt": [[]]}, "prompt[0]", ["at least 1"]),
        ({"prompt": None}, "prompt", ["null"]),
        ({"prompt": {"a": 1}}, "prompt", ["text"]),
        ({"prompt": ["a", 1]}, "prompt[1]", ["1", "string"]),
        ({"prompt": [1, "a"]}, "prompt[1]", ['"a"', "integer"]),
        ({"prompt": [True]}, "prompt[0]", ["true"]),
        ({"prompt": [-1]}, "prompt[0]", ["-1"]),
        ({"prompt": ["a"] * 1025}, "prompt", ["1024"]),
        ({"prompt": "x" * 300}, "prompt", ["301", "256"]),
        ({"prompt": ["ok", "x" * 300]}, "prompt[1]", ["prompt[1]: ", "301", "256"]),
        ({"prompt": ["ok"] * 33, "n": 128}, "n", ["4224", "4096", "max_num_queued_reqs"]),
        ({"model": 5}, "model", ["5"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_completion_fields(strict_http, fields, param, words, stream, llm):
    extra = {} if "stream_options" in fields else {"stream": stream}
    error = refusal(await complete(strict_http, **extra, **fields), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    for word in words:
        assert word in error["message"]
    assert not llm.live


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"best_of": 2}, "best_of 2 above n 1"),
        ({"beam_width": 2}, "beam search"),
        ({"use_beam_search": True, "n": 2}, "beam search"),
    ],
)
async def test_what_is_ranked_at_the_end_is_not_streamed(http, fields, words):
    error = refusal(await complete(http, stream=True, **fields), 400)
    assert error["param"] == "stream"
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"use_beam_search": True, "n": 3}, {"beam_width": 3, "n": 3}),
        ({"use_beam_search": True, "n": 2, "best_of": 5}, {"beam_width": 5, "n": 2, "best_of": None}),
        ({"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5}, {"beam_width": 4, "n": 1}),
        ({"n": 2, "best_of": 5}, {"n": 2, "best_of": 5, "beam_width": 0}),
    ],
)
async def test_beam_search_and_best_of_reach_the_engine(http, llm, fields, expected):
    response = await complete(http, **fields)
    assert response.status_code == 200, response.text
    [seen] = llm.seen
    assert {name: getattr(seen.params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", ["at least 1"]),
        ({"messages": "Hi"}, "messages", ['"Hi"']),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ["null", "assistant"]),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", ["missing"]),
        ({"messages": [{"role": "us er", "content": "Hi"}]}, "messages[0].role", ['"us er"']),
        ({"messages": [{**USER, "content": None}]}, "messages[0].content", ["null"]),
        ({"messages": [{**USER, "name": ""}]}, "messages[0].name", ['""']),
        ({"messages": [{**USER, "text": "Bo"}]}, "messages[0].text", ["unknown", "content"]),
        (
            {"messages": [{**USER, "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            ["image_url", "'text'"],
        ),
        ({"messages": [{"role": "system", "content": "Hi"}]}, "messages", ["template"]),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", ["messages: ", "301", "256"]),
        ({"tools": [{"type": "function"}]}, "tools[0].function", ["missing"]),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", ["chat template"]),
        ({"functions": []}, "functions", ["not supported"]),
        ({"audio": {}}, "audio", ["not supported"]),
        ({"metadata": {}}, "metadata", ["not supported"]),
        ({"store": True}, "store", ["True", "False"]),
        ({"response_format": {"type": "grammar"}}, "response_format.type", ["grammar", "'text'"]),
        ({"reasoning_effort": "low"}, "reasoning_effort", ["not supported"]),
        ({"top_logprobs": 2}, "top_logprobs", ["logprobs to be true"]),
        ({"logprobs": 2}, "logprobs", ["2", "boolean"]),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "20"]),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", ["3", "4"]),
        ({"max_tokens": 0}, "max_tokens", ["0"]),
        ({"prompt": "x"}, "prompt", ["unknown"]),
    ],
)
async def test_chat_fields(strict_http, fields, param, words):
    error = refusal(await chat(strict_http, **fields), 400)
    assert error["param"] == param
    for word in words:
        assert word.lower() in error["message"].lower()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8: invalid start byte, 0xff at byte 0"),
        (b'{"model": "fake", "prompt": "\xff"}', "not UTF-8: invalid start byte, 0xff at byte 29"),
        (b'{"model": "fake", "prompt": "\\ud800"}', "not valid JSON"),
        (b'{"model": "fake", "prompt": "a", "temperature": NaN}', "NaN and Infinity are not JSON"),
        (b'{"model": "fake", "prompt": "a", "x": [-Infinity]}', "NaN and Infinity are not JSON"),
        (b"[" * 100_000, "recursion"),
        (b"[]", "object"),
        (b"null", "object"),
    ],
)
async def test_bodies_that_are_not_json_objects(http, body, words):
    headers = {"Content-Type": "application/json"}
    error = refusal(await http.post("/v1/completions", content=body, headers=headers), 400)
    assert words in error["message"]


LARGE = {"x": [1e999]}
OPENAI_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": LARGE}}}
TOOL_USE = {"type": "tool_use", "id": "a", "name": "f", "input": LARGE}
OLLAMA_CALL = {"function": {"name": "f", "arguments": LARGE}}


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("/v1/chat/completions", "chat_template_kwargs", {"chat_template_kwargs": LARGE}),
        ("/v1/chat/completions", "documents", {"documents": [LARGE]}),
        ("/v1/chat/completions", "tool 'f'", {"tools": [OPENAI_TOOL]}),
        ("/v1/messages", "tool 'f'", {"tools": [{"name": "f", "input_schema": LARGE}]}),
        ("/v1/messages", "input", {"messages": [USER, {"role": "assistant", "content": [TOOL_USE]}]}),
        ("/api/chat", "arguments", {"messages": [USER, {"role": "assistant", "tool_calls": [OLLAMA_CALL]}]}),
    ],
)
async def test_numbers_that_are_too_large(http, path, field, fields):
    body = json.dumps({"model": "fake", "messages": [USER], "max_tokens": 1, **fields})
    headers = {"Content-Type": "application/json"}
    answer = await http.post(path, content=body.replace("Infinity", "1e999"), headers=headers)
    assert answer.status_code == 400, answer.text
    assert field in answer.text
    assert "1.8e308" in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json; profile=x; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "br"},
    ],
)
async def test_content_types(http, headers):
    refusal(await http.post("/v1/completions", content=b"{}", headers=headers), 415)


@pytest.mark.parametrize(
    "parameters",
    [
        "charset=UTF-8",
        'charset="utf-8"',
        "profile=x",
        "charset=utf-8; foo=bar",
        'a=";charset=latin-1"; b',
        "",
    ],
)
async def test_content_type_with_parameters_is_fine(http, parameters):
    body = json.dumps({"model": "fake", "prompt": "Hi"})
    headers = {"Content-Type": f"Application/JSON; {parameters}"}
    assert (await http.post("/v1/completions", content=body, headers=headers)).status_code == 200


async def test_unknown_model_names_the_served_one(http):
    for response in (await complete(http, model="gpt"), await http.get("/v1/models/org/gpt")):
        error = refusal(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'gpt'" in error["message"] or "'org/gpt'" in error["message"]
        assert "'fake'" in error["message"]


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "fields",
    [{"model": LONG}, {LONG: 1}, {"logit_bias": {LONG: 1}}, {"stream_options": {LONG: True}}],
)
async def test_what_a_refusal_names_is_shortened(strict_http, fields):
    response = await strict_http.post("/v1/completions", json={"model": "fake", "prompt": "Hi", **fields})
    assert response.status_code in (400, 404)
    assert LONG[:70] in response.text
    assert LONG[:90] not in response.text


async def test_unknown_path_names_the_nearest(http):
    error = refusal(await http.post("/v1/completion", json={}), 404)
    assert "'/v1/completions'" in error["message"]


async def test_wrong_method(http):
    response = await http.get("/v1/completions")
    error = refusal(response, 405)
    assert "POST" in error["message"]
    assert response.headers["allow"] == "POST"


async def test_duplicate_request_id(http, llm):
    llm.live.add("cmpl-mine/0")
    response = await http.post(
        "/v1/completions", json={"model": "fake", "prompt": "Hi"}, headers={"X-Request-Id": "mine"}
    )
    error = refusal(response, 400)
    assert error["code"] == "duplicate_request_id"
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("request_id", ["x" * 129, "a b", "\xe9", ""])
async def test_request_ids_that_cannot_be_echoed(http, request_id):
    headers = {"X-Request-Id": request_id.encode("latin-1")}
    response = await http.get("/version", headers=headers)
    assert "X-Request-Id" in refusal(response, 400)["message"]


async def test_request_id_is_echoed_and_used(http, llm):
    response = await http.post(
        "/v1/chat/completions", json={"model": "fake", "messages": [USER]}, headers={"X-Request-Id": "abc-1"}
    )
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "chatcmpl-abc-1" == llm.seen[0].request_id


async def test_full_queue(http):
    response = await complete(http, prompt="queue")
    error = refusal(response, 429)
    assert response.headers["retry-after"] == "3"
    assert "max_num_queued_reqs" in error["message"]


async def test_one_refused_prompt_ends_the_others(http, llm):
    refusal(await complete(http, prompt=["hold", "queue"]), 429)
    assert not llm.live


async def test_body_over_the_limit_declared(http):
    error = refusal(await complete(http, prompt="x" * MAX_BODY_BYTES), 413)
    assert str(MAX_BODY_BYTES) in error["message"]
    assert "max_body_bytes" in error["message"]


async def test_body_over_the_limit_undeclared_is_not_read_to_its_end(http):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 65536
            yield b" " * 65536

    response = await http.post(
        "/v1/completions", content=endless(), headers={"Content-Type": "application/json"}
    )
    refusal(response, 413)
    assert sent < MAX_BODY_BYTES + 3 * 65536


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [1] * (MAX_VALUES + 300)}, ["65836 values", "at most 65792"]),
        ({"prompt": [[1]] * 70_000}, ["70000 values", "at most 65792"]),
        ({"prompt": "a", "stop": [{}] * (MAX_OBJECTS + 1)}, ["4098 objects", "at most 4096"]),
    ],
)
async def test_bodies_that_take_long_to_parse(http, body, words):
    error = refusal(await complete(http, **body), 413)
    assert error["code"] == "body_too_large"
    for word in words:
        assert word in error["message"]


async def test_values_are_not_counted_within_strings(http):
    error = refusal(await complete(http, prompt='{"a", "b\\"}' * 40_000), 400)
    assert "tokens" in error["message"]


@given(
    st.recursive(
        st.none() | st.integers() | st.text('a{,"\\\n'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('a{,"\\'), inner),
    ),
    st.integers(1, 9),
)
def test_what_is_outside_strings_equals_a_scan(value, piece_bytes):
    body = json.dumps(value).encode()
    naive = {b"{": 0, b",": 0}
    in_string = escaped = False
    for character in body:
        if not in_string and (mark := bytes([character])) in naive:
            naive[mark] += 1
        in_string ^= character == ord('"') and not escaped
        escaped = character == ord("\\") and not escaped
    assert count_outside_strings(body, b"{,", piece_bytes=piece_bytes) == naive
    assert count_outside_strings(body, b"{,") == naive


async def test_the_event_loop_turns_while_a_large_body_is_looked_at():
    num_turns = 0

    async def count_turns():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def receive():
        return {"type": "http.request", "body": b" " * MAX_BODY_BYTES}

    request = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
    limits = {"max_body_bytes": MAX_BODY_BYTES, "max_prompt_tokens": 0}
    counting = asyncio.create_task(count_turns())
    with pytest.raises(InvalidRequestError):
        await validation.read_body(request, CompletionRequest, **limits, leniency=Leniency(is_strict=False))
    counting.cancel()
    assert num_turns >= MAX_BODY_BYTES // validation.COUNTED_PER_TURN - 1


def test_ten_megabytes_over_a_socket(live):
    for headers in ({}, {"Connection": "close"}):
        response = httpx.post(
            f"{live}/v1/completions", json={"model": "fake", "prompt": "x" * 10_000_000}, headers=headers
        )
        refusal(response, 413)


@pytest.fixture
async def locked(llm):
    app = create_app(llm, ServerConfig(api_key="söcret"))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost"
    ) as client:
        yield client


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic söcret", "söcret", "Bearer "])
async def test_api_key_missing_or_wrong(locked, header):
    headers = {} if header is None else {"Authorization": header.encode()}
    for path in ("/v1/models", "/version", "/openapi.json", "/nowhere"):
        response = await locked.get(path, headers=headers)
        assert refusal(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_any_of_several_api_keys(llm):
    app = create_app(llm, ServerConfig(api_key="first  second"))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for key, status in (("first", 200), ("second", 200), ("first second", 401)):
            assert (await client.get("/v1/models", headers={"x-api-key": key})).status_code == status


async def test_api_key_right_and_open_paths(locked):
    assert (await locked.get("/v1/models", headers={"Authorization": "Bearer söcret".encode()})).is_success
    assert (await locked.get("/v1/models", headers={"x-api-key": "söcret".encode()})).is_success
    for path in ("/health", "/ready", "/ping"):
        assert (await locked.get(path)).is_success
    assert (await locked.get("/metrics")).is_success


@pytest.mark.parametrize("key", ["wrong", "", "Bearer söcret"])
async def test_x_api_key_wrong(locked, key):
    refusal(await locked.get("/v1/models", headers={"x-api-key": key.encode()}), 401)
