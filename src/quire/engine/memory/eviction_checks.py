"""Which models cache eviction can serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config import SchedulerConfig
from quire.errors import ConfigError
from quire.models.layers.attention import attention_of

if TYPE_CHECKING:
    from quire.models.config import ModelConfig


def refuse_model_beside_eviction(config: SchedulerConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if `config` evicts KV in a way that does not fit `model`."""
    if not config.use_cache_eviction:
        return
    num_without = model.num_layers - len(model.kv_specs)
    if num_without:
        raise ConfigError(
            f"SchedulerConfig.use_cache_eviction is on, but {num_without} layers of {model.architecture} "
            "keep no KV of their own to score; turn it off"
        )
    windows = [spec.window for spec in model.kv_specs if spec.window]
    if windows:
        raise ConfigError(
            f"SchedulerConfig.use_cache_eviction is on, but {len(windows)} layers of {model.architecture} "
            f"see only the last {min(windows)} tokens, which cannot be counted when tokens between them are "
            "evicted; turn it off"
        )
    reason = _cannot_rotate(model)
    if config.cache_eviction_config.apply_rotation and reason:
        raise ConfigError(
            f"CacheEvictionConfig.apply_rotation is on, but {model.architecture} {reason}; turn it off: "
            "positions then keep the gaps of what was evicted"
        )


def _cannot_rotate(model: ModelConfig) -> str:
    """Return what in the rotary embedding is not as in Llama; empty if nothing is."""
    layers = attention_of(model)
    [rope, *others] = {layer.rope for layer in layers}
    if rope is None or others:
        return "has several rotary embeddings, or layers without one"
    if rope.kind != "default":
        return f"has a scaled rotary embedding, {rope.kind}"
    head_dim = max(layer.head_dim for layer in layers)
    if rope.rotary_dim != head_dim:
        return f"rotates only {rope.rotary_dim} of the {head_dim} features of a head"
    return ""
