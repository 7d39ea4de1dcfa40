"""Models that cache eviction cannot serve are refused at the start, with the reason."""

from __future__ import annotations

import pytest

from checkpoints import make_checkpoint
from quire.config import CacheEvictionConfig, EngineConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.memory.eviction import refuse_model_beside_eviction
from quire.errors import ConfigError
from quire.models.checkpoints.config_reading import read_model_config


@pytest.mark.parametrize(
    ("family", "rotates", "reason"),
    [
        ("mistral", False, "layers of .* see only the last 12 tokens"),
        ("llama-3.1", True, "has a scaled rotary embedding, llama3; turn it off"),
        ("smollm3", True, "has several rotary embeddings, or layers without one"),
        ("llama-3.1", False, None),
        ("qwen3", True, None),
    ],
)
def test_models_are_refused_with_the_reason(family, rotates, reason, tmp_path):
    model = read_model_config(make_checkpoint(family, tmp_path / family))
    config = SchedulerConfig(
        use_cache_eviction=True, cache_eviction_config=CacheEvictionConfig(apply_rotation=rotates)
    )
    refuse_model_beside_eviction(SchedulerConfig(), model)
    if reason is None:
        refuse_model_beside_eviction(config, model)
        return
    with pytest.raises(ConfigError, match=reason):
        refuse_model_beside_eviction(config, model)


def test_an_engine_does_not_start_with_such_a_model(tmp_path):
    path = make_checkpoint("mistral", tmp_path / "mistral")
    scheduler = SchedulerConfig(use_cache_eviction=True, num_kv_blocks=64)
    with pytest.raises(ConfigError, match="see only the last 12 tokens"):
        EngineCore(EngineConfig(model=str(path), scheduler=scheduler), path)
