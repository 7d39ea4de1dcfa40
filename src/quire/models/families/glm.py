"""GLM-4: pairs of features that lie side by side are rotated, in a half of each head; and GLM-4.5."""

from __future__ import annotations

from typing import Any

from quire.models.config import ModelConfig
from quire.models.families.family import NAMES, Family, with_corrected_experts
from quire.models.layer import SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.ropes import HFConfig, partial_ropes

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
    "glm": Family(_glm, _GLM_NAMES, _GLM_DEFAULTS, architectures=("GlmForCausalLM",), ropes=partial_ropes),
    "glm4": Family(
        _glm4, _GLM4_NAMES, _GLM_DEFAULTS, architectures=("Glm4ForCausalLM",), ropes=partial_ropes
    ),
    "glm4_moe": Family(
        _glm4_moe,
        NAMES,
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_mtp_layers": 1,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        architectures=("Glm4MoeForCausalLM",),
        ropes=partial_ropes,
    ),
}
