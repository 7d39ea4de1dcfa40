"""GPT-2 and GPT-BigCode (StarCoder): learned vectors of positions, layer norms, one matrix for all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.families.family import Family, four_times_as_wide
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig

_NAMES = {
    "embedding": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "norm": "transformer.ln_f.weight",
    "output": "lm_head.weight",
    "layer": "transformer.h.{}.",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "qkv": "attn.c_attn",
    "o": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_ALIASES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def _gpt2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    if hf.get("add_cross_attention"):
        raise ModelError("config.json has add_cross_attention true; attention to an encoder is not supported")
    head_dim = base.kv_specs[0].key_head_dim
    scale = head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
    by_layer = bool(hf.get("scale_attn_by_inverse_layer_idx"))
    config = base.changed(
        AttentionConfig,
        num_kv_heads=hf["num_attention_heads"],
        rope=None,
        scale=[scale / (layer + 1 if by_layer else 1) for layer in range(base.num_layers)],
        qkv_bias=True,
        output_bias=True,
    ).changed(FeedForwardConfig, gated=False, bias=True)
    return replace(config, norm_kind="layer", learned_positions=hf["max_position_embeddings"])


def _gpt_bigcode(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Heads have keys and values of their own, side by side with their queries, or all share one of each."""
    kv_heads = 1 if hf.get("multi_query", True) else hf["num_attention_heads"]
    return _gpt2(hf, base).changed(AttentionConfig, num_kv_heads=kv_heads, is_fused_by_group=True)


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _gpt2,
        _NAMES,
        _DEFAULTS | {"activation_function": "gelu_new"},
        architectures=("GPT2LMHeadModel",),
        activation="activation_function",
        norm_eps="layer_norm_epsilon",
        aliases=_ALIASES,
        derived=four_times_as_wide,
    ),
    "gpt_bigcode": Family(
        _gpt_bigcode,
        _NAMES,
        _DEFAULTS | {"activation_function": "gelu_pytorch_tanh"},
        architectures=("GPTBigCodeForCausalLM",),
        activation="activation_function",
        norm_eps="layer_norm_epsilon",
        aliases=_ALIASES,
        derived=four_times_as_wide,
    ),
}
