"""Engines of several models behind one router."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_upstream import FakeEngine, Seen, check_health

from quire.cluster.engines.registry import Engine, Role

ONE_PROMPT = {"prompt": "Hi" * 20}


def serving(*models: str, fault: str = "") -> FakeEngine:
    engine = FakeEngine(fault)
    engine.models = list(models)
    return engine


def paths(engine: FakeEngine) -> list[str]:
    return [seen.path for seen in engine.seen]


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/completions/render"],
)
async def test_a_request_goes_to_an_engine_with_its_model(routed, path):
    engines = [serving("a", "other name of a"), serving("b"), serving("c:latest")]
    http, _ = await routed(engine=engines)
    for model in ("b", "a", "other name of a", "c", "c:latest", "b", "a:latest"):
        assert (await http.post(path, json={"model": model, **ONE_PROMPT})).status_code == 200
    asked = [[seen.body["model"] for seen in engine.seen] for engine in engines]
    assert asked == [["a", "other name of a", "a:latest"], ["b", "b"], ["c", "c:latest"]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/messages"])
async def test_an_unknown_model_is_refused_with_the_names_of_all(routed, path):
    engines = [serving("a", fault="404"), serving("b", fault="404")]
    http, _ = await routed(engine=engines)
    answer = await http.post(path, json={"model": "x" * 999, **ONE_PROMPT})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.endswith("is not served here; the engines have 'a', 'b'")
    assert len(message) < 200
    assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)


async def test_a_model_that_is_served_has_its_engines_own_404(routed):
    http, _ = await routed(engine=[serving("a", fault="404"), serving("b")])
    answer = await http.post("/v1/completions", json={"model": "a", "prompt": "Hi"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("refused by")


async def test_the_models_of_all_engines_are_listed(routed):
    engines = [serving("a", "a2"), serving("b"), serving("b"), serving("c")]
    http, router = await routed(engine=engines)
    engines[3].health = 500
    await check_health(router, router.engines.by_url[engines[3].url])
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["a", "a2", "b", "c"]
    assert [one["models"] for one in (await http.get("/route/engines")).json()["data"]] == [
        ["a", "a2"],
        ["b"],
        ["b"],
        ["c"],
    ]
    for engine in engines:
        engine.seen.clear()
    assert (await http.get("/v1/models/a2")).status_code == 200
    assert [paths(engine) for engine in engines] == [["/v1/models/a2"], [], [], []]


async def test_a_head_has_no_body(routed):
    http, _ = await routed(engine=[serving("a", fault="no params"), serving("b", fault="no params")])
    for engine_path in ("/v1/models", "/v1/models/x"):
        assert (await http.head(engine_path)).content == b""
    assert (await http.get("/v1/models")).json()["data"]


async def test_engines_decide_who_may_see_the_models(routed):
    http, _ = await routed(
        engine=[serving("a", fault="401"), serving("b", fault="401")], pass_client_keys=True
    )
    for answer in (await http.get("/v1/models"), await http.post("/v1/completions", json={"model": "x"})):
        assert answer.status_code == 401
        assert "'a'" not in answer.text


async def test_an_engine_of_another_model_is_no_replacement(routed):
    down, dying, other = serving("a"), serving("a", fault="dies"), serving("b")
    http, router = await routed(engine=[down, dying, other])
    down.health = 500
    await check_health(router, router.engines.by_url[down.url])
    body = {"model": "a", "prompt": "Hi"}
    assert (await http.post("/v1/completions", json=body)).status_code == 502
    dying.health = 500
    await check_health(router, router.engines.by_url[dying.url])
    for path in ("/v1/completions", "/v1/embeddings"):
        answer = await http.post(path, json=body)
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert down.url in message
        assert other.url not in message
    assert other.seen == []
    assert (await http.get("/health")).status_code == 200  # the other model is served


async def test_a_model_is_prefilled_on_its_own_engines_only(routed):
    prefill, decode, both = serving("a"), serving("a"), serving("b")
    http, router = await routed(prefill=[prefill], decode=[decode], engine=[both], kv_transfer="sequential")
    for model in ("a", "b"):
        assert (await http.post("/v1/completions", json={"model": model, **ONE_PROMPT})).status_code == 200
    assert [len(one.seen) for one in (prefill, decode, both)] == [1, 1, 1]
    assert "kv_transfer_params" in decode.seen[0].body
    assert "kv_transfer_params" not in both.seen[0].body
    assert b"quire_route_prefill_fallbacks_total 0.0" in router.metrics.exposition()


async def test_a_stored_response_is_looked_for_at_engines_with_the_model(routed):
    engines = [serving("a", fault="404"), serving("b", fault="404"), serving("b")]
    http, _ = await routed(engine=engines)
    body = {"model": "b", "input": "Hi", "previous_response_id": "resp_1"}
    assert (await http.post("/v1/responses", json=body)).status_code == 200
    assert engines[0].seen == []
    for engine in engines:
        engine.fault = "404"
        engine.seen.clear()
    answer = await http.get("/v1/responses/resp_1")
    assert answer.json()["error"]["message"].startswith("refused by")
    assert [len(engine.seen) for engine in engines] == [1, 1, 1]


async def test_an_engine_that_does_not_say_its_models_gets_any(routed):
    http, _ = await routed(engine=[serving(), serving("b")])
    for _ in range(2):
        assert (await http.post("/v1/completions", json={"model": "a", "prompt": "Hi"})).status_code == 200


async def test_an_engine_that_is_started_again_may_have_another_model(routed):
    engine = serving("a")
    http, router = await routed(engine=[engine, serving("c", fault="404")])
    known = router.engines.by_url[engine.url]
    known.mark_down("gone")
    engine.models = ["b"]
    await check_health(router, known)
    assert (await http.post("/v1/completions", json={"model": "b", "prompt": "Hi"})).status_code == 200
    assert engine.seen[0].body["model"] == "b"
    engine.fault = "404"
    refused = await http.post("/v1/completions", json={"model": "a", "prompt": "Hi"})
    assert refused.json()["error"]["message"].endswith("the engines have 'b', 'c'")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": 5}', b'{"model": null}', b"[]", b"", b'{"model": "\xff"}', b'{"model": ["a"]}', b"{",
        b'{"prompt": "Hi"}', b'{"model": "' + b"x" * 100_000 + b'"}', b'{"a":' + b"[" * 100_000,
    ],
)  # fmt: skip
async def test_a_body_without_a_model_is_refused_by_any_engine(routed, body):
    engines = [serving("a", fault="400"), serving("b", fault="400")]
    http, _ = await routed(engine=engines)
    answer = await http.post("/v1/embeddings", content=body)
    assert answer.status_code == 400
    [seen] = [seen for engine in engines for seen in engine.seen]
    assert isinstance(seen, Seen)
    assert seen.content == body


async def test_a_declared_model_without_engines_is_not_unknown(routed):
    http, router = await routed(engine=[serving("a")])
    router.engines.models = ("b",)
    answer = await http.post("/v1/completions", json={"model": "b", "prompt": "Hi"})
    assert answer.status_code == 503
    assert json.loads(answer.content)["error"]["code"] == "no_engine"


async def test_a_request_for_a_declared_model_waits_for_its_first_engine(routed):
    http, router = await routed(engine=[serving("a")], recovery_timeout=60)
    router.engines.models = ("b",)
    asking = asyncio.create_task(http.post("/v1/completions", json={"model": "b", "prompt": "Hi"}))
    while not router.num_serving:
        await asyncio.sleep(0.01)
    engine = serving("b")
    await engine.start()
    await router.add(Engine(engine.url, Role.BOTH))
    assert (await asking).status_code == 200
    await engine.stop()
