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
    assert (await classifying.get("/v1/models")).json()["data"][0]["task"] == "classify"
    error = await error_of(classifying, "/v1/score", text_1="a", text_2="b")
    assert "scores 3 labels, and a score is of one" in error["message"]
    error = await error_of(classifying, "/v1/completions", prompt="a")
    assert "makes embeddings or scores and cannot generate" in error["message"]


# -- as text-embeddings-inference and Ollama have them -------------------------------------------------------


async def raw(http: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def embedding_of(text: str, *, normalized: bool = True) -> np.ndarray:
    row = hidden_states(EMBEDDER, word_pieces().encode(text).ids).mean(0).numpy()
    return row / np.linalg.norm(row) if normalized else row


async def test_tei_embed(embedding: httpx.AsyncClient) -> None:
    rows = await raw(embedding, "/embed", inputs=TEXTS)
    np.testing.assert_allclose(rows, [embedding_of(text) for text in TEXTS], atol=1e-5)
    ids = word_pieces().encode(TEXTS[0]).ids
    for inputs in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        [row] = await raw(embedding, "/embed", inputs=inputs, normalize=False)
        np.testing.assert_allclose(row, embedding_of(TEXTS[0], normalized=False), atol=1e-5)
    [row] = await raw(embedding, "/embed", inputs="xyz", prompt_name="query")
    np.testing.assert_allclose(row, embedding_of("ab xyz"), atol=1e-5)
    long = "ab " + "world " * 600
    [right] = await raw(embedding, "/embed", inputs=long, truncate=True)
    [left] = await raw(embedding, "/embed", inputs=long, truncate=True, truncation_direction="Left")
    np.testing.assert_allclose(right, embedding_of("ab " + "world " * 508), atol=1e-5)
    np.testing.assert_allclose(left, embedding_of("world " * 510), atol=1e-5)
    error = await raw(embedding, "/embed", 400, inputs=["a", long])
    assert error["error_type"] == "Validation"
    assert error["error"].startswith("inputs[1]: the prompt has 604 tokens; the limit is 512")
    for body, message in (({}, "inputs"), ({"inputs": []}, "inputs"), ({"inputs": ["a"] * 3000}, "2048")):
        error = await raw(embedding, "/embed", 400, **body)
        assert message in error["error"]
    error = await raw(embedding, "/predict", 400, inputs="a")
    assert "makes embeddings and scores no labels" in error["error"]


async def test_tei_rerank(ranking: httpx.AsyncClient) -> None:
    expected = [logit(QUERY, text) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    found = await raw(ranking, "/rerank", query=QUERY, texts=TEXTS)
    assert [one["index"] for one in found] == order
    assert [one["score"] for one in found] == pytest.approx([sigmoid(expected[index]) for index in order])
    assert all("text" not in one for one in found)
    found = await raw(ranking, "/rerank", query=QUERY, texts=TEXTS, raw_scores=True, return_text=True)
    assert [one["text"] for one in found] == [TEXTS[index] for index in order]
    assert [one["score"] for one in found] == pytest.approx([expected[index] for index in order], abs=1e-5)
    long = "world " * 600
    assert len(await raw(ranking, "/rerank", query=QUERY, texts=[long], truncate=True)) == 1
    error = await raw(ranking, "/rerank", 400, query=QUERY, texts=["a", ""])
    assert error["error_type"] == "Validation"
    assert error["error"].startswith("texts[1]")
    for name, given in (
        ("raw_scores", "documents"),
        ("return_text", "documents"),
        ("return_documents", "texts"),
    ):
        body = {given: ["a"], name: True}
        error = await raw(ranking, "/rerank", 400, query=QUERY, **body)
        assert f"{name} does not go with {given}" in str(error["error"])
    error = await raw(ranking, "/rerank", 400, query=QUERY, texts=["a"], truncation_direction="Left")
    assert "only the end of the second is cut" in error["error"]
    for body in ({}, {"texts": ["a"], "documents": ["a"]}):
        error = await raw(ranking, "/rerank", 400, query=QUERY, **body)
        assert "there must be documents, or texts" in str(error["error"])


async def test_tei_predict(classifying: httpx.AsyncClient) -> None:
    expected = probabilities(TEXTS[0])
    found = await raw(classifying, "/predict", inputs=TEXTS[0])
    assert [one["score"] for one in found] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    assert {one["label"]: one["score"] for one in found} == pytest.approx(
        {f"LABEL_{number}": score for number, score in enumerate(expected)}, abs=1e-5
    )
    cut = {"truncate": True, "truncation_direction": "Left"}
    found = await raw(classifying, "/predict", inputs="ab " + "world " * 600, **cut)
    assert found[0]["score"] == pytest.approx(max(probabilities("world " * 510)), abs=1e-5)
    error = await raw(classifying, "/predict", 400, inputs=[["a"], ["a", "b"]], **cut)
    assert "only the end of the second is cut" in error["error"]
    several = await raw(classifying, "/predict", inputs=[[text] for text in TEXTS])
    assert [len(one) for one in several] == [3] * len(TEXTS)
    pair = await raw(classifying, "/predict", inputs=["a", "b"], raw_scores=True)
    assert [pair] == await raw(classifying, "/predict", inputs=[["a", "b"]], raw_scores=True)
    ids = word_pieces().encode("a", "b").ids
    with torch.inference_mode():
        logits = CLASSIFIER(torch.tensor([ids])).logits[0]
    assert pair[0]["score"] == pytest.approx(float(logits.max()), abs=1e-5)
    for inputs in (5, [], ["a", "b", "c"], [["a"], "b"], [[]]):
        error = await raw(classifying, "/predict", 400, inputs=inputs)
        assert "inputs" in error["error"]


async def test_ollama_embeddings(embedding: httpx.AsyncClient) -> None:
    found = await raw(embedding, "/api/embed", model="scorer", input=TEXTS, options={"num_ctx": 512})
    np.testing.assert_allclose(found["embeddings"], [embedding_of(text) for text in TEXTS], atol=1e-5)
    assert found["prompt_eval_count"] == sum(len(word_pieces().encode(text).ids) for text in TEXTS)
    assert found["model"] == "scorer"
    assert found["total_duration"] > 0
    found = await raw(embedding, "/api/embeddings", model="scorer:latest", prompt="xyz")
    np.testing.assert_allclose(found["embedding"], embedding_of("xyz", normalized=False), atol=1e-5)
    long = "world " * 600
    found = await raw(embedding, "/api/embed", model="scorer", input=long)
    np.testing.assert_allclose(found["embeddings"][0], embedding_of("world " * 510), atol=1e-5)
    error = await raw(embedding, "/api/embed", 400, model="scorer", input=long, truncate=False)
    assert "the prompt has 602 tokens; the limit is 512" in error["error"]
    error = await raw(embedding, "/api/embeddings", 400, model="scorer", prompt="")
    assert error["error"].startswith("prompt: the prompt is empty")
    error = await raw(embedding, "/api/embed", 404, model="other", input="a")
    assert "is not served here" in error["error"]
    error = await raw(embedding, "/api/embed", 400, model="scorer", input=["a"] * 3000)
    assert "2048" in error["error"]


async def test_scores_of_tokens_are_limited(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert", kind="ForTokenClassification", num_labels=3), tmp_path)
    with preloaded.engines():
        llm = AsyncLLM(EngineConfig(model=str(tmp_path), num_threads=1))
    try:
        await llm.wait_until_ready()
        app = create_app(llm, ServerConfig(served_model_name=["scorer"], max_logprobs_per_request=60))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            [entry] = (await answer_of(http, "/pooling", input=[5] * 20))["data"]
            assert np.array(entry["data"]).shape == (20, 3)
            for given, count in (([5] * 21, 63), ([[5] * 11] * 2, 66)):
                error = await error_of(http, "/pooling", input=given)
                assert f"asks for {count} scores of tokens or more, and the limit is 60" in error["message"]
    finally:
        await llm.shutdown()
