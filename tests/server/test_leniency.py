"""Bodies as other servers' clients send them: what has no effect is accepted and named, typos are refused."""

import json
import logging
from urllib.parse import unquote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import MAX_BODY_BYTES

from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.openai.bodies import ChatCompletionRequest, CompletionRequest
from quire.server.wire import leniency
from quire.server.wire.leniency import (
    HEADER,
    MAX_IGNORED_NAMES,
    MAX_LOGGED_NAMES,
    IgnoredNames,
    Leniency,
    is_within_edits,
    typo_hint,
)
from quire.server.wire.paths import canonical_path
from quire.server.wire.strict_model import supported_names

USER = {"role": "user", "content": "Hi"}


async def complete(http, **fields):
    return await http.post("/v1/completions", json={"model": "fake", "prompt": "Hi", **fields})


async def chat(http, **fields):
    return await http.post("/v1/chat/completions", json={"model": "fake", "messages": [USER], **fields})


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"store": True, "service_tier": "flex"}, "store, service_tier"),
        ({"store": False, "service_tier": "auto", "metadata": {}}, None),
        ({"prompt_cache_key": "k", "safety_identifier": "s"}, "prompt_cache_key, safety_identifier"),
        ({"verbosity": "low", "prediction": {"type": "content"}}, "verbosity, prediction"),
        ({"provider": {"only": ["x"]}, "models": ["a"], "top_a": 0.1}, "provider, models, top_a"),
        ({"tools": [], "tool_choice": "none", "functions": None, "function_call": "none"}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 5, "max_completion_tokens": 3}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, None),
        ({"n\u00e4me, x": 1, "a\r\nb": 2}, "n%C3%A4me%2C%20x, a%0D%0Ab"),
        ({"x" * 99: 1}, "x" * 64 + "~"),
        (
            {"messages": [USER, {**USER, "role": "assistant", "provider_specific_fields": {}, "name": "B",
                                 "reasoning_content": "hm", "annotations": [], "audio": None,
                                 "refusal": None, "function_call": None, "tool_calls": []}, USER]},
            "messages[].provider_specific_fields",
        ),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]},
            "messages[].content[].cache_control",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_no_effect_is_named(http, llm, fields, ignored, stream):
    extra = {} if "stream_options" in fields else {"stream": stream}
    response = await chat(http, **extra, **fields)
    assert response.status_code == 200, response.text
    assert response.headers.get(HEADER) == ignored
    assert llm.seen[0].params.max_tokens in (None, 3)


@pytest.mark.parametrize(
    ("reads", "priority", "ignored"), [(True, 3, None), (False, 3, "priority"), (False, 0, None)]
)
async def test_a_priority_that_no_policy_reads(http, llm, reads, priority, ignored):
    llm.info.reads_priority = reads
    response = await complete(http, priority=priority)
    assert response.headers.get(HEADER) == ignored
    assert llm.seen[0].options.get("priority", 0) == (priority if reads else 0)


@pytest.mark.parametrize(
    ("reads", "params", "ignored"),
    [(True, {"a": 1}, None), (False, {"a": 1}, "kv_transfer_params"), (False, {}, None)],
)
async def test_kv_transfer_params_that_no_connector_reads(http, llm, reads, params, ignored):
    llm.info.reads_kv_transfer_params = reads
    response = await complete(http, kv_transfer_params=params)
    assert response.headers.get(HEADER) == ignored
    assert llm.seen[0].options.get("kv_transfer_params", {}) == (params if reads else {})


