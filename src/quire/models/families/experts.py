"""Families whose every layer has experts: gpt-oss and MiniMax-M2."""

from __future__ import annotations

from collections import ChainMap

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import NAMES, Family, layer_windows, with_attention_biases, with_experts
from quire.models.layers.attention import AttentionConfig
from quire.models.ropes import HFConfig, partial_ropes

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
}
