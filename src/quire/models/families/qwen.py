"""Qwen 2 and 3."""

from __future__ import annotations

from typing import Any

from quire.models.config import ModelConfig
from quire.models.families.family import NAMES, Family, layer_windows, with_attention_biases, with_experts
from quire.models.layers.attention import AttentionConfig
from quire.models.ropes import HFConfig

_QWEN_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def _qwen2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    hf.get("attention_bias")  # these layers have biases if it is there in any form
    return base.changed(AttentionConfig, qkv_bias=True, window=_qwen_windows(hf))


def _qwen_windows(hf: HFConfig) -> list[int]:
    """Qwen2 and Qwen3: layers from `max_window_layers` on have the window, if `layer_types` is not there."""
    first_sliding = hf["max_window_layers"]
    windows = layer_windows(hf, lambda layer: bool(layer >= first_sliding))
    return windows if hf.get("use_sliding_window", False) else [0] * len(windows)


def _qwen3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    biased = with_attention_biases(hf, base)
    return biased.changed(AttentionConfig, qk_norm="head", window=_qwen_windows(hf))


def _qwen3_moe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    dense = set(hf.get("mlp_only_layers") or ())
    step = hf.get("decoder_sparse_step", 1)
    window = hf.get("sliding_window", 0) * hf.get("use_sliding_window", False)
    normed = with_attention_biases(hf, base).changed(AttentionConfig, qk_norm="head", window=window)
    return with_experts(
        normed,
        [layer not in dense and (layer + 1) % step == 0 for layer in range(base.num_layers)],
        num_experts=hf.get("num_experts") or hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["moe_intermediate_size"],
        normalize=bool(hf.get("norm_topk_prob", False)),
    )


FAMILIES: dict[str, Family] = {
    "qwen2": Family(_qwen2, NAMES, _QWEN_DEFAULTS, architectures=("Qwen2ForCausalLM",)),
    "qwen3": Family(_qwen3, NAMES, _QWEN_DEFAULTS | {"head_dim": 128}, architectures=("Qwen3ForCausalLM",)),
    "qwen3_moe": Family(
        _qwen3_moe,
        NAMES,
        {"num_key_value_heads": 4, "sliding_window": 4096},
        architectures=("Qwen3MoeForCausalLM",),
    ),
}
