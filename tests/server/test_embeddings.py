"""POST /v1/embeddings over a small random encoder, with the real openai client and by hand."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import preloaded
from encoders import hidden_states, make_encoder, save_encoder
from quire import AsyncLLM, EngineConfig, SchedulerConfig
from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.batches.requests import answer_line

MODEL = make_encoder("bert")
TEXTS = ["Hello, world", "a", "worlding. hello"]
IDS = [[2, 57, 61, 58, 3], [2, 5, 3], [2, 58, 59, 60, 57, 3]]
MAX_BODY = 700_000


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    yield from started(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def matryoshka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    yield from started(tmp_path_factory.mktemp("cut"), matryoshka_dimensions=[32, 16])


def started(path: Path, **config: Any) -> Iterator[AsyncLLM]:
    pooling = {"pooling_mode_mean_tokens": True}
    model = make_encoder("bert", **config)
    save_encoder(model, path, {"Pooling": pooling, "Normalize": {}})
    with preloaded.engines():
        llm = AsyncLLM(
            EngineConfig(model=str(path), num_threads=1, scheduler=SchedulerConfig(max_num_seqs=3))
        )
    asyncio.run(llm.wait_until_ready())
    yield llm
    asyncio.run(llm.shutdown())


def http_of(llm: AsyncLLM, **config: Any) -> httpx.AsyncClient:
    served = ServerConfig(served_model_name=["embedder"], max_body_bytes=MAX_BODY, **config)
    transport = httpx.ASGITransport(app=create_app(llm, served))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)


def client_of(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture
async def http(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(llm) as http:
        yield http


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return client_of(http)


def expected(ids: list[int], size: int = 64) -> np.ndarray:
    row = hidden_states(MODEL, ids).double().mean(0).numpy()[:size]
    return row / np.linalg.norm(row)


async def error_of(http: httpx.AsyncClient, status: int = 400, **body: Any) -> dict[str, Any]:
    answer = await http.post("/v1/embeddings", json={"model": "embedder", **body})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_the_client_gets_what_transformers_computes(client: openai.AsyncOpenAI) -> None:
    for encoding in (openai.NOT_GIVEN, "float", "base64"):  # the client asks for base64 by itself
        answer = await client.embeddings.create(model="embedder", input=TEXTS, encoding_format=encoding)
        assert answer.object == "list"
        assert answer.model == "embedder"
        assert [one.index for one in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, IDS))
        for ids, one in zip(IDS, answer.data, strict=True):
            row = one.embedding
            if encoding == "base64":
                row = np.frombuffer(base64.b64decode(row), "<f4")
            np.testing.assert_allclose(row, expected(ids), atol=1e-5, rtol=0)


async def test_every_form_of_input(client: openai.AsyncOpenAI) -> None:
    rows = {}
    for name, given in (
        ("text", TEXTS[0]),
        ("texts", TEXTS[:1]),
        ("tokens", IDS[0]),
        ("token lists", IDS[:1]),
    ):
        [one] = (await client.embeddings.create(model="embedder", input=given)).data
        rows[name] = tuple(one.embedding)
    assert len(set(rows.values())) == 1


async def test_many_texts_come_in_order(client: openai.AsyncOpenAI) -> None:
    inputs = [[5 + index % 300] * (1 + index % 7) for index in range(200)]
    answer = await client.embeddings.create(model="embedder", input=inputs)
    for index in (0, 1, 77, 199):
        np.testing.assert_allclose(answer.data[index].embedding, expected(inputs[index]), atol=1e-5)


async def test_texts_are_cut_where_that_is_asked_for(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    long = "hello " * 600
    assert "602 tokens; the limit is 512" in (await error_of(http, input=long))["message"]
    for num_tokens, length in ((-1, 512), (7, 7)):
        for side, ids in (
            (None, [2, *[57] * (length - 2), 3]),
            ("left", [2, *[57] * (length - 2), 3]),
        ):
            body = {"truncate_prompt_tokens": num_tokens} | (
                {} if side is None else {"truncation_side": side}
            )
            answer = await client.embeddings.create(model="embedder", input=long, extra_body=body)
            assert answer.usage.prompt_tokens == length
            np.testing.assert_allclose(answer.data[0].embedding, expected(ids), atol=1e-5)


async def test_special_tokens_may_be_left_out(client: openai.AsyncOpenAI) -> None:
    body = {"add_special_tokens": False}
    answer = await client.embeddings.create(model="embedder", input=TEXTS[0], extra_body=body)
    np.testing.assert_allclose(answer.data[0].embedding, expected(IDS[0][1:-1]), atol=1e-5)


async def test_rows_are_cut_if_the_model_was_trained_for_it(
    http: httpx.AsyncClient, matryoshka: AsyncLLM
) -> None:
    async with http_of(matryoshka) as other:
        client = client_of(other)
        for size in (16, 32, 64):
            answer = await client.embeddings.create(model="embedder", input=IDS[0], dimensions=size)
            np.testing.assert_allclose(answer.data[0].embedding, expected(IDS[0], size), atol=1e-5)
        error = await error_of(other, input="a", dimensions=17)
        assert error["message"] == "dimensions is 17; it must be one of 16, 32"
    error = await error_of(http, input="a", dimensions=16)
    assert "64 numbers and were not trained to be cut" in error["message"]
    assert error["param"] == "dimensions"
    assert "dimensions" in (await error_of(http, input="a", dimensions=0))["message"]


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        ("", "input: the prompt is empty; it must have at least one token", "input"),
        (["a", ""], "input[1]: the prompt is empty", "input[1]"),
        ([], "input", "input"),
        ([[]], "input", "input"),
        ([[5], [384]], "input[1]: prompt contains token id 384; the vocabulary has ids 0 to 383", "input[1]"),
        ([-1], "input", "input"),
        (["a", 3], "input", "input"),
        (3, "it must be text, token ids, or a list of either", "input"),
        (["a"] * 10_000, "2048", "input"),
        (" " * 600_000, "600000 characters, which are more than 512 tokens", "input"),
        ("x" * 800_000, "700000", None),
        ("\ud800", "surrogate", "input"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else None,
)
async def test_bad_inputs_get_a_clear_error(
    http: httpx.AsyncClient, given: Any, message: str, param: str | None
) -> None:
    if given == "\ud800":
        body = b'{"model": "embedder", "input": "\\ud800"}'
        answer = await http.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        return
    error = await error_of(http, 413 if param is None else 400, input=given)
    assert message in error["message"]
    assert (error["param"] or "").startswith(param or "")


async def test_what_embeddings_do_not_have_is_refused_by_name(http: httpx.AsyncClient) -> None:
    assert "stream" in (await error_of(http, input="a", stream=True))["message"]
    assert "encoding_format" in (await error_of(http, input="a", encoding_format="int8"))["message"]
    assert (await error_of(http, 404, input="a", model="other"))["code"] == "model_not_found"


async def test_the_model_says_that_it_embeds(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models")).json()["data"][0]["task"] == "embed"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/inference/v1/generate", {"token_ids": [5]}),
    ],
)
async def test_an_encoder_does_not_generate(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    answer = await http.post(path, json={"model": "embedder", **body})
    assert answer.status_code == 400
    assert "makes embeddings or scores and cannot generate; use /v1/embeddings" in answer.text


async def test_calls_are_counted(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    await client.embeddings.create(model="embedder", input=IDS)
    metrics = (await http.get("/metrics")).text
    figures = dict(
        line.rpartition(" ")[::2] for line in metrics.splitlines() if "prompt_tokens_total{" in line
    )
    assert [float(figure) for figure in figures.values()] == [sum(map(len, IDS))]


async def test_a_generating_model_makes_no_embeddings(http: httpx.AsyncClient) -> None:
    from fake_llm import FakeLLM

    transport = httpx.ASGITransport(app=create_app(FakeLLM(), ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as other:
        answer = await other.post("/v1/embeddings", json={"model": "fake", "input": "a"})
    assert answer.status_code == 400
    assert "the model fake generates and makes no embeddings or scores" in answer.json()["error"]["message"]


async def test_a_line_of_a_batch_has_embeddings(llm: AsyncLLM) -> None:
    app = create_app(llm, ServerConfig(served_model_name=["embedder"]))
    body = json.dumps({"model": "embedder", "input": IDS[:2]}).encode()
    tenant = app.state.context.tenants.default
    answer = await answer_line(app, tenant, "/v1/embeddings", "batch-1", body)
    first, second = (one["embedding"] for one in json.loads(bytes(answer.body))["data"])
    np.testing.assert_allclose(first, expected(IDS[0]), atol=1e-5)
    np.testing.assert_allclose(second, expected(IDS[1]), atol=1e-5)
