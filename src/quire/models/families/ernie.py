"""ERNIE 4.5: pairs of features that lie side by side are rotated; dense, and with shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.families.family import NAMES, Family, with_experts
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig

_MAX_NORM_MIN = 1e-6  # the weights of a token's likeliest experts never sum up to less
_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True}


def _ernie(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    bias = bool(hf.get("use_bias", False))
    config = base.changed(AttentionConfig, qkv_bias=bias, output_bias=bias, is_interleaved=True)
    return config.changed(FeedForwardConfig, bias=bias)


def _ernie_moe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    if hf["moe_norm_min"] > _MAX_NORM_MIN:
        raise ModelError(f"config.json has moe_norm_min {hf['moe_norm_min']}; at most 1e-6 is supported")
    first, last, step = hf["moe_layer_start_index"], hf["moe_layer_end_index"], hf["moe_layer_interval"]
    last = base.num_layers - 1 if last == -1 else last
    experts, inner_size = hf["moe_num_experts"], hf["moe_intermediate_size"]
    config = with_experts(
        _ernie(hf, base),
        [first <= layer <= last and (layer + 1) % step == 0 for layer in range(base.num_layers)],
        shared_inner_size=inner_size * hf["moe_num_shared_experts"],
        num_experts=experts,
        experts_per_token=hf["moe_k"],
        inner_size=inner_size,
        normalize=True,
        correction=(1, experts),
    )
    return replace(config, output_bias=bool(hf.get("use_bias", False)), ignored_prefixes=("model.mtp_",))


FAMILIES: dict[str, Family] = {
    "ernie4_5": Family(
        _ernie,
        NAMES,
        _DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128},
        architectures=("Ernie4_5ForCausalLM",),
    ),
    "ernie4_5_moe": Family(
        _ernie_moe,
        NAMES | {"router_correction": "mlp.moe_statics.e_score_correction_bias"},
        _DEFAULTS
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        architectures=("Ernie4_5_MoeForCausalLM",),
    ),
}
