"""Several models in one server: each request goes to the one that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from fake_llm import FakeLLM
from prometheus_client.parser import text_string_to_metric_families

from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError, EngineDeadError
from quire.pooling_params import PoolingParams
from quire.server.app import create_app
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.serve import serve

USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def second() -> FakeLLM:
    llm = FakeLLM()
    llm.info.max_model_len = 128
    return llm


@pytest.fixture
def third() -> FakeLLM:
    llm = FakeLLM()
    llm.info.pooling = PoolingParams(pooling_type="cls")
    return llm


@pytest.fixture
async def http(llm: FakeLLM, second: FakeLLM, third: FakeLLM) -> AsyncIterator[httpx.AsyncClient]:
    def named(*names: str) -> ServerConfig:
        return ServerConfig(served_model_name=names, engine_control=True)

    others = [
        (second, named("second", "alias"), SamplingDefaults({"temperature": 0.25})),
        (third, named("embedder"), SamplingDefaults({})),
    ]
    app = create_app(llm, named("first"), others=others)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        yield http


async def test_each_request_goes_to_the_model_that_it_names(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, llm: FakeLLM, second: FakeLLM
) -> None:
    for name, engine in (("first", llm), ("second", second), ("alias:latest", second)):
        answer = await client.completions.create(model=name, prompt=f"for {name}")
        assert answer.model == name
        assert engine.seen[-1].prompt == f"for {name}"
        stream = await client.chat.completions.create(model=name, messages=[USER], stream=True)
        assert {chunk.model async for chunk in stream} == {name}
        assert (await client.responses.create(model=name, input="Hi")).model == name
        anthropic = {"model": name, "messages": [USER], "max_tokens": 5}
        assert (await http.post("/v1/messages", json=anthropic)).json()["model"] == name
        ollama = {"model": name, "messages": [USER], "stream": False}
        assert (await http.post("/api/chat", json=ollama)).json()["model"] == name
        assert [seen.prompt for seen in engine.seen[-4:]] == ["Hi"] * 4
    assert len(llm.seen) == 5
    assert len(second.seen) == 10


async def test_defaults_and_limits_are_those_of_the_model(http: httpx.AsyncClient, second: FakeLLM) -> None:
    assert (await http.post("/v1/completions", json={"model": "second", "prompt": "a"})).status_code == 200
    assert second.seen[-1].params.temperature == 0.25
    cards = (await http.get("/v1/models")).json()["data"]
    assert {card["id"]: card["max_model_len"] for card in cards} == {
        "first": 256, "second": 128, "alias": 128, "embedder": 256,
    }  # fmt: skip
    assert (await http.get("/v1/models/alias")).json()["max_model_len"] == 128
    tags = (await http.get("/api/tags")).json()["models"]
    assert [model["name"] for model in tags] == [f"{card['id']}:latest" for card in cards]
    told = (await http.get("/engine")).json()
    assert [card["id"] for card in told["models"]] == [card["id"] for card in cards]
    assert [one["model"] for one in (told, *told["others"])] == ["first", "second", "embedder"]
    assert [[card["id"] for card in one["models"]] for one in told["others"]] == [
        ["second", "alias"], ["embedder"],
    ]  # fmt: skip
    assert [one["max_model_len"] for one in told["others"]] == [128, 256]
    of_second = (await http.get("/engine?model=alias")).json()
    assert {**of_second, "models": of_second["models"][1:3]} == told["others"][0]
    tokens = (await http.post("/tokenize", json={"model": "second", "prompt": "a"})).json()
    assert tokens["max_model_len"] == 128


async def test_unknown_and_missing_names_are_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["message"].endswith("this server has 'first', 'second', 'alias', 'embedder'")
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/inference/v1/generate", {"token_ids": [65]}),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, path
        assert answer.json()["error"]["message"].startswith("model is missing; this server has 'first'")
        assert answer.json()["error"]["param"] == "model"
    for path in ("/health?model=other", "/stats?model=other", "/tokenizer_info?model=other"):
        assert (await http.get(path)).status_code == 404, path


async def test_a_model_does_only_what_it_can(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/embeddings", json={"model": "second", "input": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the model second generates and makes no embeddings")
    answer = await http.post("/v1/completions", json={"model": "embedder", "prompt": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the model embedder makes embeddings")


async def test_a_prefix_cache_in_use_is_named(
    http: httpx.AsyncClient, second: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def in_use() -> bool:
        return False

    monkeypatch.setattr(second, "reset_prefix_cache", in_use)
    for query, status in (("", 409), ("?model=alias", 409), ("?model=first", 200)):
        answer = await http.post(f"/reset_prefix_cache{query}")
        assert answer.status_code == status
        if status == 409:
            error = answer.json()["error"]
            assert error["code"] == "prefix_cache_in_use"
            assert error["message"].startswith("second: the prefix cache is in use")


async def test_one_engine_dies_and_the_others_answer(
    http: httpx.AsyncClient, llm: FakeLLM, second: FakeLLM
) -> None:
    assert (await http.get("/health")).status_code == 200
    second.dead = "the engine process ended with signal 9"
    health = await http.get("/health")
    assert health.status_code == 503
    assert health.json()["reason"] == "second: the engine process ended with signal 9"
    assert (await http.get("/health?model=second")).status_code == 503
    assert (await http.get("/health?model=first")).status_code == 200
    statuses = [
        (await http.post("/v1/completions", json={"model": name, "prompt": "a"})).status_code
        for name in ("first", "second")
    ]
    assert statuses == [200, 503]
    samples = samples_of((await http.get("/metrics")).text)
    assert samples["quire_engine_up", "first"] == 1
    assert samples["quire_engine_up", "second"] == 0
    assert not second.seen


def samples_of(text: str) -> dict[tuple[str, str | None], float]:
    """Return the value of each sample by its name and model, and check that each metric is there once."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, sample.labels.get("model_name")): sample.value
        for family in families
        for sample in family.samples
    }


