"""Llama, and families that differ from it in a few numbers."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import ModelConfig
from quire.models.families.family import (
    NAMES,
    Family,
    all_sliding,
    layer_windows,
    with_attention_biases,
    with_experts,
)
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig, read_rope_of_scaled_queries

_MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}


def _llama(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return with_attention_biases(hf, base).changed(FeedForwardConfig, bias=bool(hf.get("mlp_bias", False)))


def _mixtral(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return with_experts(
        all_sliding(hf, base),
        [True] * base.num_layers,
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["intermediate_size"],
        normalize=True,
    )


def _smollm3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    interval = hf.get("no_rope_layer_interval", 4)
    has_rope = hf.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(base.num_layers)]
    is_windowed = bool(hf.get("use_sliding_window", False))
    [rope] = base.ropes
    return _llama(hf, base).changed(
        AttentionConfig,
        rope=[rope if has_rope[layer] else None for layer in range(base.num_layers)],
        window=layer_windows(hf, lambda layer: is_windowed and not has_rope[layer]),
    )


def _granite(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = replace(
        _llama(hf, base),
        embedding_scale=hf["embedding_multiplier"],
        residual_scale=hf["residual_multiplier"],
        logits_divisor=hf["logits_scaling"],
    )
    return config.changed(AttentionConfig, scale=hf["attention_multiplier"])


def _granite_swa(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Layers may have a base of frequencies of their own; 0: they are not rotated."""
    [rope] = base.ropes
    bases = hf.get("layer_rope_theta") or [rope.theta] * base.num_layers
    return _granite(hf, base).changed(
        AttentionConfig,
        window=layer_windows(hf, lambda layer: layer % 4 != 0),
        rope=[replace(rope, theta=float(theta)) if theta else None for theta in bases],
        has_sinks=True,
    )


_GRANITE_DEFAULTS = dict.fromkeys(
    ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, NAMES, architectures=("LlamaForCausalLM",)),
    "mistral": Family(
        all_sliding,
        NAMES,
        {"num_key_value_heads": 8, "sliding_window": 4096},
        architectures=("MistralForCausalLM",),
    ),
    "ministral3": Family(
        all_sliding,
        NAMES,
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        ropes=lambda hf, head_dim: (read_rope_of_scaled_queries(hf, head_dim),),
        architectures=("Ministral3ForCausalLM",),
    ),
    "mixtral": Family(
        _mixtral,
        NAMES | _MIXTRAL_NAMES,
        {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        architectures=("MixtralForCausalLM",),
    ),
    "smollm3": Family(
        _smollm3,
        NAMES,
        {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
        architectures=("SmolLM3ForCausalLM",),
    ),
    "granite": Family(_granite, NAMES, _GRANITE_DEFAULTS, architectures=("GraniteForCausalLM",)),
    "granite_swa": Family(
        _granite_swa,
        NAMES,
        _GRANITE_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
        architectures=("GraniteSWAForCausalLM",),
    ),
}