async def test_a_strict_server_refuses_kv_transfer_params_that_no_connector_reads(strict_http, llm):
    llm.info.reads_kv_transfer_params = False
    response = await complete(strict_http, kv_transfer_params={"a": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params")


async def test_a_strict_server_leaves_an_unread_priority_to_the_engine(strict_http, llm):
    llm.info.reads_priority = False
    await complete(strict_http, priority=3)
    assert llm.seen[0].options["priority"] == 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_p": 0, "temperature": 0.7}, {"temperature": 0.0, "top_p": 1.0}),
        ({"top_p": 0.0}, {"temperature": 0.0}),
        ({"stop": ""}, {"stop": ()}),
        ({"stop": []}, {"stop": ()}),
        ({"stop": [""]}, {"stop": ()}),
        ({"stop": None}, {"stop": ()}),
        ({"max_tokens": 16.0, "n": 2.0, "seed": 7.0}, {"max_tokens": 16, "n": 2, "seed": 7}),
        ({"suffix": ""}, {}),
    ],
)
async def test_values_of_other_servers(http, llm, fields, expected):
    response = await complete(http, **fields)
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers
    assert {name: getattr(llm.seen[0].params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"maxTokens": 1}, "maxTokens", "did you mean 'max_tokens'?"),
        ({"top-p": 1}, "top-p", "did you mean 'top_p'?"),
        ({"tpo_p": 1}, "tpo_p", "did you mean 'top_p'?"),
        ({"strem": True}, "strem", "did you mean 'stream'?"),
        ({"guided_jsn": {}}, "guided_jsn", "did you mean 'guided_json'?"),
        (
            {"stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "did you",
        ),
        ({"messages": [{**USER, "contents": 1}]}, "messages[0].contents", "did you mean 'content'?"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"n": 1.5}, "n", "1.5"),
        ({"seed": 2.0**60}, "seed", "1.15"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"top_p": False}, "top_p", "false"),
        ({"temperature": "0.5"}, "temperature", '"0.5"'),
    ],
)
async def test_what_is_refused_all_the_same(http, fields, param, words):
    response = await chat(http, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_names_without_effect_are_bounded(http):
    response = await complete(http, **{f"other{i:09}": i for i in range(MAX_IGNORED_NAMES)})
    assert response.status_code == 200
    header = response.headers[HEADER]
    assert len(header) < 530
    named, _, more = header.rpartition(", +")
    assert len(named.split(", ")) + int(more) == MAX_IGNORED_NAMES
    response = await complete(http, **{f"other{i}": i for i in range(MAX_IGNORED_NAMES + 1)})
    assert response.status_code == 400
    assert "at most 64 ignored names" in response.json()["error"]["message"]


async def test_the_log_has_each_name_once_and_no_values(http, caplog):
    with caplog.at_level(logging.WARNING, "quire.server.wire.leniency"):
        for _ in range(2):
            await complete(http, other="secret")
    [record] = caplog.records
    assert "other" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_the_log_is_bounded(caplog):
    names = IgnoredNames()
    for i in range(MAX_LOGGED_NAMES + 50):
        names.note([f"name{i}"])
    assert len(caplog.records) == MAX_LOGGED_NAMES


async def test_continuous_usage(http):
    for options, final in (({"continuous_usage_stats": True}, 1), ({"include_usage": True}, 1), ({}, 0)):
        response = await chat(http, stream=True, stream_options=options, max_tokens=4)
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        used = [event.get("usage") for event in events]
        counts = [usage["completion_tokens"] for usage in used if usage]
        if "continuous_usage_stats" in options:
            assert len(counts) == len(events)
            assert counts == sorted(counts)
            assert counts[0] < counts[-1] == 4
        else:
            assert len(counts) == final
        assert [bool(event["choices"]) for event in events].count(False) == final


async def test_a_second_turn_of_the_openai_client(client):
    answer = await client.chat.completions.create(
        model="fake", messages=[USER], extra_body={"top_k": -1}, metadata={"a": "b"}, store=True, user="u"
    )
    raw = await client.chat.completions.with_raw_response.create(
        model="fake", messages=[USER, answer.choices[0].message, USER]
    )
    assert raw.parse().choices[0].message.content


async def test_too_long_a_prompt_has_a_code(http):
    for answer in (await complete(http, prompt="x" * 300), await complete(http, prompt=["a", "x" * 300])):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_max_tokens_beyond_the_model(http, strict_http, llm):
    assert (await chat(http, max_tokens=10**30)).status_code == 200
    assert (await chat(strict_http, max_tokens=1000)).status_code == 200  # this engine refuses nothing
    lenient, strict = llm.seen
    assert (lenient.params.max_tokens, lenient.options["shorten_output"]) == (256, True)
    assert (strict.params.max_tokens, "shorten_output" in strict.options) == (1000, False)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions/", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/models/org/name/", "/v1/models/org/name"),
        ("/v1/models/", "/v1/models"),
        ("/health/", "/health"),
        ("/", "/"),
        ("/completionsx", "/completionsx"),
        ("/v1/chat/completions//", "/v1/chat/completions/"),
    ],
)
def test_spellings_of_paths(path, meant):
    assert canonical_path(path) == meant