async def test_figures_have_the_name_of_their_model(http: httpx.AsyncClient) -> None:
    body = {"model": "second", "prompt": "ab", "max_tokens": 2}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    text = (await http.get("/metrics")).text
    samples = samples_of(text)
    for name, number in (("first", 0), ("second", 2), ("embedder", 0)):
        for metric in ("quire_generation_tokens_total", "vllm:generation_tokens_total"):
            assert samples[metric, name] == number
    assert 'quire_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0' in text
    assert (await http.get("/stats?model=second")).json()["tokens"]["generated"] == 2
    assert (await http.get("/stats")).json()["model"] == "first"


async def test_live_requests_of_all_models(http: httpx.AsyncClient, llm: FakeLLM, second: FakeLLM) -> None:
    async def held(name: str) -> httpx.Response:
        body, headers = {"model": name, "prompt": "hold"}, {"X-Request-Id": name}
        return await http.post("/v1/completions", json=body, headers=headers)

    calls = {name: asyncio.create_task(held(name)) for name in ("first", "second")}
    await llm.held.wait()
    await second.held.wait()
    listed = (await http.get("/v1/requests")).json()
    assert [call["id"] for call in listed["data"]] == ["cmpl-first", "cmpl-second"]
    assert listed["has_more"] is False
    assert (await http.get("/v1/requests/cmpl-second")).json()["id"] == "cmpl-second"
    assert (await http.delete("/v1/requests/cmpl-second")).status_code == 200
    assert (await calls["second"]).status_code == 499
    assert (await http.get("/v1/requests/cmpl-second")).status_code == 404
    assert not calls["first"].done()
    await http.delete("/v1/requests/cmpl-first")
    assert (await calls["first"]).status_code == 499


