"""Families with experts in every layer, or all but the first: gpt-oss, MiniMax-M2 and MiMo-V2."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any

from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import (
    NAMES,
    NUMBERED_EXPERT_NAMES,
    ROUTED_DEFAULTS,
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


def _gpt_oss(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    for name in ("experts_per_token", "initial_context_length"):
        hf.get(name)  # published, and has no effect
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


def _minimax_m2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
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
    _check_windows(hf, kv_heads)
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


def _check_windows(hf: HFConfig, kv_heads: int) -> None:
    """Refuse entries of published files that say otherwise than those that count."""
    layers = range(hf["num_hidden_layers"])
    known: dict[str, Any] = {
        "swa_num_attention_heads": hf["num_attention_heads"],
        "swa_num_key_value_heads": 2 * kv_heads,
        "swa_head_dim": hf["head_dim"],
        "swa_v_head_dim": hf["v_head_dim"],
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
        },
        fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        architectures=("GptOssForCausalLM",),
    ),
    "minimax_m2": Family(
        _minimax_m2,
        NAMES | NUMBERED_EXPERT_NAMES | {"router_correction": "block_sparse_moe.e_score_correction_bias"},
        {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6},
        fixed={
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",  # over all of a layer's
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
        architectures=("MiniMaxM2ForCausalLM",),
        ropes=_minimax_ropes,
    ),
    "mimo_v2_flash": Family(
        _mimo_v2,
        NAMES | {"sinks": "self_attn.attention_sink_bias"},
        ROUTED_DEFAULTS
        | _BESIDE
        | {
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
            "n_routed_experts": 256,
            "n_shared_experts": 0,
            "moe_intermediate_size": 2048,
        },
        fixed=_BESIDE
        | {
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        aliases={"layernorm_epsilon": "rms_norm_eps"},
        ropes=_mimo_ropes,
        architectures=("MiMoV2FlashForCausalLM",),
    ),
}
