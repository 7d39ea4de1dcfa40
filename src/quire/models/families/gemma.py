"""Gemma 1 to 4."""

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
    by_layer,
    layer_windows,
    two_sided,
    with_attention_biases,
    with_two_ropes,
)
from quire.models.layer import LayerConfig, SubLayerConfig
from quire.models.layers import per_layer
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.dense_and_experts import DenseAndExpertsConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.per_layer import PerLayerConfig
from quire.models.ropes import HFConfig, read_proportional_ropes, read_two_ropes

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
    ropes = _gemma3_ropes(hf, base.kv_specs[0].key_head_dim)
    if not hf.get("use_bidirectional_attention"):
        return with_two_ropes(normed, windows, ropes)
    halves = [window and window // 2 + 1 for window in windows]  # of what is seen on each side, and itself
    return with_two_ropes(two_sided(normed), halves, ropes)


def _gemma3_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    return read_two_ropes(hf, head_dim, sliding_theta=hf["rope_local_base_freq"])


def _gemma4(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = replace(
        with_attention_biases(hf, base),
        embedding_scale=math.sqrt(base.hidden_size),
        logits_softcap=hf.get("final_logit_softcapping", 0.0),
    )
    config = config.changed(AttentionConfig, scale=1.0, qk_norm="head", value_norm="value")
    config = _with_heads_by_type(hf, config.changed(SubLayerConfig, post_norm=True))
    return _with_shared_kv(hf, config).changed(FeedForwardConfig, scales_stream=True)


def _gemma4_of_text(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = _gemma4(hf, base)
    if hf["enable_moe_block"]:
        config = _with_experts_beside(hf, config)
    size = hf.get("hidden_size_per_layer_input", 0)
    if not size:
        return config
    if hf["vocab_size_per_layer_input"] < base.vocab_size:
        raise ModelError(
            f"config.json has vocab_size_per_layer_input {hf['vocab_size_per_layer_input']}; there must be a "
            f"row for each of vocab_size {base.vocab_size} tokens"
        )
    own = PerLayerConfig(size=size, pre_norm=False, post_norm=True, scales_stream=True)
    own = replace(own, activation=_feed_forward(base.layers[0]).activation)
    layers = (
        LayerConfig((*layer.parts, own))
        for layer in config.changed(SubLayerConfig, scales_stream=False).layers
    )
    return replace(
        config,
        layers=tuple(layers),
        per_layer_size=size,
        per_layer_dtype=hf.get("per_layer_embedding_dtype", base.dtype),
        per_layer_vocab_size=hf["vocab_size_per_layer_input"],
    )


def _feed_forward(layer: LayerConfig) -> FeedForwardConfig:
    (found,) = (part for part in layer.parts if isinstance(part, FeedForwardConfig))
    return found


def _with_experts_beside(hf: HFConfig, config: ModelConfig) -> ModelConfig:
    """Give each layer experts beside its feed-forward layer, to which the norms in between belong."""

    def changed(layer: LayerConfig) -> LayerConfig:
        dense = _feed_forward(layer)
        both = DenseAndExpertsConfig(
            num_experts=hf["num_experts"],
            experts_per_token=hf["top_k_experts"],
            inner_size=hf["moe_intermediate_size"],
            normalize=True,
            has_expert_scales=True,
            activation=dense.activation,
            dense=replace(dense, pre_norm=False, post_norm=False, scales_stream=False),
            post_norm=True,
            scales_stream=True,
        )
        return LayerConfig((layer.parts[0], both))

    return replace(config, layers=tuple(map(changed, config.layers)))


def _gemma4_windows(hf: HFConfig) -> list[int]:
    layers = hf["num_hidden_layers"]
    return layer_windows(hf, lambda layer: (layer + 1) % 6 != 0 and layer + 1 < layers)


def _gemma4_heads(hf: HFConfig) -> tuple[list[int], list[int]]:
    """Return the size of heads of each layer, and the number of those with keys and values.

    In published files, full layers have other entries; in those that `transformers` writes, each layer may.
    """
    is_full = [not window for window in _gemma4_windows(hf)]
    sizes, counts = hf["head_dim"], hf["num_key_value_heads"]
    if hf.get("per_layer_config"):
        return by_layer(hf, "head_dim", sizes), by_layer(hf, "num_key_value_heads", counts)
    full_count = hf.get("num_global_key_value_heads", counts) if hf["attention_k_eq_v"] else counts
    return (
        [hf["global_head_dim"] if full else sizes for full in is_full],
        [full_count if full else counts for full in is_full],
    )


def _gemma4_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    windows, sizes = _gemma4_windows(hf), _gemma4_heads(hf)[0]
    of_type = [
        {size for size, window in zip(sizes, windows, strict=True) if bool(window) == slides} or {head_dim}
        for slides in (False, True)
    ]
    if any(len(each) > 1 for each in of_type):
        raise ModelError(
            f"config.json has heads of {sorted(set(sizes))!r:.100} features, more than one size in a type of "
            "layers"
        )
    return read_proportional_ropes(hf, min(of_type[0]), min(of_type[1]))


def _with_heads_by_type(hf: HFConfig, config: ModelConfig) -> ModelConfig:
    windows = _gemma4_windows(hf)
    head_dims, kv_heads = _gemma4_heads(hf)
    config = with_two_ropes(config, windows, _gemma4_ropes(hf, hf["head_dim"]))
    value_norms = ["value" if window or not hf["attention_k_eq_v"] else "key" for window in windows]
    return config.changed(AttentionConfig, head_dim=head_dims, num_kv_heads=kv_heads, value_norm=value_norms)


def _with_shared_kv(hf: HFConfig, config: ModelConfig) -> ModelConfig:
    """Let the last layers read the keys and values of the last one before them that is of their type."""
    windows, num_shared = _gemma4_windows(hf), hf["num_kv_shared_layers"]
    first = config.num_layers - num_shared
    own = windows[: max(first, 0)]
    if not set(windows[len(own) :]) <= set(own):
        raise ModelError(
            f"config.json has num_kv_shared_layers {num_shared} of {config.num_layers} layers, which leaves "
            "none with keys and values of its own for layers of some type to read"
        )
    sources = [len(own) - 1 - own[::-1].index(window) for window in windows[first:]]
    of_shared = [f"model.layers.{layer}.self_attn." for layer in range(first, config.num_layers)]
    ignored = [
        f"{prefix}{name}." for prefix in of_shared for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    inner_size = hf["intermediate_size"]
    return replace(
        config.changed(AttentionConfig, kv_source=[None] * first + sources).changed(
            FeedForwardConfig,
            inner_size=[inner_size] * first + [inner_size * (1 + hf["use_double_wide_mlp"])] * num_shared,
        ),
        ignored_prefixes=tuple(ignored),
    )


_GEMMA4_NAMES = {
    **NAMES,
    **FOUR_NORM_NAMES,
    "stream_scale": "layer_scalar",
    per_layer.EMBEDDING: "model.embed_tokens_per_layer.weight",
    per_layer.PROJECTION: "model.per_layer_model_projection.weight",
    per_layer.NORM: "model.per_layer_projection_norm.weight",
}
_GEMMA4_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}

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
        architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
        may_look_ahead=True,
    ),
    "gemma4": Family(
        _gemma4_of_text,
        _GEMMA4_NAMES,
        _GEMMA4_DEFAULTS | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
        activation="hidden_activation",
        model_type="gemma4_text",
        ropes=_gemma4_ropes,
        architectures=("Gemma4ForCausalLM",),
        layer_entries=("head_dim", "num_key_value_heads"),
    ),
    "gemma4_unified": Family(
        _gemma4,
        _GEMMA4_NAMES,
        _GEMMA4_DEFAULTS | {"sliding_window": 1024},
        activation="hidden_activation",
        model_type="gemma4_unified_text",
        ropes=_gemma4_ropes,
        architectures=("Gemma4UnifiedForCausalLM",),
        layer_entries=("head_dim", "num_key_value_heads"),
    ),
}
