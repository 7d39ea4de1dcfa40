"""Qwen 2, 3, Next and 3.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config import ModelConfig
from quire.models.config_entries import SPLIT_PROJECTIONS
from quire.models.families.family import (
    NAMES,
    Family,
    layer_windows,
    read_delta_net,
    with_attention_biases,
    with_experts,
    with_mixers,
)
from quire.models.layers.attention import AttentionConfig
from quire.models.ropes import HFConfig, partial_ropes

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
    window = hf.get("sliding_window", 0) * hf.get("use_sliding_window", False)
    normed = with_attention_biases(hf, base).changed(AttentionConfig, qk_norm="head", window=window)
    return with_experts(
        normed,
        _sparse_layers(hf, base.num_layers),
        num_experts=hf.get("num_experts") or hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["moe_intermediate_size"],
        normalize=bool(hf.get("norm_topk_prob", False)),
    )


def _qwen3_5(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    delta_net = read_delta_net(hf)
    interval = hf.get("full_attention_interval", 4)
    layers = range(base.num_layers)
    types = hf.get("layer_types")
    is_full = [(i + 1) % interval == 0 if types is None else types[i] == "full_attention" for i in layers]
    gated = with_attention_biases(hf, base).changed(AttentionConfig, qk_norm="head", is_gated=True)
    return replace(with_mixers(gated, delta_net, [not full for full in is_full]), norm_offset=1.0)


def _qwen2_moe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    is_windowed = bool(hf.get("use_sliding_window", False))
    last = hf["max_window_layers"]
    windows = layer_windows(hf, lambda layer: layer % 2 == 0 and layer < last) if is_windowed else 0
    config = base.changed(AttentionConfig, qkv_bias=bool(hf.get("qkv_bias", True)), window=windows)
    normalize = bool(hf.get("norm_topk_prob", False))
    return _with_gated_shared_expert(hf, config, _sparse_layers(hf, base.num_layers), normalize=normalize)


def _qwen3_next(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    sparse, normalize = _sparse_layers(hf, base.num_layers), bool(hf.get("norm_topk_prob", True))
    config = _with_gated_shared_expert(hf, _qwen3_5(hf, base), sparse, normalize=normalize)
    return replace(config, family=_SPLIT) if hf.get(SPLIT_PROJECTIONS) else config


def _qwen3_5_moe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _with_gated_shared_expert(hf, _qwen3_5(hf, base), [True] * base.num_layers, normalize=True)


def _with_gated_shared_expert(
    hf: HFConfig, base: ModelConfig, has_experts: list[bool], *, normalize: bool
) -> ModelConfig:
    return with_experts(
        base,
        has_experts,
        shared_inner_size=hf["shared_expert_intermediate_size"],
        shared_gate=True,
        num_experts=hf.get("num_experts") or hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["moe_intermediate_size"],
        normalize=normalize,
    )


def _sparse_layers(hf: HFConfig, num_layers: int) -> list[bool]:
    """Return which layers have experts."""
    dense, step = set(hf.get("mlp_only_layers") or ()), hf.get("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


_SHARED_EXPERT_NAMES = NAMES | {
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
}
_QWEN3_5_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_5 = Family(
    _qwen3_5,
    NAMES,
    _QWEN3_5_DEFAULTS,
    architectures=("Qwen3_5ForCausalLM",),
    fixed={"attn_output_gate": True},
    model_type="qwen3_5_text",
    layer_types=("full_attention", "linear_attention"),
    ropes=partial_ropes,
)
_SPLIT = "qwen3_next_split"
_QWEN3_5_MOE_DEFAULTS = _QWEN3_5_DEFAULTS | {
    "num_key_value_heads": 2,
    "intermediate_size": 5632,  # of layers without experts
    "shared_expert_intermediate_size": 512,
}

_NEXT_NAMES = _SHARED_EXPERT_NAMES | {
    "delta_qkvz": "linear_attn.in_proj_qkvz",
    "delta_ba": "linear_attn.in_proj_ba",
}
_QWEN3_NEXT = replace(
    _QWEN3_5,
    specialize=_qwen3_next,
    weight_names=_NEXT_NAMES,
    defaults=_QWEN3_5_MOE_DEFAULTS,
    architectures=("Qwen3NextForCausalLM",),
    model_type="",
)

FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        _qwen2,
        NAMES,
        _QWEN_DEFAULTS,
        architectures=(
            "Qwen2ForCausalLM",
            "Qwen2Model",
            "Qwen2ForSequenceClassification",
            "Qwen2ForTokenClassification",
        ),
    ),
    "qwen3": Family(
        _qwen3,
        NAMES,
        _QWEN_DEFAULTS | {"head_dim": 128},
        architectures=(
            "Qwen3ForCausalLM",
            "Qwen3Model",
            "Qwen3ForSequenceClassification",
            "Qwen3ForTokenClassification",
        ),
    ),
    "qwen2_moe": Family(
        _qwen2_moe,
        _SHARED_EXPERT_NAMES,
        {
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "shared_expert_intermediate_size": 5632,
        },
        architectures=("Qwen2MoeForCausalLM",),
    ),
    "qwen3_moe": Family(
        _qwen3_moe,
        NAMES,
        {"num_key_value_heads": 4, "sliding_window": 4096},
        architectures=("Qwen3MoeForCausalLM",),
    ),
    "qwen3_next": _QWEN3_NEXT,
    _SPLIT: replace(
        _QWEN3_NEXT,
        weight_names={name: theirs for name, theirs in _NEXT_NAMES.items() if name != "delta_qkvz"},
        architectures=(),
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(
        _QWEN3_5,
        specialize=_qwen3_5_moe,
        weight_names=_SHARED_EXPERT_NAMES,
        defaults=_QWEN3_5_MOE_DEFAULTS,
        architectures=("Qwen3_5MoeForCausalLM",),
        model_type="qwen3_5_moe_text",
    ),
}
