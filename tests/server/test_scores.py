"""/v1/classify, /v1/score, /v1/rerank and /pooling over small random models, against `transformers`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import preloaded
from encoders import hidden_states, make_encoder, save_encoder, word_pieces
from quire import AsyncLLM, EngineConfig
from quire.config import ServerConfig
from quire.server.app import create_app

RERANKER = make_encoder("bert", kind="ForSequenceClassification", num_labels=1)
CLASSIFIER = make_encoder("distilbert", kind="ForSequenceClassification", num_labels=3)
EMBEDDER = make_encoder("bert")
QUERY = "hello world"
TEXTS = ["world. hello", "ab cd", "hello hello hello worlding", "xyz"]


def started(model: Any, path: Path) -> Iterator[AsyncLLM]:
    save_encoder(model, path)
    with preloaded.engines():
        llm = AsyncLLM(EngineConfig(model=str(path), num_threads=1))
    asyncio.run(llm.wait_until_ready())
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    yield from started(RERANKER, tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    yield from started(CLASSIFIER, tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path = tmp_path_factory.mktemp("embedder")
    path.joinpath("config_sentence_transformers.json").write_text('{"prompts": {"query": "ab "}}')
    yield from started(EMBEDDER, path)


def http_of(llm: AsyncLLM) -> httpx.AsyncClient:
    app = create_app(llm, ServerConfig(served_model_name=["scorer"]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=60)


@pytest.fixture
async def ranking(reranker: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(reranker) as http:
        yield http


@pytest.fixture
async def embedding(embedder: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(embedder) as http:
        yield http


@pytest.fixture
async def classifying(classifier: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(classifier) as http:
        yield http


async def answer_of(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(path, json={"model": "scorer", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def error_of(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(path, json={"model": "scorer", **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def logit(first: str, second: str) -> float:
    encoding = word_pieces().encode(first, second)
    with torch.inference_mode():
        types = torch.tensor([encoding.type_ids])
        return float(RERANKER(torch.tensor([encoding.ids]), token_type_ids=types).logits[0, 0])


def sigmoid(value: float) -> float:
    return 1 / (1 + float(np.exp(-value)))


def probabilities(text: str) -> list[float]:
    with torch.inference_mode():
        logits = CLASSIFIER(torch.tensor([word_pieces().encode(text).ids])).logits[0]
    found: list[float] = logits.softmax(-1).tolist()
    return found


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_come_in_the_order_of_their_scores(ranking: httpx.AsyncClient, path: str) -> None:
    expected = [sigmoid(logit(QUERY, text)) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    found = await answer_of(ranking, path, query=QUERY, documents=[*TEXTS[:3], {"text": TEXTS[3]}])
    assert found["model"] == "scorer"
    assert [one["index"] for one in found["results"]] == order
    for index, one in zip(order, found["results"], strict=True):
        assert one["document"] == {"text": TEXTS[index]}
        assert one["relevance_score"] == pytest.approx(expected[index], abs=1e-5)
    num_tokens = sum(len(word_pieces().encode(QUERY, text).ids) for text in TEXTS)
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    few = await answer_of(ranking, path, query=QUERY, documents=TEXTS, top_n=2, return_documents=False)
    assert [one["index"] for one in few["results"]] == order[:2]
    assert all("document" not in one for one in few["results"])


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_pairs_are_scored(ranking: httpx.AsyncClient, path: str) -> None:
    found = await answer_of(ranking, path, text_1=QUERY, text_2=TEXTS)
    assert [one["index"] for one in found["data"]] == [0, 1, 2, 3]
    for text, one in zip(TEXTS, found["data"], strict=True):
        assert one["score"] == pytest.approx(sigmoid(logit(QUERY, text)), abs=1e-5)
    each = await answer_of(ranking, path, text_1=TEXTS, text_2=TEXTS[::-1], activation=False)
    assert each["data"][0]["score"] == pytest.approx(logit(TEXTS[0], TEXTS[3]), abs=1e-5)
    [one] = (await answer_of(ranking, path, text_1="a", text_2="b"))["data"]
    assert one["score"] == pytest.approx(sigmoid(logit("a", "b")), abs=1e-5)
    long = "world " * 600
    cut = await answer_of(ranking, path, text_1="a", text_2=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 512


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_labels_are_scored(classifying: httpx.AsyncClient, path: str) -> None:
    found = await answer_of(classifying, path, input=TEXTS)
    for index, (text, one) in enumerate(zip(TEXTS, found["data"], strict=True)):
        expected = probabilities(text)
        assert one["probs"] == pytest.approx(expected, abs=1e-5)
        assert (one["index"], one["num_classes"]) == (index, 3)
        assert one["label"] == f"LABEL_{int(np.argmax(expected))}"


async def test_pooling_returns_whatever_the_model_makes(classifying: httpx.AsyncClient) -> None:
    [one] = (await answer_of(classifying, "/pooling", input=TEXTS[0]))["data"]
    assert one["data"] == pytest.approx(probabilities(TEXTS[0]), abs=1e-5)
    [raw] = (await answer_of(classifying, "/pooling", input=TEXTS[0], activation=False))["data"]
    assert sum(raw["data"]) != pytest.approx(1.0)
    [octets] = (await answer_of(classifying, "/pooling", input=TEXTS[0], encoding_format="base64"))["data"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(octets["data"]), "<f4"), np.float32(one["data"])
    )


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "empty", "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "empty", "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 3000}, "2048", "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "text is missing", "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": [7]}, "documents[0]", "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b " * 600]}, "the limit is 512", "documents[0]"),
        (
            "/v1/score",
            {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]},
            "text_1 has 2 texts and text_2 3",
            "text_1",
        ),
        ("/v1/score", {"text_1": "a", "text_2": 5}, "a text or a list of texts", "text_2"),
        ("/v1/embeddings", {"input": "a"}, "scores 1 labels and makes no embeddings", "model"),
    ],
)
async def test_bad_requests_get_a_clear_error(
    ranking: httpx.AsyncClient, path: str, body: dict[str, Any], message: str, param: str
) -> None:
    error = await error_of(ranking, path, **body)
    assert message in error["message"]
    assert error["param"].startswith(param)


def cosine(first: str, second: str) -> float:
    rows = [
        hidden_states(EMBEDDER, word_pieces().encode(text).ids).double().mean(0) for text in (first, second)
    ]
    return float(torch.nn.functional.cosine_similarity(*rows, dim=0))


async def test_embeddings_are_compared(embedding: httpx.AsyncClient, embedder: AsyncLLM) -> None:
    given = [*TEXTS, TEXTS[0]]
    body: dict[str, Any] = {"query": QUERY, "documents": given, "prompt_name": "query"}
    found = await answer_of(embedding, "/v1/rerank", **body)
    scores = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    for index, text in enumerate(given):
        assert scores[index] == pytest.approx(cosine(f"ab {QUERY}", text), abs=1e-5)
    num_tokens = sum(len(word_pieces().encode(text).ids) for text in (f"ab {QUERY}", *TEXTS))
    assert found["usage"]["prompt_tokens"] == num_tokens
    pairs = await answer_of(embedding, "/v1/score", text_1=TEXTS, text_2=TEXTS[::-1])
    expected = [cosine(*pair) for pair in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert [one["score"] for one in pairs["data"]] == pytest.approx(expected, abs=1e-5)
    error = await error_of(embedding, "/v1/rerank", query=QUERY, documents=["a", ""])
    assert error["param"].startswith("documents[1]")
    error = await error_of(embedding, "/v1/rerank", query="", documents=["a"])
    assert error["param"].startswith("query")
    error = await error_of(embedding, "/v1/score", text_1="a", text_2="b", prompt_name="passage")
    assert "the prompts query" in error["message"]
    outputs = [
        output async for output in embedder.score(QUERY, TEXTS[0], prompt_name="query", request_id="r")
    ]
    assert outputs[-1].outputs.data[0] == pytest.approx(cosine(f"ab {QUERY}", TEXTS[0]), abs=1e-5)


async def test_models_of_other_kinds_refuse(classifying: httpx.AsyncClient) -> None:
    error = await error_of(classifying, "/v1/score", text_1="a", text_2="b")
    assert "scores 3 labels, and a score is of one" in error["message"]
    error = await error_of(classifying, "/v1/completions", prompt="a")
    assert "makes embeddings or scores and cannot generate" in error["message"]
