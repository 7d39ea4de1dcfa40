"""Gemma 1 to 3."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import (
    FOUR_NORM_NAMES,
    NAMES,
    Family,
    layer_windows,
    with_attention_biases,
    with_two_ropes,
)
from quire.models.layer import SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig, read_two_ropes

_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}


def _gemma(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    hf.get("hidden_activation")  # published beside the other, and has no effect
    config = _like_gemma(hf, base)
    if hf["hidden_act"] == "gelu":  # in old files, that means the tanh form
        return config.changed(FeedForwardConfig, activation="gelu_tanh")
    return config


def _like_gemma(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(
        with_attention_biases(hf, base), norm_offset=1.0, embedding_scale=math.sqrt(base.hidden_size)
    )


def _gemma2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    hf.get("hidden_act")  # published beside the other, and has no effect
    config = replace(_like_gemma(hf, base), logits_softcap=hf.get("final_logit_softcapping", 0.0))
    return config.changed(SubLayerConfig, post_norm=True).changed(
        AttentionConfig,
        scale=hf["query_pre_attn_scalar"] ** -0.5,
        softcap=hf.get("attn_logit_softcapping", 0.0),
        window=layer_windows(hf, lambda layer: layer % 2 == 0),
    )


def _gemma3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    if hf.get("attn_logit_softcapping"):
        raise ModelError("config.json has attn_logit_softcapping, which Gemma 3 in transformers ignores")
    pattern = hf.get("sliding_window_pattern", 6)
    normed = _gemma2(hf, base).changed(AttentionConfig, qk_norm="head")
    windows = layer_windows(hf, lambda layer: (layer + 1) % pattern != 0)
    return with_two_ropes(normed, windows, _gemma3_ropes(hf, base.kv_specs[0].key_head_dim))


def _gemma3_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    return read_two_ropes(hf, head_dim, sliding_theta=hf["rope_local_base_freq"])


FAMILIES: dict[str, Family] = {
    "gemma": Family(
        _gemma,
        NAMES,
        _GEMMA_DEFAULTS | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
        architectures=("GemmaForCausalLM",),
    ),
    "gemma2": Family(
        _gemma2,
        NAMES | FOUR_NORM_NAMES,
        _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        activation="hidden_activation",
        architectures=("Gemma2ForCausalLM",),
    ),
    "gemma3": Family(
        _gemma3,
        NAMES | FOUR_NORM_NAMES,
        _GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        activation="hidden_activation",
        model_type="gemma3_text",
        ropes=_gemma3_ropes,
        architectures=("Gemma3ForCausalLM",),
    ),
}
