"""Every family through the whole engine: the greedy tokens of `transformers`, however it gets to them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checked_engine import CheckedEngine, tokens
from checkpoints import FAMILIES, VOCAB_SIZE, make_model, save_checkpoint
from paged_harness import generate
from quire.config import SpeculationConfig
from quire.execution.drafts import adaptive_proposer
from quire.kernels import has_native_kernels
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder

REPRESENTATIVE = ("llama", "gemma3", "lfm2", "deepseek_v3", "gpt2")  # one of each kind of layers and caches
WITH_HEADS_OF_THE_REFERENCE = frozenset(
    [
        "ernie4_5",
        "gemma",
        "gemma2",
        "gemma3",
        "glm",
        "glm4",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "llama4",
        "ministral3",
        "mistral",
        "nemotron_h",
        "seed_oss",
        "smollm2",
    ]
)
"""Families whose small checkpoints have sizes that the native kernels leave to it."""
BLOCK_SIZE = 4
LENGTHS = 37, 5, 22, 30
MAX_TOKENS = 10
SHORT, FEW = 9, 4  # of a prompt in chunks of every size, and of its answer


class Engine(CheckedEngine):
    """One that has states' checkpoints at short intervals."""

    def __init__(self, path: Path, **options: Any) -> None:
        scheduler = {"block_size": BLOCK_SIZE, "max_num_seqs": 4, "cache_interval_multiplier": 4}
        super().__init__(path, max_tokens=MAX_TOKENS, watermark=0.0, **scheduler, **options)


def prompts() -> list[list[int]]:
    """Return prompts that repeat themselves, as answers may: drafts are accepted."""
    rng = np.random.default_rng(5)
    return [np.resize(rng.integers(5, 90, 11), length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns a family's checkpoint and the model of `transformers`, made once."""

    @functools.cache
    def made(family: str) -> tuple[Path, Any]:
        model = make_model(family)
        return save_checkpoint(model, tmp_path_factory.mktemp("models") / family), model

    return made


def assert_greedy(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Compare each token with the likeliest one behind those before it."""
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0]
        assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()


every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.representative] * (name in REPRESENTATIVE)) for name in FAMILIES],
)


@pytest.mark.formats
@every_family
def test_in_company_preempted_twice_and_with_drafts(
    family: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = checkpoint(family)
    engine = Engine(path, max_num_batched_tokens=13, num_kv_blocks=24, reserve_full_prompt=False)
    answers = engine.answers(prompts())
    assert_greedy(model, prompts(), tokens(answers))
    assert engine.stats.num_preemptions
    found = engine.stats.prefix_hit_tokens
    assert engine.answers(prompts()) == answers
    assert engine.stats.prefix_hit_tokens > found
    if has_native_kernels():
        graphs = engine.core.runner._graphs
        assert (graphs.stats.num_replayed == 0) == (family in WITH_HEADS_OF_THE_REFERENCE)
    # Drafts whatever steps take: how many are worth their time is asked elsewhere.
    monkeypatch.setattr(adaptive_proposer, "AdaptiveProposer", lambda proposer, *_, **__: proposer)
    drafting = SpeculationConfig(speculative_method="ngram", ngram_min=1)
    engine = Engine(path, speculation=drafting, max_num_batched_tokens=64, num_kv_blocks=240)
    all_tokens = np.random.default_rng(6).permutation(np.arange(3, VOCAB_SIZE)).tolist()
    *again, last = engine.answers([*prompts(), all_tokens])
    assert again == answers
    assert_greedy(model, [all_tokens], tokens([last]))
    assert engine.stats.num_draft_tokens >= MAX_TOKENS - 2


@pytest.mark.formats
@every_family
def test_in_chunks_of_every_size(family: str, checkpoint: Any) -> None:
    path, model = checkpoint(family)
    decoder = load_decoder(path, read_model_config(path))
    short = [prompt[:SHORT] for prompt in prompts()[:2]]
    for chunk in range(1, SHORT + 1):
        answers = [
            one.token_ids for one in generate(decoder, short, num_new=FEW, chunk=chunk, block_size=BLOCK_SIZE)
        ]
        if chunk == 1:
            assert_greedy(model, short, answers)
            expected = answers
        assert answers == expected
