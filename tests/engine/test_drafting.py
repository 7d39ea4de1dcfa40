"""What makes drafts, built from the configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tokenizers

from checkpoints import make_checkpoint, make_tokenizer
from quire.config import EngineConfig, SpeculationConfig
from quire.engine.building.drafting import build_proposer, find_draft_model, load_draft_model
from quire.engine.memory.plan import MemoryPlan, plan_memory
from quire.errors import ConfigError, ModelError, ModelNotFoundError
from quire.execution.drafts.adaptive_proposer import AdaptiveProposer
from quire.execution.drafts.draft_model_proposer import DraftModelProposer
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
    plan = plan_of(EngineConfig(), model)
    assert find_draft_model(EngineConfig(), model, checkpoint) is None
    assert build_proposer(EngineConfig(), None, plan, vocab_size=model.vocab_size) is None


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_copying_needs_no_model(method: str, checkpoint: Path):
    model = read_model_config(checkpoint)
    config = engine_config("x", {"speculative_method": method, "ngram_max": 3})
    assert config.speculation == SpeculationConfig(speculative_method=method, ngram_max=3)
    assert find_draft_model(config, model, checkpoint) is None
    proposer = build_proposer(config, None, plan_of(config, model), vocab_size=model.vocab_size)
    assert isinstance(proposer, AdaptiveProposer)


def test_a_draft_model_is_found_and_loaded(checkpoint: Path):
    model = read_model_config(checkpoint)
    config = with_draft_model(str(checkpoint))
    found = find_draft_model(config, model, checkpoint)
    assert found is not None
    assert found.config == model
    plan = plan_of(config, model)
    draft = load_draft_model(config, found, plan)
    proposer = build_proposer(config, draft, plan, vocab_size=model.vocab_size)
    assert isinstance(proposer, DraftModelProposer)


@pytest.fixture
def padded(checkpoint: Path, tmp_path: Path) -> tuple[ModelConfig, Path]:
    """A model whose vocabulary is padded further; `checkpoint` and it have tokenizers that are alike."""
    make_tokenizer(checkpoint)
    make_tokenizer(tmp_path)
    return dataclasses.replace(read_model_config(checkpoint), vocab_size=500), tmp_path


@pytest.mark.parametrize("is_own", [True, False])
def test_a_draft_model_may_have_a_padded_vocabulary(
    padded: tuple[ModelConfig, Path], checkpoint: Path, is_own: bool
):
    """`is_own`: the tokenizer is that of the model."""
    model, path = padded
    config = with_draft_model(str(checkpoint))
    if not is_own:
        config, path = dataclasses.replace(config, tokenizer=str(path)), Path("/nowhere")
    found = find_draft_model(config, model, path)
    assert found is not None
    assert (found.config.vocab_size, model.vocab_size) == (384, 500)


def test_a_draft_model_with_more_tokens_than_the_model_is_found(
    padded: tuple[ModelConfig, Path], checkpoint: Path
):
    """Tokens that were added last are in one of them only."""
    model, path = padded
    backend = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    backend.add_tokens(["<|added|>"])
    backend.save(str(checkpoint / "tokenizer.json"))
    assert find_draft_model(with_draft_model(str(checkpoint)), model, path) is not None


def test_a_draft_model_of_other_tokens_is_refused(padded: tuple[ModelConfig, Path], checkpoint: Path):
    model, path = padded
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|other|>"))
    config = dataclasses.replace(with_draft_model(str(checkpoint)), model="big")
    message = r"of 384 tokens; 'big' has 500, and token 2 is '<\|other\|>' there, not '<\|im_end\|>'"
    with pytest.raises(ConfigError, match=message):
        find_draft_model(config, model, path)


def test_a_draft_model_whose_tokens_are_not_known_is_refused(
    padded: tuple[ModelConfig, Path], checkpoint: Path
):
    model, path = padded
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        find_draft_model(with_draft_model(str(checkpoint)), model, path)


def test_a_draft_model_that_does_not_exist_is_refused(checkpoint: Path):
    model = read_model_config(checkpoint)
    with pytest.raises(ModelNotFoundError, match="not a valid hub name"):
        find_draft_model(with_draft_model("no/such/model"), model, checkpoint)


def test_a_description_is_enough_to_plan(checkpoint: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    model = read_model_config(checkpoint)
    found = find_draft_model(with_draft_model(str(tmp_path)), model, checkpoint, weights=False)
    assert found is not None
    assert found.path == tmp_path
