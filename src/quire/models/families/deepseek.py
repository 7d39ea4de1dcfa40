"""Families with multi-head latent attention: DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.config_entries import MAX_LAYERS_TIMES_EXPERTS, warn_once
from quire.models.families.family import NAMES, Family, with_corrected_experts, with_routed_experts
from quire.models.layer import LayerConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.latent_attention import LatentAttentionConfig
from quire.models.ropes import HFConfig, read_rope, read_score_factor


def _rope(hf: HFConfig, head_dim: int) -> tuple[RopeConfig]:
    return (read_rope(hf, hf["qk_rope_head_dim"]),)


def _with_latents(hf: HFConfig, base: ModelConfig, *, is_interleaved: bool) -> ModelConfig:
    """Give every layer latent attention in place of attention with heads of keys and values."""
    heads = hf["num_attention_heads"]
    if hf.get("num_key_value_heads", heads) != heads:
        raise ModelError(
            f"config.json has num_key_value_heads {hf['num_key_value_heads']}; latent attention has as many "
            f"as num_attention_heads, {heads}"
        )
    if hf.get("attention_bias"):
        raise ModelError("config.json has attention_bias true, which is not supported in latent attention")
    if base.num_layers * heads > MAX_LAYERS_TIMES_EXPERTS:
        raise ModelError(
            f"{base.num_layers} layers of {heads} heads with latents exceed the limit of "
            f"{MAX_LAYERS_TIMES_EXPERTS} in total"
        )
    nope, rope = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    if hf.get("head_dim", rope) != rope:
        warn_once(f"config.json has head_dim {hf['head_dim']}, which has no effect beside qk_rope_head_dim")
    attention = LatentAttentionConfig(
        num_heads=heads,
        rope=base.ropes[0],
        scale=(nope + rope) ** -0.5 * read_score_factor(hf),
        q_lora_rank=hf.get("q_lora_rank", 0),
        kv_lora_rank=hf["kv_lora_rank"],
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=hf.get("v_head_dim") or hf["hidden_size"] // heads,
        is_interleaved=is_interleaved,
    )
    layers = (LayerConfig((attention, *layer.parts[1:])) for layer in base.layers)
    return replace(base, layers=tuple(layers))


def _check_scoring(hf: HFConfig, scoring: str) -> None:
    if hf.get("scoring_func", scoring) != scoring or hf.get("moe_layer_freq", 1) != 1:
        raise ModelError(
            f"config.json has scoring_func {hf.get('scoring_func')!r} and moe_layer_freq "
            f"{hf.get('moe_layer_freq')}; this architecture has {scoring!r} and 1"
        )


def _deepseek2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    if hf.get("norm_topk_prob"):
        raise ModelError("config.json has norm_topk_prob true, which DeepSeek V2 in transformers ignores")
    if hf.get("mlp_bias"):
        raise ModelError("config.json has mlp_bias true, which is not supported in DeepSeek V2")
    method = hf["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json has topk_method {method!r:.100}; known: greedy, group_limited_greedy")
    groups = {"num_groups": hf["n_group"], "groups_per_token": hf["topk_group"]} if method != "greedy" else {}
    has_experts = [layer >= hf["first_k_dense_replace"] for layer in range(base.num_layers)]
    config = _with_latents(hf, base, is_interleaved=True)
    _check_scoring(hf, "softmax")
    return with_routed_experts(hf, config, has_experts, **groups)


def _deepseek3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _like_deepseek3(
        hf, base, [layer >= hf["first_k_dense_replace"] for layer in range(base.num_layers)]
    )


def _glm4_lite(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    layers = range(base.num_layers)
    types = hf.get("mlp_layer_types") or ["sparse" if layer else "dense" for layer in layers]
    if not set(types) <= {"dense", "sparse"}:
        raise ModelError(f"config.json has mlp_layer_types {types!r:.100}; each must be dense or sparse")
    return _like_deepseek3(hf, base, [types[layer] == "sparse" for layer in layers])


def _like_deepseek3(hf: HFConfig, base: ModelConfig, has_experts: list[bool]) -> ModelConfig:
    config = _with_latents(hf, base, is_interleaved=bool(hf.get("rope_interleave", True)))
    _check_scoring(hf, "sigmoid")
    return with_corrected_experts(hf, config, has_experts)


def _minicpm3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = _with_latents(hf, base, is_interleaved=False)
    return replace(
        config.changed(FeedForwardConfig, bias=bool(hf.get("mlp_bias", False))),
        embedding_scale=hf["scale_emb"],
        residual_scale=hf.get("scale_depth", math.sqrt(base.num_layers)) / math.sqrt(base.num_layers),
        logits_divisor=base.hidden_size / hf.get("dim_model_base", base.hidden_size),
    )


_LATENT_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "norm_topk_prob": True,
}

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        _deepseek2,
        NAMES,
        _LATENT_DEFAULTS
        | {
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
        ropes=_rope,
        architectures=("DeepseekV2ForCausalLM",),
    ),
    "deepseek_v3": Family(
        _deepseek3,
        NAMES,
        _LATENT_DEFAULTS
        | {
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "num_mtp_layers": 1,
        },
        ropes=_rope,
        architectures=("DeepseekV3ForCausalLM",),
    ),
    "glm4_moe_lite": Family(
        _glm4_lite,
        NAMES,
        _LATENT_DEFAULTS
        | {
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
        },
        ropes=_rope,
        architectures=("Glm4MoeLiteForCausalLM",),
    ),
    "minicpm3": Family(
        _minicpm3,
        NAMES,
        {
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        ropes=_rope,
        architectures=("MiniCPM3ForCausalLM",),
    ),
}
