"""Llama, and families that differ from it in a few numbers."""

from __future__ import annotations

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


def llama(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Llama's biases, which other families have, too."""
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
    return llama(hf, base).changed(
        AttentionConfig,
        rope=[rope if has_rope[layer] else None for layer in range(base.num_layers)],
        window=layer_windows(hf, lambda layer: is_windowed and not has_rope[layer]),
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(llama, NAMES, architectures=("LlamaForCausalLM",)),
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
}
