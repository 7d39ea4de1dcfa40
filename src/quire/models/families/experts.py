"""Families with experts in every layer, or all but the first: gpt-oss, MiniMax-M2 and MiMo-V2."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import (
    NAMES,
    Family,
    check_fixed,
    layer_windows,
    sparse_layers,
    with_attention_biases,
    with_corrected_experts,
    with_experts,
    with_two_ropes,
)
from quire.models.layers.attention import AttentionConfig
from quire.models.ropes import HFConfig, partial_ropes, read_partial_ropes

_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _gpt_oss(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    for name in ("experts_per_token", "initial_context_length"):
        hf.get(name)  # published, and has no effect
    for name, known in _SWIGLU.items():
        if hf[name] != known:
            raise ModelError(f"config.json has {name} {hf[name]!r:.100}; only {known} is computed")
    windows = layer_windows(hf, lambda layer: layer % 2 == 0)
    attention = with_attention_biases(hf, base).changed(AttentionConfig, window=windows, has_sinks=True)
    return with_experts(
        attention,
        [True] * base.num_layers,
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["intermediate_size"],
        normalize=True,
        bias=True,
        activation="clamped_swiglu",
    )


_MINIMAX_NAMES = NAMES | {
    "router": "block_sparse_moe.gate",
    "router_correction": "block_sparse_moe.e_score_correction_bias",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}


def _minimax_m2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    if not hf.get("use_qk_norm", True) or hf.get("qk_norm_type", "per_layer") != "per_layer":
        raise ModelError("config.json says other norms of queries and keys than one over all of them")
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or not hf.get("use_routing_bias", True):
        raise ModelError("config.json says another choice of experts than by corrected sigmoids")
    experts = hf.get("num_local_experts") or hf["num_experts"]
    return with_experts(
        base.changed(AttentionConfig, qk_norm="full"),
        [True] * base.num_layers,
        num_experts=experts,
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["intermediate_size"],
        normalize=True,
        scoring="sigmoid",
        correction=(experts,),
    )


def _minimax_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, ...]:
    """Return the frequencies; `rotary_dim` says how many features are rotated where nothing else does."""
    if hf.get("rotary_dim") is None:
        return partial_ropes(hf, head_dim)
    part = {"partial_rotary_factor": hf["rotary_dim"] / head_dim}
    return partial_ropes(ChainMap(hf, part), head_dim)  # type: ignore[arg-type]


# Frequencies, which published files have in these entries; those that count are in `rope_parameters`.
_BESIDE = {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334}


def _mimo_v2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Layers with a window have sinks, twice as many KV heads, and frequencies of their own."""
    hf.get("attention_chunk_size")  # published, and has no effect
    kv_heads = hf["num_key_value_heads"]
    _check_published(hf, kv_heads)
    window = hf["sliding_window"]
    if hf.get("sliding_window_size"):  # tokens before the one that sees them
        window = hf["sliding_window_size"] + 1
    hf = ChainMap({"sliding_window": window}, hf)  # type: ignore[arg-type]
    windows = layer_windows(hf, lambda layer: layer > 0 and (layer + 1) % 6 != 0)
    config = base.changed(
        AttentionConfig,
        num_kv_heads=[kv_heads * (2 if window else 1) for window in windows],
        value_dim=hf["v_head_dim"],
        has_sinks=[window > 0 for window in windows],
        qkv_bias=bool(hf.get("attention_bias", False)),
        output_scale=float(hf.get("attention_value_scale", 1.0)),
    )
    config = with_two_ropes(config, windows, _mimo_ropes(hf, base.kv_specs[0].key_head_dim))
    config = with_corrected_experts(hf, config, sparse_layers(hf, base.num_layers, num_dense=1))
    return replace(config, ignored_prefixes=(*config.ignored_prefixes, "model.mtp."))


def _mimo_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    full, sliding = ({"rope_theta": _BESIDE[name]} for name in ("rope_theta", "swa_rope_theta"))
    part = _BESIDE["partial_rotary_factor"]
    return read_partial_ropes(hf, head_dim, part, {"full_attention": full, "sliding_attention": sliding})


def _check_published(hf: HFConfig, kv_heads: int) -> None:
    """Refuse entries of published files that say otherwise than those that count."""
    layers = range(hf["num_hidden_layers"])
    known: dict[str, Any] = {
        **_BESIDE,
        "swa_num_attention_heads": hf["num_attention_heads"],
        "swa_num_key_value_heads": 2 * kv_heads,
        "swa_head_dim": hf["head_dim"],
        "swa_v_head_dim": hf["v_head_dim"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hybrid_layer_pattern": [int(layer > 0 and (layer + 1) % 6 != 0) for layer in layers],
        "moe_layer_freq": [int(layer > 0) for layer in layers],
    }
    check_fixed(hf, known)


FAMILIES: dict[str, Family] = {
    "gpt_oss": Family(
        _gpt_oss,
        NAMES | {"router": "mlp.router"},
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            **_SWIGLU,
        },
        architectures=("GptOssForCausalLM",),
    ),
    "minimax_m2": Family(
        _minimax_m2,
        _MINIMAX_NAMES,
        {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6},
        architectures=("MiniMaxM2ForCausalLM",),
        ropes=_minimax_ropes,
    ),
    "mimo_v2_flash": Family(
        _mimo_v2,
        NAMES | {"sinks": "self_attn.attention_sink_bias"},
        {
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
            **_BESIDE,
            "n_routed_experts": 256,
            "n_shared_experts": 0,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        aliases={"layernorm_epsilon": "rms_norm_eps"},
        ropes=_mimo_ropes,
        architectures=("MiMoV2FlashForCausalLM",),
    ),
}
