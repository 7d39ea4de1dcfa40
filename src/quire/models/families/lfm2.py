"""LFM2, also with experts: short convolutions, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config import ModelConfig
from quire.models.families.family import NAMES, Family, with_experts, with_mixers
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.short_conv import ShortConvConfig
from quire.models.ropes import HFConfig

_LFM2_NAMES = {
    "norm": "model.embedding_norm.weight",
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "o": "self_attn.out_proj",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
_OF_TRAINING = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
)  # fmt: skip


def _lfm2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    for name in _OF_TRAINING:  # or said elsewhere, too
        hf.get(name)
    return _with_convolutions(hf, base.changed(FeedForwardConfig, inner_size=_inner_size(hf)))


def _lfm2_moe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    experts, num_dense = hf.get("num_experts") or hf["num_local_experts"], hf["num_dense_layers"]
    return with_experts(
        _with_convolutions(hf, base),
        [layer >= num_dense for layer in range(base.num_layers)],
        num_experts=experts,
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["moe_intermediate_size"],
        normalize=bool(hf["norm_topk_prob"]),
        scale=float(hf["routed_scaling_factor"]),
        scoring="sigmoid",
        correction=(experts,) if hf["use_expert_bias"] else (),
    )


def _with_convolutions(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    conv = ShortConvConfig(size=base.hidden_size, num_taps=hf["conv_L_cache"], bias=bool(hf["conv_bias"]))
    layers = range(base.num_layers)
    attending = set(hf.get("full_attn_idxs", layers))
    types = hf.get("layer_types")
    if types is not None:
        attending = {layer for layer in layers if types[layer] != "conv"}
    config = base.changed(AttentionConfig, qk_norm="head")
    return replace(
        with_mixers(config, conv, [layer not in attending for layer in layers]),
        norm_eps=hf["norm_eps"],
        tie_word_embeddings=hf.get("tie_embedding", base.tie_word_embeddings),
    )


def _inner_size(hf: HFConfig) -> int:
    size, multiple = int(hf.get("block_ff_dim", hf["intermediate_size"])), int(hf["block_multiple_of"])
    adjusted = int(hf["block_ffn_dim_multiplier"] * (2 * size // 3))
    return -(-adjusted // multiple) * multiple if hf["block_auto_adjust_ff_dim"] else size


_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
}

FAMILIES: dict[str, Family] = {
    "lfm2": Family(
        _lfm2,
        NAMES | _LFM2_NAMES,
        {
            **_DEFAULTS,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
        architectures=("Lfm2ForCausalLM",),
        layer_types=("full_attention", "conv"),
    ),
    "lfm2_moe": Family(
        _lfm2_moe,
        NAMES
        | _LFM2_NAMES
        | {
            "router": "feed_forward.gate",
            "router_correction": "feed_forward.expert_bias",
            "expert_gate": "feed_forward.experts.{}.w1",
            "expert_up": "feed_forward.experts.{}.w3",
            "expert_down": "feed_forward.experts.{}.w2",
        },
        {
            **_DEFAULTS,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        architectures=("Lfm2MoeForCausalLM",),
        layer_types=("full_attention", "conv"),
    ),
}
