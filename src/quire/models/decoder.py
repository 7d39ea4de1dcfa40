"""The one decoder: every family is this forward pass with other fields in its `ModelConfig`."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
import torch.nn.functional as F

from quire.kernels import dispatch as kernels
from quire.kernels.batch import AttentionBatch
from quire.kv.tensors import KVCacheTensors
from quire.models.config import NO_ROPE, ModelConfig
from quire.models.moe import mixture_of_experts
from quire.models.rotary import RotaryTable

Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [T, rotary_dim / 2] float32


@dataclasses.dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer; None where the family has none.

    Projections are [out, in]; norms are float32 and include the config's `norm_offset`.
    """

    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden], queries, then keys, then values
    attention_output: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    attention_output_bias: torch.Tensor | None = None
    attention_norm: torch.Tensor | None = None
    attention_post_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None  # [2 * intermediate, hidden], gate first
    gate_up_bias: torch.Tensor | None = None
    down: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    router: torch.Tensor | None = None
    expert_gate_up: torch.Tensor | None = None  # [experts, 2 * moe_intermediate, hidden]
    expert_down: torch.Tensor | None = None  # [experts, hidden, moe_intermediate]


class LayerHook(Protocol):
    """Is told of the layers of a forward pass, one after the other."""

    def before_layer(self, layer: int) -> None:
        """Nothing of this layer's KV has been read or written yet."""

    def after_attention(self, layer: int) -> None:
        """The step's KV of this layer is written, and nothing will read it again in this step."""


class Decoder:
    """A decoder-only transformer over plain tensors.

    Args:
        config: the model's numbers.
        embedding: [vocab, hidden].
        layers: the layers in order.
        norm: [hidden], the last norm, as in the layers.
        output: [vocab, hidden]; the embedding itself if the two are tied.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.output = output
        self._rotary = [RotaryTable(rope, config.max_model_len) for rope in config.ropes]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the hidden states."""
        return self.embedding.dtype

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVCacheTensors,
        batch: AttentionBatch,
        *,
        hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """Compute one step's tokens, writing their keys and values to the cache.

        Args:
            token_ids: [T] int64, in the batch's order.
            kv_cache: holds the keys and values of all earlier tokens of these sequences.
            batch: which tokens these are.
            hook: is told of each layer.

        Returns:
            [T, hidden], normalized and ready for `logits`.
        """
        hidden = F.embedding(token_ids, self.embedding)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=hidden.dtype)
        angles = [table.rows(batch.positions) for table in self._rotary]
        for index, layer in enumerate(self.layers):
            if hook is not None:
                hook.before_layer(index)
            hidden = self._attention(index, layer, hidden, angles=angles, kv_cache=kv_cache, batch=batch)
            if hook is not None:
                hook.after_attention(index)
            hidden = self._feed_forward(layer, hidden)
        return self._norm(hidden, self.norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, vocab] float32 of rows [R, hidden] of `forward`'s result."""
        logits = kernels.linear(hidden, self.output)
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        logits = logits.float()
        if self.config.logits_softcap:
            logits = torch.tanh(logits / self.config.logits_softcap) * self.config.logits_softcap
        return logits

    def _attention(
        self,
        index: int,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        *,
        angles: list[Angles],
        kv_cache: KVCacheTensors,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        config = self.config
        inputs = self._norm(hidden, layer.attention_norm)
        query, key, value = self._project(layer, inputs)
        rope = config.layer_ropes[index]
        if rope != NO_ROPE:
            query, key = (kernels.apply_rotary(states, *angles[rope]) for states in (query, key))
        key_blocks, value_blocks = kv_cache.layer(index)
        kernels.write_kv(key, value, key_blocks, value_blocks, batch)
        attended = kernels.paged_attention(
            query,
            key_blocks,
            value_blocks,
            batch,
            scale=config.attention_scale,
            window=config.sliding_windows[index],
            softcap=config.attention_softcap,
        )
        output = kernels.linear(attended.flatten(1), layer.attention_output, layer.attention_output_bias)
        return self._add(hidden, self._norm(output, layer.attention_post_norm))

    def _project(
        self, layer: DecoderLayer, inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim], normed if need be."""
        config = self.config
        key_start = config.num_heads * config.head_dim
        value_start = key_start + config.num_kv_heads * config.head_dim
        qkv = kernels.linear(inputs, layer.qkv, layer.qkv_bias)
        query, key, value = qkv[:, :key_start], qkv[:, key_start:value_start], qkv[:, value_start:]
        if config.qk_norm == "full":
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        query, key, value = (part.view(len(part), -1, config.head_dim) for part in (query, key, value))
        if config.qk_norm == "head":
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        return query, key, value

    def _feed_forward(self, layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
        inputs = self._norm(hidden, layer.mlp_norm)
        output = self._mlp(layer, inputs) if layer.router is None else self._experts(layer, inputs)
        return self._add(hidden, self._norm(output, layer.mlp_post_norm))

    def _mlp(self, layer: DecoderLayer, inputs: torch.Tensor) -> torch.Tensor:
        assert layer.gate_up is not None
        assert layer.down is not None
        gate_up = kernels.linear(inputs, layer.gate_up, layer.gate_up_bias)
        return kernels.linear(
            kernels.gated_activation(gate_up, self.config.activation), layer.down, layer.down_bias
        )

    def _experts(self, layer: DecoderLayer, inputs: torch.Tensor) -> torch.Tensor:
        assert layer.router is not None
        assert layer.expert_gate_up is not None
        assert layer.expert_down is not None
        return mixture_of_experts(
            inputs,
            layer.router,
            layer.expert_gate_up,
            layer.expert_down,
            experts_per_token=self.config.num_experts_per_token,
            normalize=self.config.normalize_expert_weights,
            activation=self.config.activation,
        )

    def _norm(self, states: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return states
        return kernels.rms_norm(states, weight, eps=self.config.norm_eps)

    def _add(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        scale = self.config.residual_scale
        return hidden + (output if scale == 1.0 else output * scale)
