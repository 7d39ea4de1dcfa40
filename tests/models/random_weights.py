"""Checkpoints of random weights for models that no library knows, and their logits in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from quire.models.config import ModelConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.rotary import inverse_frequencies
from quire.models.weights import weight_specs

Tensors = dict[str, torch.Tensor]
Mixer = Callable[[torch.Tensor, Tensors], torch.Tensor]


def write_weights(config: ModelConfig, directory: Path) -> Tensors:
    """Write a checkpoint of `config` with random weights; return its tensors by name."""
    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for spec in weight_specs(config):
        for source in spec.sources:
            values = torch.randn(source.shape, generator=generator)
            is_norm = len(source.shape) == 1
            tensors[source.name] = 1 + 0.2 * values if is_norm else values * 1.5 / source.shape[1] ** 0.5
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"architectures": [config.architecture]}))
    return tensors


def rms_norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(states: torch.Tensor, config: AttentionConfig) -> torch.Tensor:
    """Return [T, heads, features] rotated by their positions."""
    if config.rope is None:
        return states
    half = config.rope.rotary_dim // 2
    angles = torch.arange(len(states))[:, None, None] * inverse_frequencies(config.rope, 0)
    first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class PlainModel:
    """The logits of a whole sequence, layer by layer, without a cache."""

    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        self.config = config
        self.tensors = tensors
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.mixers: dict[type, Mixer] = {FeedForwardConfig: self.feed_forward}

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return [T, vocab]."""
        hidden = self.tensors["model.embed_tokens.weight"][token_ids]
        for index, layer in enumerate(self.config.layers):
            prefix = f"model.layers.{index}."
            own = {
                name.removeprefix(prefix).removesuffix(".weight"): tensor
                for name, tensor in self.tensors.items()
                if name.startswith(prefix)
            }
            for part, norm in zip(layer.parts, ("input_layernorm", "post_attention_layernorm"), strict=True):
                rows = rms_norm(hidden, own[norm])
                if isinstance(part, AttentionConfig):
                    hidden = hidden + self.attention(index, part, rows, own)
                else:
                    hidden = hidden + self.mixers[type(part)](rows, own)
        return rms_norm(hidden, self.tensors["model.norm.weight"]) @ self.tensors["lm_head.weight"].T

    def feed_forward(self, rows: torch.Tensor, own: Tensors) -> torch.Tensor:
        inner = F.silu(rows @ own["mlp.gate_proj"].T) * (rows @ own["mlp.up_proj"].T)
        return inner @ own["mlp.down_proj"].T

    def attention(
        self, index: int, config: AttentionConfig, rows: torch.Tensor, own: Tensors
    ) -> torch.Tensor:
        def heads(name: str, size: int) -> torch.Tensor:
            states = (rows @ own[f"self_attn.{name}_proj"].T).view(len(rows), -1, size)
            return (
                rms_norm(states, own[f"self_attn.{name}_norm"]) if f"self_attn.{name}_norm" in own else states
            )

        if config.kv_source is None:
            values = rows @ own[f"self_attn.{'k' if config.value_norm == 'key' else 'v'}_proj"].T
            values = values.view(len(rows), -1, config.value_size)
            if config.value_norm:
                values = rms_norm(values, torch.ones(config.value_size))
            self.kv[index] = rotate(heads("k", config.head_dim), config), values
        query = rotate(heads("q", config.head_dim), config)
        keys, values = self.kv[index if config.kv_source is None else config.kv_source]
        keys, values = (each.repeat_interleave(config.group, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * config.scale
        distance = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
        is_seen = (distance >= 0) & ((distance < config.window) if config.window else True)
        if config.is_chunked:
            chunk = torch.arange(len(rows)) // config.window
            is_seen &= chunk[:, None] == chunk
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1) @ own["self_attn.o_proj"].T
