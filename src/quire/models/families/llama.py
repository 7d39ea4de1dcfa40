"""Llama, also the fourth, and families that differ from it in a few numbers."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import (
    NAMES,
    NUMBERED_EXPERT_NAMES,
    Family,
    all_sliding,
    layer_windows,
    with_attention_biases,
    with_experts,
)
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig, read_rope_of_scaled_queries


def llama(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Llama's biases, which other families have, too."""
    return with_attention_biases(hf, base).changed(FeedForwardConfig, bias=bool(hf.get("mlp_bias", False)))


def _mixtral(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return with_experts(
        all_sliding(hf, base),
        [True] * base.num_layers,
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["intermediate_size"],
        normalize=True,
    )


def _rotated_layers(hf: HFConfig, num_layers: int) -> list[bool]:
    """Return which layers have rotary embedding: `no_rope_layers` says it with 1, despite its name."""
    interval = hf.get("no_rope_layer_interval", 4)
    return hf.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]


def _smollm3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    has_rope = _rotated_layers(hf, base.num_layers)
    is_windowed = bool(hf.get("use_sliding_window", False))
    [rope] = base.ropes
    return llama(hf, base).changed(
        AttentionConfig,
        rope=[rope if has_rope[layer] else None for layer in range(base.num_layers)],
        window=layer_windows(hf, lambda layer: is_windowed and not has_rope[layer]),
    )


def _llama4(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    step, moe_layers = hf["interleave_moe_layer_step"], hf.get("moe_layers")
    with_ones = range(step - 1, base.num_layers, step) if moe_layers is None else moe_layers
    config = with_attention_biases(hf, _llama4_attention(hf, base))
    return with_experts(
        config.changed(FeedForwardConfig, inner_size=hf["intermediate_size_mlp"]),
        [layer in with_ones for layer in range(base.num_layers)],
        shared_inner_size=hf["intermediate_size"],
        num_experts=hf["num_local_experts"],
        experts_per_token=1,
        inner_size=hf["intermediate_size"],
        normalize=True,
        scales_inputs=True,
    )


def _llama4_attention(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Layers that are rotated attend in chunks; in the others, queries may grow with their position."""
    [rope], layers, is_rotated = base.ropes, range(base.num_layers), _rotated_layers(hf, base.num_layers)
    types = hf.get("layer_types") or ["chunked_attention" if is_rotated[layer] else "" for layer in layers]
    chunk, has_norms = hf.get("attention_chunk_size", 0), hf["use_qk_norm"]
    windows = [chunk if types[layer] == "chunked_attention" else 0 for layer in layers]
    if has_norms and rope.attention_factor != 1:
        raise ModelError(
            f"config.json has use_qk_norm and rotations with the factor {rope.attention_factor}, which norms "
            "behind them undo; that is not supported"
        )
    beta, length = float(hf["attn_scale"]), hf["floor_scale"]
    scales = RopeConfig(rotary_dim=0, original_max_len=length, query_beta=beta, query_offset=1)
    others = scales if hf["attn_temperature_tuning"] else None
    return base.changed(
        AttentionConfig,
        rope=[rope if is_rotated[layer] else others for layer in layers],
        is_interleaved=True,
        qk_norm=["unweighted" if has_norms and is_rotated[layer] else "" for layer in layers],
        window=windows,
        is_chunked=[window > 0 for window in windows],
    )


_LLAMA4_NAMES = NAMES | {
    "router": "feed_forward.router",
    **{name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    **{f"expert_{name}": f"feed_forward.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
    **{f"shared_{name}": f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        llama,
        NAMES,
        architectures=(
            "LlamaForCausalLM",
            "LlamaModel",
            "LlamaForSequenceClassification",
            "LlamaForTokenClassification",
        ),
    ),
    "llama4": Family(
        _llama4,
        _LLAMA4_NAMES,
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        fixed={"num_experts_per_tok": 1},
        model_type="llama4_text",
        layer_types=("full_attention", "chunked_attention"),
        architectures=("Llama4ForCausalLM",),
    ),
    "mistral": Family(
        all_sliding,
        NAMES,
        {"num_key_value_heads": 8, "sliding_window": 4096},
        architectures=(
            "MistralForCausalLM",
            "MistralModel",
            "MistralForSequenceClassification",
            "MistralForTokenClassification",
        ),
    ),
    "ministral3": Family(
        all_sliding,
        NAMES,
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        ropes=lambda hf, head_dim: (read_rope_of_scaled_queries(hf, head_dim),),
        architectures=("Ministral3ForCausalLM",),
    ),
    "mixtral": Family(
        _mixtral,
        NAMES | NUMBERED_EXPERT_NAMES,
        {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        architectures=("MixtralForCausalLM",),
    ),
    "smollm3": Family(
        _smollm3,
        NAMES,
        {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
        architectures=("SmolLM3ForCausalLM",),
    ),
}