async def test_paths_without_version_and_with_a_slash(http):
    for path in ("/completions", "/v1/completions/", "/completions/"):
        assert (await http.post(path, json={"model": "fake", "prompt": "Hi"})).status_code == 200
    assert (await http.get("/models/fake")).json() == (await http.get("/v1/models/fake/")).json()


async def test_other_spellings_need_the_key(llm):
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig(api_key="secret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for path in ("/models", "/v1/models/", "/models/", "/docs/"):
            assert (await http.get(path)).status_code == 401
        assert (await http.get("/health/")).status_code == 200


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=5), st.text("abc", max_size=5), st.integers(0, 3))
def test_near_texts_are_those_of_the_definition(first, second, most):
    def naive(a, b):
        if not a or not b:
            return len(a) + len(b)
        found = min(naive(a[:-1], b) + 1, naive(a, b[:-1]) + 1, naive(a[:-1], b[:-1]) + (a[-1] != b[-1]))
        if len(a) > 1 and len(b) > 1 and a[-1] == b[-2] and a[-2] == b[-1]:
            found = min(found, naive(a[:-2], b[:-2]) + 1)
        return found

    assert is_within_edits(first, second, most) == (naive(first, second) <= most)


def test_names_that_resemble_none_are_not_compared_letter_by_letter(monkeypatch):
    compared = []
    monkeypatch.setattr(leniency, "is_within_edits", lambda *names: compared.append(names))
    known = supported_names(ChatCompletionRequest)
    assert typo_hint("qzjvkxwqzjvkxwqzjv", known) is None
    assert not compared
    typo_hint("max_completion_tokems", known)
    assert ("maxcompletiontokems", "maxcompletiontokens", 2) in compared


@given(st.lists(st.text(min_size=1), max_size=MAX_IGNORED_NAMES))
def test_the_header_is_ascii_without_separators_in_names(names):
    leniency = Leniency(is_strict=False)
    for name in names:
        leniency.ignore(name)
    header = leniency.header()
    assert header.isascii()
    assert header.isprintable()
    assert len(header) < 530
    if header and "~" not in header and ", +" not in header:
        assert {unquote(name) for name in header.split(", ")} == {
            name.encode("utf-8", "replace").decode() for name in names
        }


SEVERAL_CALLS = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(
    {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields} - {"timeout", "queue_timeout"}
)


@pytest.fixture(scope="module")
def call():
    """Post one body to a fresh application, from a test that is not asynchronous."""
    import asyncio

    from fake_llm import FakeLLM

    async def post(path, body):
        app = create_app(FakeLLM(), ServerConfig(max_body_bytes=MAX_BODY_BYTES))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(
                path, content=json.dumps(body), headers={"Content-Type": "application/json"}
            )

    with asyncio.Runner() as runner:
        yield lambda path, body: runner.run(post(path, body))


@SEVERAL_CALLS
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12), JSON, max_size=4))
def test_no_body_is_a_server_error(call, fields):
    for path, least in (
        ("/v1/completions", {"model": "fake", "prompt": "Hi"}),
        ("/v1/chat/completions", {"model": "fake", "messages": [USER]}),
    ):
        assert call(path, {**least, **fields}).status_code < 500


@SEVERAL_CALLS
@given(st.data())
def test_a_mistyped_name_is_refused(call, data):
    known = supported_names(CompletionRequest)
    name = data.draw(st.sampled_from(sorted(name for name in known if len(name) > 4)))
    place = data.draw(st.integers(0, len(name) - 2))
    typo = data.draw(
        st.sampled_from(
            [
                name[:place] + name[place + 1 :],
                name[:place] + name[place + 1] + name[place] + name[place + 2 :],
                name[:place] + name[place] + name[place:],
            ]
        )
    )
    response = call("/v1/completions", {"model": "fake", "prompt": "Hi", typo: 1})
    if typo not in known:
        assert response.status_code == 400
        assert "did you mean" in response.json()["error"]["message"]
