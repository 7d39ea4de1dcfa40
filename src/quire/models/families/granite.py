"""Granite: Llama with multipliers, its mixtures of experts, and Granite 4 with Mamba-2 in most layers."""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.config_entries import SPLIT_GATES
from quire.models.families.family import NAMES, Family, layer_windows, with_experts
from quire.models.families.llama import llama
from quire.models.families.mamba import DEFAULTS, MAMBA_TYPES, mamba_layers
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig

_MOE_NAMES = NAMES | {
    "router": "block_sparse_moe.router.layer",
    "expert_gate": "block_sparse_moe.experts.{}.gate_proj",
    "expert_up": "block_sparse_moe.experts.{}.up_proj",
    "expert_down": "block_sparse_moe.experts.{}.down_proj",
    "shared_gate": "shared_mlp.gate_proj",
    "shared_up": "shared_mlp.up_proj",
    "shared_gate_up": "shared_mlp.input_linear",
    "shared_down": "shared_mlp.output_linear",
}
_MULTIPLIERS = dict.fromkeys(
    ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)
_MOE_DEFAULTS = _MULTIPLIERS | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
}


def _granite(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = replace(
        llama(hf, base),
        embedding_scale=hf["embedding_multiplier"],
        residual_scale=hf["residual_multiplier"],
        logits_divisor=hf["logits_scaling"],
    )
    config = config.changed(FeedForwardConfig, has_split_gates=bool(hf.get(SPLIT_GATES)))
    return config.changed(AttentionConfig, scale=hf["attention_multiplier"])


def _granite_swa(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Layers may have a base of frequencies of their own; 0: they are not rotated."""
    [rope] = base.ropes
    bases = hf.get("layer_rope_theta") or [rope.theta] * base.num_layers
    return _granite(hf, base).changed(
        AttentionConfig,
        window=layer_windows(hf, lambda layer: layer % 4 != 0),
        rope=[replace(rope, theta=float(theta)) if theta else None for theta in bases],
        has_sinks=True,
    )


def _granitemoe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _with_experts(hf, _granite(hf, base))


def _granitemoehybrid(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Granite 4; without experts, what is beside them elsewhere is the feed-forward layer."""
    rotation = hf.get("position_embedding_type", "nope")
    if rotation not in ("rope", "nope"):
        raise ModelError(
            f"config.json has position_embedding_type {rotation!r:.100}; it must be rope or nope"
        )
    types = hf.get("layer_types") or ["mamba"] * base.num_layers
    config = mamba_layers(hf, _granite(hf, base), [kind in MAMBA_TYPES for kind in types])
    if rotation == "nope":
        config = config.changed(AttentionConfig, rope=None)
    if hf["num_local_experts"]:
        return _with_experts(hf, config)
    return config.changed(FeedForwardConfig, inner_size=hf["shared_intermediate_size"])


def _with_experts(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return with_experts(
        base,
        [True] * base.num_layers,
        shared_inner_size=hf["shared_intermediate_size"],
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["intermediate_size"],
        normalize=True,
    )


FAMILIES: dict[str, Family] = {
    "granite": Family(_granite, NAMES, _MULTIPLIERS, architectures=("GraniteForCausalLM",)),
    "granite_swa": Family(
        _granite_swa,
        NAMES,
        _MULTIPLIERS
        | {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
        architectures=("GraniteSWAForCausalLM",),
    ),
    "granitemoe": Family(_granitemoe, _MOE_NAMES, _MOE_DEFAULTS, architectures=("GraniteMoeForCausalLM",)),
    "granitemoeshared": Family(
        _granitemoe, _MOE_NAMES, _MOE_DEFAULTS, architectures=("GraniteMoeSharedForCausalLM",)
    ),
    "granitemoehybrid": Family(
        _granitemoehybrid,
        _MOE_NAMES
        | {
            name.removeprefix("shared_"): _MOE_NAMES[name]
            for name in _MOE_NAMES
            if name.startswith("shared_")
        },
        _MOE_DEFAULTS | DEFAULTS | {"shared_intermediate_size": 1024},
        architectures=("GraniteMoeHybridForCausalLM",),
        layer_types=("full_attention", "attention", *MAMBA_TYPES),
    ),
}
