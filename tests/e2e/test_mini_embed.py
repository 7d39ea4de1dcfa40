"""The built-in embedder: what it computes, and what it is good for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from quire.errors import InvalidRequestError
from quire.models.checkpoints.hub import resolve_model

FOLDER = resolve_model("mini-embed")
TEXTS = ["What is a KV block?", "zebra", "It hides later positions. " * 20]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("mini-embed", dtype="float32", num_threads=1) as llm:
        yield llm


def rows(llm: LLM, texts: list[str], **params: int) -> np.ndarray:
    return np.stack([output.outputs.data for output in llm.embed(texts, PoolingParams(**params))])


def expected(text: str, size: int) -> np.ndarray:
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(FOLDER, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(FOLDER)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        row = model(ids).last_hidden_state[0].mean(0)[:size]
    return (row / row.norm()).numpy()


@pytest.mark.parametrize("size", [192, 64])
def test_rows_are_those_of_transformers(llm: LLM, size: int) -> None:
    for row, text in zip(rows(llm, TEXTS, dimensions=size), TEXTS, strict=True):
        np.testing.assert_allclose(row, expected(text, size), atol=1e-5)


def test_held_out_questions_find_their_answers(llm: LLM) -> None:
    lines = (FOLDER / "pairs.jsonl").read_text().splitlines()
    pairs = [pair for pair in map(json.loads, lines) if pair["task"] == "answers"]
    assert len(pairs) > 200
    scores = rows(llm, [pair["query"] for pair in pairs]) @ rows(llm, [pair["passage"] for pair in pairs]).T
    found = [
        pairs[best]["passage"] == pair["passage"] for best, pair in zip(scores.argmax(1), pairs, strict=True)
    ]
    assert np.mean(found) > 0.8


def test_it_does_not_generate(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"use LLM\.embed"):
        llm.generate("What is a KV block?")
