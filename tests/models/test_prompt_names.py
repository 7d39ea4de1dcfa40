"""Prompts by their names, as sentence-transformers publishes them beside a model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import preloaded
from encoders import make_encoder, save_encoder, word_pieces
from quire import LLM, AsyncLLM, EngineConfig
from quire.errors import ConfigError, InvalidRequestError, ModelError
from quire.front.text.input_processor import InputProcessor
from quire.front.text.preparation_threads import INLINE_LENGTH
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.config import SIMILARITIES

SMALL = {"num_threads": 2, "max_num_batched_tokens": 1100}
PROMPTS = {"query": "hello ", "document": None}


def save(path: Path, kind: str = "Model", **settings: Any) -> str:
    config = {"num_labels": 1} if kind != "Model" else {}
    save_encoder(make_encoder("bert", kind=kind, **config), path)
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS} | settings))
    return str(path)


def ids_of(llm: LLM, *texts: Any, **options: Any) -> list[int]:
    [output] = llm.score(*texts, **options) if len(texts) > 1 else llm.embed(texts[0], **options)
    assert output.outputs.error is None
    return output.prompt_token_ids


def ids(*texts: str) -> list[int]:
    found: list[int] = word_pieces().encode(*texts).ids
    return found


def test_a_prompt_comes_before_texts(tmp_path: Path) -> None:
    with LLM(save(tmp_path), **SMALL) as llm:
        assert ids_of(llm, "world") == ids_of(llm, "world", prompt_name="document") == ids("world")
        assert ids_of(llm, "world", prompt_name="query") == ids("hello world")
        for name in ("passage", 5):
            with pytest.raises(
                InvalidRequestError, match=rf"prompt_name is {name!r}, and .* document, query"
            ):
                llm.embed("world", prompt_name=name)
        with pytest.raises(InvalidRequestError, match="but the prompt is token ids"):
            llm.embed([5, 6], prompt_name="query")
        with pytest.raises(InvalidRequestError, match="the prompt is empty"):
            llm.embed("", prompt_name="query")


@pytest.mark.parametrize("published", [True, False])
def test_a_default(published: bool, tmp_path: Path) -> None:
    path = save(tmp_path, **({"default_prompt_name": "query"} if published else {}))
    options = {} if published else {"prompt_name": "query"}
    with LLM(path, **options, **SMALL) as llm:
        assert ids_of(llm, "world") == ids("hello world")
        assert ids_of(llm, "world", prompt_name="") == ids("world")
        assert ids_of(llm, [5, 6]) == [5, 6]
    with pytest.raises(
        ConfigError, match=r"prompt_name is 'passage', and .* has the prompts document, query"
    ):
        LLM(path, prompt_name="passage", **SMALL)


def test_it_comes_before_the_first_of_two_texts(tmp_path: Path) -> None:
    with LLM(save(tmp_path, "ForSequenceClassification"), **SMALL) as llm:
        assert ids_of(llm, "world", "ab", prompt_name="query") == ids("hello world", "ab")


@pytest.mark.parametrize("length", [INLINE_LENGTH - 5, INLINE_LENGTH - 4])
async def test_texts_behind_a_long_one_are_prepared_in_a_thread(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with preloaded.engines():
        llm = AsyncLLM(EngineConfig(model=save(tmp_path, prompts={"query": " " * length}), num_threads=1))
    threads = []
    process = InputProcessor.process_pooling

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return process(*args, **options)

    monkeypatch.setattr(InputProcessor, "process_pooling", noted)
    try:
        outputs = [output async for output in llm.embed("world", prompt_name="query")]
    finally:
        await llm.shutdown()
    assert outputs[-1].prompt_token_ids == ids("world")
    [thread] = threads
    assert (thread is threading.current_thread()) == (length + len("world") <= INLINE_LENGTH)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": {"a": 5}}, "has 1 prompts; there may be 1024 texts"),
        ({"prompts": {"a": "b" * 16385}}, "texts of up to 16384 characters"),
        ({"prompts": {"a": False}}, "has 1 prompts; there may be 1024 texts"),
        ({"prompts": {"a": "\ud800"}}, "characters in valid Unicode"),
        ({"prompts": {"\udfff": "a"}}, "characters in valid Unicode"),
        ({"similarity_fn_name": "hamming"}, "'hamming'; it must be one of cosine, dot, euclidean, manhattan"),
        ({"prompts": []}, r"prompts \[\]; it must be an object"),
        ({"default_prompt_name": "passage"}, "default_prompt_name 'passage', and no such prompt"),
    ],
)
def test_damaged_descriptions(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path, **settings)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_a_model_may_have_none(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path)
    with pytest.raises(ConfigError, match="has no prompts"):
        LLM(str(tmp_path), prompt_name="query", **SMALL)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_scores_are_by_the_published_similarity(name: str, tmp_path: Path) -> None:
    with LLM(save(tmp_path, similarity_fn_name=name), **SMALL) as llm:
        outputs = llm.embed(["ab", "world"])
        [score] = llm.score("ab", "world")
    rows = [torch.tensor(output.outputs.data, dtype=torch.float64) for output in outputs]
    expected = {
        "cosine": torch.cosine_similarity(*rows, dim=0),
        "dot": torch.dot(*rows),
        "euclidean": -torch.dist(*rows),
        "manhattan": -torch.dist(*rows, p=1),
    }[name]
    np.testing.assert_allclose(score.outputs.data, [expected], rtol=1e-6)
