"""Phi 1 to 2, Phi-3.5-MoE, and Phi 3 and 4."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import (
    NAMES,
    NUMBERED_EXPERT_NAMES,
    Family,
    all_sliding,
    with_attention_biases,
    with_experts,
    with_parallel_blocks,
)
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig, partial_ropes, read_longrope, read_rope

_PHI_NAMES = NAMES | {
    "norm": "model.final_layernorm.weight",
    "o": "self_attn.dense",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
_PHI3_NAMES = NAMES | {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}


def _phi(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    biased = base.changed(AttentionConfig, qkv_bias=True, output_bias=True)
    parallel = with_parallel_blocks(biased.changed(FeedForwardConfig, gated=False, bias=True))
    return replace(parallel, norm_kind="layer", output_bias=True)


def _phimoe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = with_experts(
        all_sliding(hf, with_attention_biases(hf, base)),
        [True] * base.num_layers,
        num_experts=hf["num_local_experts"],
        experts_per_token=2,
        inner_size=hf["intermediate_size"],
        scoring="sparsemixer",
        jitter=float(hf["router_jitter_noise"]),
    )
    return replace(config, norm_kind="layer", output_bias=bool(hf.get("lm_head_bias", False)))


def _phimoe_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, ...]:
    """Return those of longrope whose factor on cosines and sines is given, for short and long contexts."""
    scaling = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    short, long = scaling.pop("short_mscale", None), scaling.pop("long_mscale", None)
    if short != long:
        raise ModelError(f"config.json has short_mscale {short} and long_mscale {long}; they must be equal")
    if long is not None:
        scaling["attention_factor"] = long
    return (read_rope(ChainMap({"rope_scaling": scaling}, hf), head_dim),)  # type: ignore[arg-type]


FAMILIES: dict[str, Family] = {
    "phi": Family(
        _phi,
        _PHI_NAMES,
        {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        architectures=("PhiForCausalLM",),
        fixed={"qk_layernorm": False},
        norm_eps="layer_norm_eps",
        ropes=partial_ropes,
    ),
    "phi3": Family(
        all_sliding,
        _PHI3_NAMES,
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        architectures=("Phi3ForCausalLM",),
        ropes=lambda hf, head_dim: (read_longrope(hf, head_dim),),
    ),
    "phimoe": Family(
        _phimoe,
        NAMES | NUMBERED_EXPERT_NAMES,
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_jitter_noise": 0.01},
        architectures=("PhimoeForCausalLM",),
        fixed={"num_experts_per_tok": 2},
        ropes=_phimoe_ropes,
    ),
}
