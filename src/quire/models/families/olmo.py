"""OLMo 2 and 3, with norms after the sub-layers, and OLMoE."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import (
    FOUR_NORM_NAMES,
    NAMES,
    Family,
    layer_windows,
    with_attention_biases,
    with_experts,
    with_two_ropes,
)
from quire.models.layer import SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.ropes import HFConfig, read_two_ropes


def _olmo2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = with_attention_biases(hf, base).changed(SubLayerConfig, pre_norm=False, post_norm=True)
    return config.changed(AttentionConfig, qk_norm="full")


def _olmo3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    windows = layer_windows(hf, lambda layer: (layer + 1) % 4 != 0)
    return with_two_ropes(_olmo2(hf, base), windows, _olmo3_ropes(hf, base.kv_specs[0].key_head_dim))


def _olmoe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    if hf.get("clip_qkv") is not None:
        raise ModelError(f"config.json has clip_qkv {hf['clip_qkv']}; clipping is not supported")
    return with_experts(
        with_attention_biases(hf, base).changed(AttentionConfig, qk_norm="full"),
        [True] * base.num_layers,
        num_experts=hf.get("num_experts") or hf["num_local_experts"],
        experts_per_token=hf.get("num_experts_per_tok", 8),
        inner_size=hf["intermediate_size"],
        normalize=bool(hf.get("norm_topk_prob", False)),
    )


def _olmo3_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    return read_two_ropes(hf, head_dim, sliding_theta=5e5)


FAMILIES: dict[str, Family] = {
    "olmoe": Family(_olmoe, NAMES, {"rms_norm_eps": 1e-5}, architectures=("OlmoeForCausalLM",)),
    "olmo2": Family(
        _olmo2, NAMES | FOUR_NORM_NAMES, {"rms_norm_eps": 1e-5}, architectures=("Olmo2ForCausalLM",)
    ),
    "olmo3": Family(
        _olmo3,
        NAMES | FOUR_NORM_NAMES,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        ropes=_olmo3_ropes,
        architectures=("Olmo3ForCausalLM",),
    ),
}
