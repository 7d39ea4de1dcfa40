"""Families with multi-head latent attention: DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3, Kimi Linear."""

from __future__ import annotations

import math
from collections import ChainMap
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.config_entries import MAX_LAYERS_TIMES_EXPERTS, RULES, Entries, warn_once
from quire.models.families.family import (
    NAMES,
    NUMBERED_EXPERT_NAMES,
    ROUTED_DEFAULTS,
    Family,
    check_fixed,
    read_delta_net,
    sparse_layers,
    with_corrected_experts,
    with_mixers,
    with_routed_experts,
)
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.latent_attention import LatentAttentionConfig
from quire.models.ropes import HFConfig, read_rope, read_score_factor


def _rope(hf: HFConfig, head_dim: int) -> tuple[RopeConfig]:
    return (read_rope(hf, hf["qk_rope_head_dim"]),)


def _with_latents(hf: HFConfig, base: ModelConfig, *, is_interleaved: bool) -> ModelConfig:
    """Give every layer latent attention in place of attention with heads of keys and values."""
    heads = hf["num_attention_heads"]
    check_fixed(hf, {"num_key_value_heads": heads})
    if base.num_layers * heads > MAX_LAYERS_TIMES_EXPERTS:
        raise ModelError(
            f"{base.num_layers} layers of {heads} heads with latents exceed the limit of "
            f"{MAX_LAYERS_TIMES_EXPERTS} in total"
        )
    nope, rope = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    if hf.get("head_dim", rope) not in (rope, hf["hidden_size"] // heads):
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
    return with_mixers(base, attention, [True] * base.num_layers)


def _deepseek2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    method = hf["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json has topk_method {method!r:.100}; known: greedy, group_limited_greedy")
    groups = {"num_groups": hf["n_group"], "groups_per_token": hf["topk_group"]} if method != "greedy" else {}
    has_experts = [layer >= hf["first_k_dense_replace"] for layer in range(base.num_layers)]
    config = _with_latents(hf, base, is_interleaved=True)
    return with_routed_experts(hf, config, has_experts, **groups)


def _deepseek3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _like_deepseek3(
        hf, base, [layer >= hf["first_k_dense_replace"] for layer in range(base.num_layers)]
    )


def _glm4_lite(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _like_deepseek3(hf, base, sparse_layers(hf, base.num_layers, num_dense=1))


def _like_deepseek3(hf: HFConfig, base: ModelConfig, has_experts: list[bool]) -> ModelConfig:
    config = _with_latents(hf, base, is_interleaved=bool(hf.get("rope_interleave", True)))
    return with_corrected_experts(hf, config, has_experts)


def _kimi_linear(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Kimi's delta attention in most layers, and latent attention without rotation in the others."""
    published = {_LINEAR_NAMES.get(name, name): value for name, value in hf["linear_attn_config"].items()}
    linear: ChainMap[str, Any] = ChainMap(Entries(published, rules=RULES), hf)  # type: ignore[arg-type]
    heads, head_dim = linear["linear_num_heads"], linear["linear_head_dim"]
    usual = {
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), head_dim),
    }
    delta_net = read_delta_net(ChainMap(usual, linear), gate_rank=head_dim)
    types = hf.get("layer_types") or _kimi_layer_types(linear, base.num_layers)
    sparse = sparse_layers(hf, base.num_layers, num_dense=hf["first_k_dense_replace"])
    config = _like_deepseek3(hf, base, sparse).changed(LatentAttentionConfig, rope=None)
    return with_mixers(config, delta_net, [kind != "full_attention" for kind in types])


def _kimi_layer_types(linear: HFConfig, num_layers: int) -> list[str]:
    """Return the types by the layers' numbers, which are counted from 1."""
    usual = [layer + 1 for layer in range(4, num_layers, 4)]
    full, others = linear.get("full_attn_layers", usual), linear.get("kda_layers")
    if others is not None and sorted([*full, *others]) != [layer + 1 for layer in range(num_layers)]:
        raise ModelError(
            f"config.json has full_attn_layers {full!r:.100} and kda_layers {others!r:.100}; together they "
            f"must be the numbers from 1 to {num_layers}"
        )
    return ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(num_layers)]


def _minicpm3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = _with_latents(hf, base, is_interleaved=False)
    return replace(
        config.changed(FeedForwardConfig, bias=bool(hf.get("mlp_bias", False))),
        embedding_scale=hf["scale_emb"],
        residual_scale=hf.get("scale_depth", math.sqrt(base.num_layers)) / math.sqrt(base.num_layers),
        logits_divisor=base.hidden_size / hf.get("dim_model_base", base.hidden_size),
    )


_LINEAR_NAMES = {  # entries of `linear_attn_config` by the names that they have outside it
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_KIMI_NAMES = {
    **NAMES,
    **NUMBERED_EXPERT_NAMES,
    **{f"delta_{name}": f"self_attn.{name}_proj" for name in "qkvb"},
    **{f"delta_{name}_conv": f"self_attn.{name}_conv1d" for name in "qkv"},
    "delta_a": "self_attn.f_a_proj",
    "delta_times": "self_attn.f_b_proj",
    "delta_z": "self_attn.g_a_proj",
    "delta_gate": "self_attn.g_b_proj",
    "delta_parameters": "self_attn",
    "delta_norm": "self_attn.o_norm",
    "delta_out": "self_attn.o_proj",
    "router_correction": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"shared_{name}": f"block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
_KIMI_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_FIXED = {"attention_bias": False}
_FIXED_OF_V2 = _FIXED | {
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
    "mlp_bias": False,
    "norm_topk_prob": False,  # transformers does not normalize, whatever it says
}
_FIXED_OF_V3 = _FIXED | {"scoring_func": "sigmoid", "moe_layer_freq": 1}
_LATENT_DEFAULTS: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_V3_DEFAULTS = _LATENT_DEFAULTS | ROUTED_DEFAULTS

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
        fixed=_FIXED_OF_V2,
        architectures=("DeepseekV2ForCausalLM",),
    ),
    "deepseek_v3": Family(
        _deepseek3,
        NAMES,
        _V3_DEFAULTS
        | {
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "num_mtp_layers": 1,
        },
        ropes=_rope,
        fixed=_FIXED_OF_V3,
        architectures=("DeepseekV3ForCausalLM",),
    ),
    "glm4_moe_lite": Family(
        _glm4_lite,
        NAMES,
        _V3_DEFAULTS
        | {
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
        },
        ropes=_rope,
        fixed=_FIXED_OF_V3,
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
        fixed=_FIXED,
        architectures=("MiniCPM3ForCausalLM",),
    ),
    "kimi_linear": Family(
        _kimi_linear,
        _KIMI_NAMES,
        _V3_DEFAULTS
        | {
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "linear_attn_config": {},
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
        ropes=_rope,
        fixed=_FIXED_OF_V3 | {"mla_use_nope": True},
        aliases=_KIMI_ALIASES,
        architectures=("KimiLinearForCausalLM",),
        layer_types=("full_attention", "linear_attention"),
    ),
}
