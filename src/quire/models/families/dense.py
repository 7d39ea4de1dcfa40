"""Families of dense models, each a few fields away from Llama, and HunYuan's experts."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import (
    FOUR_NORM_NAMES,
    NAMES,
    Family,
    all_sliding,
    layer_windows,
    with_attention_biases,
    with_experts,
    with_parallel_blocks,
)
from quire.models.layer import SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.experts import ExpertsConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig, partial_ropes, read_rope


def _seed_oss(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    qkv_bias, output_bias = bool(hf["attention_bias"]), bool(hf.get("attention_out_bias", False))
    biased = base.changed(AttentionConfig, qkv_bias=qkv_bias, output_bias=output_bias)
    return biased.changed(FeedForwardConfig, bias=bool(hf.get("mlp_bias", False)))


def _exaone4(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """If there are windows, only layers with one are rotated.

    A pattern is the number of layers up to one without a window, or a text with a letter for each of them.
    """
    pattern = hf.get("sliding_window_pattern", 4)
    letters = pattern if isinstance(pattern, str) else "L" * (pattern - 1) + "G"
    windows = layer_windows(hf, lambda layer: letters[layer % len(letters)] == "L")
    [rope] = base.ropes
    ropes = [rope if window or not hf.get("sliding_window", 0) else None for window in windows]
    config = base.changed(SubLayerConfig, pre_norm=False, post_norm=True)
    return config.changed(AttentionConfig, qk_norm="head", window=windows, rope=ropes)


def _hunyuan(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return with_attention_biases(hf, base).changed(AttentionConfig, qk_norm="rotated_head")


def _hunyuan_moe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """How many experts a token has may differ by layer."""
    hf.get("moe_intermediate_size")  # published beside `intermediate_size`, and has no effect
    config = with_experts(
        _hunyuan(hf, base),
        [True] * base.num_layers,
        shared_inner_size=hf["intermediate_size"],
        num_experts=hf.get("num_experts") or hf.get("num_local_experts", 1),
        inner_size=hf["intermediate_size"],
        normalize=True,
    )
    chosen = hf.get("moe_topk") or hf.get("num_experts_per_tok", 1)
    return config.changed(ExpertsConfig, experts_per_token=chosen)


def _hunyuan_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, ...]:
    """Return frequencies whose base a fixed `alpha` stretches, if there is one beside the type dynamic."""
    values = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    alpha, theta = values.get("alpha"), values.get("rope_theta") or hf["rope_theta"]
    if alpha and "dynamic" in (values.get("rope_type"), values.get("type")):
        stretched = {"rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}
        hf = ChainMap({"rope_scaling": stretched}, hf)  # type: ignore[arg-type]
    return (read_rope(hf, head_dim),)


def _stablelm(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = base.changed(AttentionConfig, qkv_bias=bool(hf.get("use_qkv_bias", False)))
    config = with_parallel_blocks(config) if hf.get("use_parallel_residual") else config
    return replace(config, norm_kind="layer")


def _starcoder2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    bias = bool(hf["use_bias"])
    config = all_sliding(hf, base).changed(AttentionConfig, qkv_bias=bias, output_bias=bias)
    return replace(config.changed(FeedForwardConfig, gated=False, bias=bias), norm_kind="layer")


def _arcee(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    bias = bool(hf.get("mlp_bias", False))
    return with_attention_biases(hf, base).changed(FeedForwardConfig, gated=False, bias=bias)


def _apertus(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = with_attention_biases(hf, base).changed(FeedForwardConfig, gated=False)
    return config.changed(AttentionConfig, qk_norm="head")


_HUNYUAN_NAMES = NAMES | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}

FAMILIES: dict[str, Family] = {
    "seed_oss": Family(
        _seed_oss,
        NAMES,
        {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        architectures=("SeedOssForCausalLM",),
    ),
    "exaone4": Family(
        _exaone4,
        NAMES | FOUR_NORM_NAMES,
        {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        architectures=("Exaone4ForCausalLM",),
    ),
    "hunyuan_v1_dense": Family(
        _hunyuan,
        _HUNYUAN_NAMES,
        {"rms_norm_eps": 1e-5},
        architectures=("HunYuanDenseV1ForCausalLM",),
        ropes=_hunyuan_ropes,
    ),
    "hunyuan_v1_moe": Family(
        _hunyuan_moe,
        _HUNYUAN_NAMES
        | {
            "router": "mlp.gate.wg",
            "shared_gate": "mlp.shared_mlp.gate_proj",
            "shared_up": "mlp.shared_mlp.up_proj",
            "shared_down": "mlp.shared_mlp.down_proj",
        },
        {"rms_norm_eps": 1e-5},
        architectures=("HunYuanMoEV1ForCausalLM",),
        ropes=_hunyuan_ropes,
    ),
    "stablelm": Family(
        _stablelm,
        NAMES,
        {"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        architectures=("StableLmForCausalLM",),
        fixed={"qk_layernorm": False},
        norm_eps="layer_norm_eps",
        ropes=partial_ropes,
    ),
    "starcoder2": Family(
        _starcoder2,
        NAMES | {"up": "mlp.c_fc", "down": "mlp.c_proj"},
        {
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        architectures=("Starcoder2ForCausalLM",),
        norm_eps="norm_epsilon",
    ),
    "arcee": Family(
        _arcee,
        NAMES,
        {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        architectures=("ArceeForCausalLM",),
    ),
    "apertus": Family(
        _apertus,
        NAMES | {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        {
            "rms_norm_eps": 1e-5,
            "hidden_act": "xielu",
            "rope_theta": 1.2e7,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1.2e7,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        architectures=("ApertusForCausalLM",),
    ),
}
