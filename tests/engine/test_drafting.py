"""What makes drafts, built from the configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from quire.config import EngineConfig, SpeculationConfig
from quire.engine.drafting import build_proposer, find_draft_model, load_draft_model
from quire.engine.memory_plan import MemoryPlan, plan_memory
from quire.errors import ConfigError, ModelNotFoundError
from quire.execution.adaptive_proposer import AdaptiveProposer
from quire.execution.draft_model_proposer import DraftModelProposer
from quire.front.arguments import engine_config
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.config import ModelConfig


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("drafting"), dtype="float32")


def with_draft_model(name: str) -> EngineConfig:
    return EngineConfig(speculation=SpeculationConfig(speculative_method="draft-model", draft_model=name))


def plan_of(config: EngineConfig, model: ModelConfig) -> MemoryPlan:
    return plan_memory(config, model, draft_model=model, available_bytes=10**9)


def test_without_speculation_there_is_nothing(checkpoint: Path):
    model = read_model_config(checkpoint)
    assert find_draft_model(EngineConfig(), model) is None
    assert build_proposer(EngineConfig(), None, plan_of(EngineConfig(), model)) is None


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_copying_needs_no_model(method: str, checkpoint: Path):
    model = read_model_config(checkpoint)
    config = engine_config("x", {"speculative_method": method, "ngram_max": 3})
    assert config.speculation == SpeculationConfig(speculative_method=method, ngram_max=3)
    assert find_draft_model(config, model) is None
    assert isinstance(build_proposer(config, None, plan_of(config, model)), AdaptiveProposer)


def test_a_draft_model_is_found_and_loaded(checkpoint: Path):
    model = read_model_config(checkpoint)
    config = with_draft_model(str(checkpoint))
    found = find_draft_model(config, model)
    assert found is not None
    assert found.config == model
    plan = plan_of(config, model)
    assert isinstance(build_proposer(config, load_draft_model(config, found, plan), plan), DraftModelProposer)


def test_a_draft_model_of_another_vocabulary_is_refused(checkpoint: Path):
    model = read_model_config(checkpoint)
    config = dataclasses.replace(with_draft_model(str(checkpoint)), model="big")
    message = "vocabulary of 384 tokens; 'big' has 500, and drafts need the same vocabulary"
    with pytest.raises(ConfigError, match=message):
        find_draft_model(config, dataclasses.replace(model, vocab_size=500))


def test_a_draft_model_that_does_not_exist_is_refused(checkpoint: Path):
    model = read_model_config(checkpoint)
    with pytest.raises(ModelNotFoundError, match="not a valid hub name"):
        find_draft_model(with_draft_model("no/such/model"), model)


def test_a_description_is_enough_to_plan(checkpoint: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    found = find_draft_model(with_draft_model(str(tmp_path)), read_model_config(checkpoint), weights=False)
    assert found is not None
    assert found.path == tmp_path
