"""GPT-2, GPT-BigCode (StarCoder), GPT-NeoX with Pythia, Falcon: layer norms, one matrix for all heads."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.config_entries import warn_once
from quire.models.families.family import Family, four_times_as_wide, with_parallel_blocks
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig, partial_ropes

_GPT2_NAMES = {
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
_GPT2_ALIASES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
_GPT2_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def _gpt2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
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


_NEOX_NAMES = {
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


def _neox_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, ...]:
    beside = {"rope_theta": hf["rotary_emb_base"], "partial_rotary_factor": hf["rotary_pct"]}
    return partial_ropes(ChainMap(beside, hf), head_dim)  # type: ignore[arg-type]


_TWO_NORMS = "falcon_two_norms"
_FALCON_NAMES = {
    "embedding": "transformer.word_embeddings.weight",
    "norm": "transformer.ln_f.weight",
    "output": "lm_head.weight",
    "layer": "transformer.h.{}.",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_FALCON_ALIASES = {"n_embed": "hidden_size", "ffn_hidden_size": "intermediate_size"}
_FALCON_DEFAULTS: Mapping[str, Any] = {
    "activation": "gelu",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def _falcon(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    heads, is_new = hf["num_attention_heads"], bool(hf.get("new_decoder_architecture"))
    shared = 1 if hf.get("multi_query", True) else heads
    kv_heads = hf.get("num_kv_heads", heads)
    if not is_new and kv_heads not in (shared, heads):
        warn_once(f"config.json has num_kv_heads {kv_heads}, which has no effect in old Falcon models")
    bias, is_parallel = bool(hf.get("bias")), bool(hf.get("parallel_attn", True))
    num_norms = hf.get("num_ln_in_parallel_attn", 2 if is_new else 1)
    if (num_norms == 2 and not is_new) or (is_new and not is_parallel):
        raise ModelError(
            f"config.json has num_ln_in_parallel_attn {num_norms} and parallel_attn {is_parallel} beside "
            f"new_decoder_architecture {is_new}, which make no Falcon"
        )
    config = base.changed(
        AttentionConfig,
        num_kv_heads=kv_heads if is_new else shared,
        qkv_bias=bias,
        output_bias=bias,
        is_fused_by_group=True,
    ).changed(FeedForwardConfig, gated=False, bias=bias)
    if num_norms == 2:
        config = replace(config.changed(FeedForwardConfig, is_parallel=True), family=_TWO_NORMS)
    elif is_parallel:
        config = with_parallel_blocks(config)
    return replace(config, norm_kind="layer")


_FALCON = Family(
    _falcon,
    _FALCON_NAMES,
    _FALCON_DEFAULTS,
    architectures=("FalconForCausalLM",),
    fixed={"alibi": False},
    activation="activation",
    norm_eps="layer_norm_epsilon",
    aliases=_FALCON_ALIASES,
    derived=four_times_as_wide,
)


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _gpt2,
        _GPT2_NAMES,
        _GPT2_DEFAULTS | {"activation_function": "gelu_new"},
        architectures=("GPT2LMHeadModel",),
        fixed={"add_cross_attention": False},
        activation="activation_function",
        norm_eps="layer_norm_epsilon",
        aliases=_GPT2_ALIASES,
        derived=four_times_as_wide,
    ),
    "gpt_bigcode": Family(
        _gpt_bigcode,
        _GPT2_NAMES,
        _GPT2_DEFAULTS | {"activation_function": "gelu_pytorch_tanh"},
        architectures=("GPTBigCodeForCausalLM",),
        fixed={"add_cross_attention": False},
        activation="activation_function",
        norm_eps="layer_norm_epsilon",
        aliases=_GPT2_ALIASES,
        derived=four_times_as_wide,
    ),
    "gpt_neox": Family(
        _neox,
        _NEOX_NAMES,
        {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_emb_base": 1e4, "rotary_pct": 0.25},
        architectures=("GPTNeoXForCausalLM",),
        norm_eps="layer_norm_eps",
        ropes=_neox_ropes,
    ),
    "falcon": _FALCON,
    _TWO_NORMS: replace(
        _FALCON,
        weight_names=_FALCON_NAMES | {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"},
        architectures=(),
    ),
}
