"""Families that rotate features side by side: Cohere, ERNIE 4.5, GLM-4; and GLM-4.5, which does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.families.family import (
    NAMES,
    ROUTED_DEFAULTS,
    Family,
    layer_windows,
    with_attention_biases,
    with_corrected_experts,
    with_experts,
    with_parallel_blocks,
)
from quire.models.layer import SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig, partial_ropes

_COHERE_DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}


def _cohere(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    parallel = with_parallel_blocks(with_attention_biases(hf, base))
    config = parallel.changed(AttentionConfig, is_interleaved=True)
    return replace(config, norm_kind="layer_without_bias", logits_divisor=1 / hf["logit_scale"])


def _cohere2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Only layers with a window are rotated."""
    pattern = hf.get("sliding_window_pattern", 4)
    windows = layer_windows(hf, lambda layer: (layer + 1) % pattern != 0)
    [rope] = base.ropes
    ropes = [rope if window else None for window in windows]
    return _cohere(hf, base).changed(AttentionConfig, window=windows, rope=ropes)


_MAX_NORM_MIN = 1e-6  # the weights of a token's likeliest experts never sum up to less
_ERNIE_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True}


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


_GLM_NAMES = NAMES | {"gate_up": "mlp.gate_up_proj"}
_GLM4_NAMES = _GLM_NAMES | {
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
_GLM_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def _glm(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return base.changed(AttentionConfig, qkv_bias=bool(hf["attention_bias"]), is_interleaved=True)


def _glm4(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _glm(hf, base).changed(SubLayerConfig, post_norm=True)


def _glm4_moe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """GLM-4.5: the first layers are dense."""
    config = base.changed(
        AttentionConfig,
        qkv_bias=bool(hf.get("attention_bias", False)),
        qk_norm="head" if hf.get("use_qk_norm", False) else "",
    )
    has_experts = [layer >= hf["first_k_dense_replace"] for layer in range(base.num_layers)]
    return with_corrected_experts(hf, config, has_experts)


FAMILIES: dict[str, Family] = {
    "cohere": Family(
        _cohere,
        NAMES,
        _COHERE_DEFAULTS | {"rope_theta": 5e5},
        architectures=("CohereForCausalLM",),
        fixed={"use_qk_norm": False},
        norm_eps="layer_norm_eps",
    ),
    "cohere2": Family(
        _cohere2,
        NAMES,
        _COHERE_DEFAULTS | {"sliding_window": 4096},
        architectures=("Cohere2ForCausalLM",),
        fixed={"use_qk_norm": False},
        norm_eps="layer_norm_eps",
    ),
    "ernie4_5": Family(
        _ernie,
        NAMES,
        _ERNIE_DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128},
        architectures=("Ernie4_5ForCausalLM",),
    ),
    "ernie4_5_moe": Family(
        _ernie_moe,
        NAMES | {"router_correction": "mlp.moe_statics.e_score_correction_bias"},
        _ERNIE_DEFAULTS
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
    "glm": Family(_glm, _GLM_NAMES, _GLM_DEFAULTS, architectures=("GlmForCausalLM",), ropes=partial_ropes),
    "glm4": Family(
        _glm4, _GLM4_NAMES, _GLM_DEFAULTS, architectures=("Glm4ForCausalLM",), ropes=partial_ropes
    ),
    "glm4_moe": Family(
        _glm4_moe,
        NAMES,
        ROUTED_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_mtp_layers": 1,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
        },
        architectures=("Glm4MoeForCausalLM",),
        ropes=partial_ropes,
    ),
}
