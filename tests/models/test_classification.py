"""Models that score labels, and pairs of texts, against `transformers` on random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoders import DECODERS, make_encoder, random_prompts, save_encoder, word_pieces
from quire import LLM, PoolingParams
from quire.errors import ContextLengthError, InvalidRequestError, ModelError
from quire.models.checkpoints.config_reading import read_model_config

HEADED = [
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "distilbert",
    "modernbert",
    "modernbert-biases",
    *DECODERS,
]
SMALL = {"num_threads": 2, "num_kv_blocks": 128, "max_num_batched_tokens": 1100}
QUERY, DOCUMENTS = "hello world", ["world. hello", "ab cd", "hello hello hello worlding"]


def make_classifier(name: str, path: Path, num_labels: int = 3, **config: Any) -> Any:
    model = make_encoder(name, kind="ForSequenceClassification", num_labels=num_labels, **config)
    save_encoder(model, path)
    return model


def logits(model: Any, prompt: list[int], **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([prompt]), **inputs).logits[0]
    return found


def rows(outputs: list[Any]) -> list[np.ndarray]:
    assert [output.outputs.error for output in outputs] == [None] * len(outputs)
    return [output.outputs.data for output in outputs]


@pytest.mark.formats
@pytest.mark.parametrize("name", HEADED)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_classifier(name, tmp_path)
    prompts = random_prompts([1, 2, 70, 511, 512] if name not in DECODERS else [1, 2, 70])
    with LLM(str(tmp_path), **SMALL) as llm:
        assert llm.info.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        together = rows(llm.classify(prompts))
        raw = rows(llm.reward(prompts))
        for prompt, row, score in zip(prompts, together, raw, strict=True):
            expected = logits(model, prompt)
            np.testing.assert_allclose(row, expected.softmax(-1), atol=1e-5, rtol=0)
            np.testing.assert_allclose(score, expected, atol=1e-5, rtol=1e-5)
            assert row.tobytes() == rows(llm.classify([prompt]))[0].tobytes()


def test_the_mean_may_be_classified(tmp_path: Path) -> None:
    model = make_classifier("modernbert", tmp_path, classifier_pooling="mean", classifier_activation="silu")
    [prompt] = random_prompts([40])
    with LLM(str(tmp_path), **SMALL) as llm:
        [row] = rows(llm.classify([prompt]))
    np.testing.assert_allclose(row, logits(model, prompt).softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("entries", "activation"),
    [
        ({}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ""),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, ""),
        ({"problem_type": "regression"}, ""),
        ({"num_labels": 2, "id2label": {"0": "no", "1": "yes"}}, "softmax"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, "sigmoid"),
    ],
)
def test_what_makes_probabilities(entries: dict[str, Any], activation: str, tmp_path: Path) -> None:
    make_classifier("bert", tmp_path, num_labels=1)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    assert read_model_config(tmp_path).label_activation == activation


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "2 entries of id2label; these must be texts for the numbers"),
        ({"id2label": {"0": 5}}, "1 entries of id2label"),
        ({"id2label": {}}, "0 entries of id2label"),
        ({"id2label": []}, "id2label .*must be an object"),
        ({"id2label": None, "num_labels": 0}, "num_labels 0; it must be"),
        ({"problem_type": "other"}, "problem_type 'other'"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "activation 'Tanh'"),
    ],
)
def test_what_is_not_computed_is_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_classifier("bert", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_pairs_are_scored_as_the_tokenizer_joins_them(name: str, tmp_path: Path) -> None:
    model = make_classifier(name, tmp_path, num_labels=1)
    with LLM(str(tmp_path), **SMALL) as llm:
        outputs = llm.score(QUERY, DOCUMENTS)
        one_by_one = [llm.score(QUERY, document)[0] for document in DOCUMENTS]
        for document, output, alone in zip(DOCUMENTS, outputs, one_by_one, strict=True):
            encoding = word_pieces().encode(QUERY, document)
            assert output.prompt_token_ids == encoding.ids
            inputs = {"token_type_ids": torch.tensor([encoding.type_ids])} if name != "distilbert" else {}
            expected = torch.sigmoid(logits(model, encoding.ids, **inputs))
            np.testing.assert_allclose(output.outputs.data, expected, atol=1e-5, rtol=0)
            assert output.outputs.data.tobytes() == alone.outputs.data.tobytes()
        if name == "bert":  # token ids do, with where the second text begins
            start = encoding.type_ids.index(1)
            [row] = rows(llm.classify([encoding.ids], PoolingParams(second_text_at=start)))
            assert row.tobytes() == outputs[-1].outputs.data.tobytes()
        several = rows(llm.score(DOCUMENTS, DOCUMENTS[::-1]))
        assert several[1].tobytes() == rows(llm.score(DOCUMENTS[1], DOCUMENTS[1]))[0].tobytes()


def test_the_end_of_the_second_text_is_cut(tmp_path: Path) -> None:
    make_classifier("bert", tmp_path, num_labels=1)
    long = "world " * 600
    with LLM(str(tmp_path), **SMALL) as llm:
        with pytest.raises(ContextLengthError, match="605 tokens; the limit is 512"):
            llm.score(QUERY, long)
        for num_tokens, length in ((-1, 512), (20, 20)):
            [output] = llm.score(QUERY, long, truncate_prompt_tokens=num_tokens)
            assert output.prompt_token_ids == [2, 57, 58, 3, *[58] * (length - 5), 3]
        with pytest.raises(ContextLengthError, match="the second text has only 1"):
            llm.score(QUERY, "a", truncate_prompt_tokens=3)
        with pytest.raises(ContextLengthError, match="more than 512 tokens"):
            llm.score(QUERY, " " * 600_000)


def test_embeddings_are_compared(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "ab "}}')
    with LLM(str(tmp_path), **SMALL) as llm:
        one, *others = rows(llm.embed([f"ab {QUERY}", *DOCUMENTS]))
        outputs = llm.score(QUERY, DOCUMENTS, prompt_name="query")
        for output, other in zip(outputs, others, strict=True):
            expected = np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other)
            np.testing.assert_allclose(output.outputs.data, [expected], atol=1e-6)
        first, second = word_pieces().encode(f"ab {QUERY}").ids, word_pieces().encode(DOCUMENTS[0]).ids
        assert outputs[0].prompt_token_ids == [*first, *second]
        several = llm.score([QUERY, "ab"], DOCUMENTS[:2], prompt_name="query")
        assert several[0].outputs.data.tobytes() == outputs[0].outputs.data.tobytes()
        again = llm.score([QUERY] * 4, [*DOCUMENTS, DOCUMENTS[0]], prompt_name="query")
        assert [data.tobytes() for data in rows(again[:3])] == [data.tobytes() for data in rows(outputs)]
        assert again[3].request_id == again[0].request_id
        [same] = llm.score("world " * 600, "world " * 500, truncate_prompt_tokens=20)
        assert same.outputs.data == pytest.approx(1)
        for first_text, second_text in (("", "b"), ("a", ""), ("a", [[5]]), ("a", [3])):
            with pytest.raises(InvalidRequestError):
                llm.score(first_text, second_text)
        with pytest.raises(InvalidRequestError, match="activation is False"):
            llm.score("a", "b", PoolingParams(activation=False))


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    make_classifier("bert", tmp_path / "classifier")
    with LLM(str(tmp_path / "classifier"), **SMALL) as llm:
        with pytest.raises(
            InvalidRequestError, match=r"scores 3 labels and makes no embeddings; use LLM\.class"
        ):
            llm.embed("a")
        with pytest.raises(InvalidRequestError, match="scores 3 labels, and a score is of one"):
            llm.score("a", "b")
        with pytest.raises(
            InvalidRequestError, match="texts_1 has 2 texts and texts_2 3; there must be one in texts_1"
        ):
            llm.score(["a", "b"], ["c", "d", "e"])
        for first, second in (("", "b"), ("a", ""), ("a", 3)):
            with pytest.raises(InvalidRequestError):
                llm.score(first, second)
    save_encoder(make_encoder("bert"), tmp_path / "encoder")
    with LLM(str(tmp_path / "encoder"), **SMALL) as llm:
        for call in (llm.classify, llm.reward):
            with pytest.raises(InvalidRequestError, match=r"scores no labels; use LLM\.embed"):
                call("a")
        with pytest.raises(InvalidRequestError, match=r"activation is False, but .* scores no labels"):
            llm.embed("a", PoolingParams(activation=False))