async def test_an_id_is_live_for_one_model_at_a_time(
    http: httpx.AsyncClient, llm: FakeLLM, second: FakeLLM
) -> None:
    async def completed(model: str, prompt: str, **fields: bool) -> httpx.Response:
        body, headers = {"model": model, "prompt": prompt, **fields}, {"X-Request-Id": "same"}
        return await http.post("/v1/completions", json=body, headers=headers)

    first = asyncio.create_task(completed("first", "hold"))
    await llm.held.wait()
    for fields in ({}, {"stream": True}):
        refused = await completed("second", "Hi", **fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "duplicate_request_id"
    assert not second.seen
    assert (await http.get("/v1/requests/cmpl-same")).status_code == 200
    assert (await http.delete("/v1/requests/cmpl-same")).status_code == 200
    assert (await first).status_code == 499
    for model in ("second", "first"):
        assert (await completed(model, "Hi")).status_code == 200


async def test_responses_of_two_models_with_one_request_id(http: httpx.AsyncClient) -> None:
    async def events(model: str) -> str:
        body = {"model": model, "input": "Hi", "background": True, "stream": True}
        return (await http.post("/v1/responses", json=body, headers={"X-Request-Id": "same"})).text

    for text in await asyncio.gather(events("first"), events("second")):
        assert text.count("event: response.completed\n") == 1


async def test_one_model_or_all_are_put_to_sleep(
    http: httpx.AsyncClient, llm: FakeLLM, second: FakeLLM, third: FakeLLM
) -> None:
    assert (await http.post("/sleep?model=alias")).status_code == 200
    assert [engine.asleep for engine in (llm, second, third)] == [None, "abort", None]
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert (await http.get("/is_sleeping?model=second")).json() == {"is_sleeping": True}
    running = (await http.get("/api/ps")).json()["models"]
    assert [model["name"] for model in running] == ["first:latest", "embedder:latest"]
    assert (await http.post("/wake_up?model=second")).status_code == 200
    assert (await http.post("/pause")).status_code == 200
    assert [engine.paused for engine in (llm, second, third)] == ["abort"] * 3
    assert (await http.get("/is_paused")).json()["is_paused"] is True
    assert (await http.post("/resume?model=first")).status_code == 200
    assert (await http.get("/is_paused")).json()["is_paused"] is False
    assert (await http.post("/reset_prefix_cache")).status_code == 200
    assert (await http.post("/sleep?model=other")).status_code == 404


@pytest.mark.parametrize("call", ["sleep?mode=wait", "pause", "resume", "wake_up", "reset_prefix_cache"])
async def test_a_model_that_fails_does_not_stop_the_others(
    call: str,
    http: httpx.AsyncClient,
    llm: FakeLLM,
    second: FakeLLM,
    third: FakeLLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = []
    method = {"pause": "pause_generation", "resume": "resume_generation"}.get(call, call.partition("?")[0])

    async def act(engine: FakeLLM) -> bool:
        if engine is second:
            raise EngineDeadError("the engine has ended")
        await asyncio.sleep(0)
        ended.append(engine)
        return True

    for engine in (llm, second, third):
        monkeypatch.setattr(engine, method, lambda *_, engine=engine, **__: act(engine))
    answer = await http.post(f"/{call}")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "second: the engine has ended"
    assert ended == [llm, third]
    assert (await http.post(f"/{call.partition('?')[0]}?model=first")).status_code == 200


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([("a", {}, {}), ("a", {}, {})], "two models have the same ServerConfig.served_model_name"),
        ([("a", {}, {}), ("b", {}, {"served_model_name": ("c", "a:latest")})], "'a'; give each one"),
        ([("a", {"record_path": "x"}, {}), ("b", {"record_path": "x"}, {})], "EngineConfig.record_path, 'x'"),
        ([("a", {}, {}), ("b", {}, {"strict": True})], "ServerConfig.strict of b is not that of a"),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused(
    models: list[tuple[str, dict[str, str], dict[str, object]]], message: str
) -> None:
    configs = [
        (EngineConfig(model=name, **engine), ServerConfig(**server)) for name, engine, server in models
    ]
    with pytest.raises(ConfigError, match=message):
        serve(*configs[0], configs[1:])
