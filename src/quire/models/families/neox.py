"""GPT-NeoX and Pythia: attention and feed-forward layer side by side, each behind a layer norm of its own."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import Family
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig, partial_ropes

_NAMES = {
    "embedding": "gpt_neox.embed_in.weight",
    "norm": "gpt_neox.final_layer_norm.weight",
    "output": "embed_out.weight",
    "layer": "gpt_neox.layers.{}.",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "qkv": "attention.query_key_value",
    "o": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}


def _neox(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    bias, is_parallel = bool(hf.get("attention_bias", True)), bool(hf.get("use_parallel_residual", True))
    config = base.changed(
        AttentionConfig,
        num_kv_heads=hf["num_attention_heads"],
        qkv_bias=bias,
        output_bias=bias,
        is_fused_by_group=True,
    ).changed(FeedForwardConfig, gated=False, bias=True, is_parallel=is_parallel)
    return replace(config, norm_kind="layer")


def _ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, ...]:
    beside = {"rope_theta": hf["rotary_emb_base"], "partial_rotary_factor": hf["rotary_pct"]}
    return partial_ropes(ChainMap(beside, hf), head_dim)  # type: ignore[arg-type]


FAMILIES: dict[str, Family] = {
    "gpt_neox": Family(
        _neox,
        _NAMES,
        {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_emb_base": 1e4, "rotary_pct": 0.25},
        architectures=("GPTNeoXForCausalLM",),
        norm_eps="layer_norm_eps",
        ropes=_ropes,
    ),
}
