"""Cohere's Command: attention and feed-forward layer side by side, behind one layer norm without bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.families.family import (
    NAMES,
    Family,
    layer_windows,
    with_attention_biases,
    with_parallel_blocks,
)
from quire.models.layers.attention import AttentionConfig
from quire.models.ropes import HFConfig

_COHERE_DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}


def _cohere(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    if hf.get("use_qk_norm"):
        raise ModelError("config.json has use_qk_norm; norms of queries and keys are not supported in Cohere")
    parallel = with_parallel_blocks(with_attention_biases(hf, base))
    config = parallel.changed(AttentionConfig, is_interleaved=True)
    return replace(config, norm_kind="layer_without_bias", logits_divisor=1 / hf["logit_scale"])


def _cohere2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Only layers with a window are rotated."""
    pattern = hf.get("sliding_window_pattern", 4)
    windows = layer_windows(hf, lambda layer: (layer + 1) % pattern != 0)
    [rope] = base.ropes
    ropes = [rope if window else None for window in windows]
    return _cohere(hf, base).changed(AttentionConfig, window=windows, rope=ropes)


FAMILIES: dict[str, Family] = {
    "cohere": Family(
        _cohere,
        NAMES,
        _COHERE_DEFAULTS | {"rope_theta": 5e5},
        architectures=("CohereForCausalLM",),
        norm_eps="layer_norm_eps",
    ),
    "cohere2": Family(
        _cohere2,
        NAMES,
        _COHERE_DEFAULTS | {"sliding_window": 4096},
        architectures=("Cohere2ForCausalLM",),
        norm_eps="layer_norm_eps",
    ),
}
