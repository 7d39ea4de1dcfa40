"""Decode steps that the native kernels record: the bits of steps that are computed call by call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import driver_of

from checkpoints import make_checkpoint
from quire.execution import step_graphs
from quire.execution.model_runner import ModelRunner
from quire.execution.sampling.sampler import Sampler
from quire.kernels import has_native_kernels
from quire.kernels.interface import NotCapturableError
from quire.models import rotary
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.decoder import Decoder
from quire.models.embedding import EncodedEmbedding, EncodedRows, FloatEmbedding
from quire.sampling_params import SamplingParams
from quire.step import GraphStats

pytestmark = pytest.mark.skipif(not has_native_kernels(), reason="the native kernels are not built")

if has_native_kernels():
    from quire.kernels.cpu import linear

LOGPROBS = SamplingParams(temperature=0.0, logprobs=3)


def load(path: Path, family: str = "qwen3", **options: Any) -> Decoder:
    checkpoint = make_checkpoint(family, path, max_position_embeddings=4096)
    return load_decoder(checkpoint, read_model_config(checkpoint), options=WeightOptions(**options))


def stats_of(runner: ModelRunner) -> GraphStats:
    assert runner._graphs is not None
    return runner._graphs.stats


def outputs(driver: Any, names: str, num_output: int = 8) -> dict[str, Any]:
    """Return tokens and log-probabilities, to the last bit, of requests that are not decoded all at once."""
    for number, name in enumerate(names):
        prompt = [5 + (7 * number + 3 * place) % 90 for place in range(3 + 9 * number)]
        driver.add(name, prompt, LOGPROBS)
    driver.run(num_output, budget=7)
    return {name: (request.output, request.logprobs) for name, request in driver.requests.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4", "group_size": 32},
    ],
    ids=str,
)
def test_replayed_steps_have_the_bits_of_others(options: dict[str, Any], tmp_path: Path) -> None:
    model = load(tmp_path, **options)
    expected = outputs(driver_of(model), "abcd")
    driver = driver_of(model, model.kernels.capture)
    assert outputs(driver, "abcd") == expected
    stats = stats_of(driver.runner)
    assert stats.num_replayed >= 5


def test_an_embedding_that_is_decoded_row_by_row(tmp_path: Path) -> None:
    model = load(tmp_path, dtype="float32")
    assert isinstance(model.embedding, FloatEmbedding)
    octets = model.embedding.vectors.contiguous().view(torch.uint8)
    rows = EncodedRows(octets, lambda chosen: chosen.contiguous().view(torch.float32))
    model.embedding = EncodedEmbedding(rows, torch.float32)
    expected = outputs(driver_of(model), "abcd")
    driver = driver_of(model, model.kernels.capture)
    assert outputs(driver, "abcd") == expected
    assert stats_of(driver.runner).num_replayed >= 5


def test_angles_are_those_of_the_step_where_their_table_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary, "CHUNK", 16)
    grown = load(tmp_path, dtype="float32")
    expected = outputs(driver_of(load(tmp_path, dtype="float32")), "ab", 30)
    driver = driver_of(grown, grown.kernels.capture)
    assert outputs(driver, "ab", 30) == expected
    assert stats_of(driver.runner).num_replayed > 16


def test_steps_that_cannot_be_captured_are_tried_once(tmp_path: Path) -> None:
    attempts = []

    def refuse(compute: Any) -> Any:
        attempts.append(compute)
        raise NotCapturableError("no")

    model = load(tmp_path, dtype="float32")
    expected = outputs(driver_of(model), "ab")
    driver = driver_of(model, refuse)
    assert outputs(driver, "ab") == expected
    assert len(attempts) == 1


def test_the_least_recently_used_of_many_sizes_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 1)
    model = load(tmp_path, dtype="float32")
    expected = outputs(driver_of(model), "abcd")
    driver = driver_of(model, model.kernels.capture)
    assert outputs(driver, "abcd") == expected
    assert stats_of(driver.runner).num_graphs == 1


SOME_LARGEST = {
    "greedy": SamplingParams(temperature=0.0),
    "few": SamplingParams(temperature=0.9, top_k=7, top_p=0.9, min_p=0.01, seed=3),
    "many": SamplingParams(temperature=1.5, top_k=30, seed=4),
}
ALL = {
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "any": SamplingParams(temperature=1.2, seed=5),
    "penalty": SamplingParams(temperature=0.0, presence_penalty=1.0),
    "banned": SamplingParams(temperature=0.0, bad_words_token_ids=((7,),)),
}


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("other", [None, *ALL])
def test_tokens_are_the_same_where_only_the_largest_logits_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str | None, captures: bool
) -> None:
    watched: list[int] = []  # logits of each step that are missing
    sample = Sampler.sample

    def watch(sampler: Sampler, logits: step_graphs.StepLogits, *args: Any) -> Any:
        watched.append(int((logits.rows == float("-inf")).sum()))
        return sample(sampler, logits, *args)

    monkeypatch.setattr(Sampler, "sample", watch)

    def tokens(model: Decoder) -> dict[str, Any]:
        watched.clear()
        driver = driver_of(model, model.kernels.capture if captures else None)
        for name, params in SOME_LARGEST.items():
            driver.add(name, [5, 6, 7, 8 + len(name)], params)
        if other is not None:  # which is longer on its way
            driver.add(other, list(range(7, 60)), ALL[other])
        driver.run(16, budget=9)
        return {name: (request.output, request.logprobs) for name, request in driver.requests.items()}

    checkpoint = make_checkpoint("qwen3", tmp_path, vocab_size=20_000)
    config = read_model_config(checkpoint)
    expected = tokens(load_decoder(checkpoint, config, "bfloat16"))
    assert not sum(watched)
    monkeypatch.setattr(linear, "MIN_SHORTLISTED_BYTES", 0)
    model = load_decoder(checkpoint, config, "bfloat16")
    assert model.finds_largest_logits
    assert tokens(model) == expected
    assert sum(watched[:5])
    assert (watched[-1] > 0) == (other is None)
