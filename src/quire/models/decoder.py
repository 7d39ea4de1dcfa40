"""The one decoder: every family is this forward pass with other fields in its `ModelConfig`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, Self

import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.tiles import HeadLayout, Int64Array
from quire.kernels.interface import KernelSet
from quire.kernels.layers.experts import Experts
from quire.kernels.layers.gated_linear import GatedLinear
from quire.kernels.layers.linear import Linear
from quire.kv.cache.paged_cache import PagedAttentionCache
from quire.models.config import NO_ROPE, ModelConfig
from quire.models.embedding import Embedding
from quire.models.parallel import TensorParallel
from quire.models.rotary import RotaryTable
from quire.models.workspace import StepBuffers, Workspace

Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [T, rotary_dim / 2] float32


@dataclasses.dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer; None where the family has none.

    Norms are float32 and include the config's `norm_offset`.
    """

    qkv: Linear  # to (heads + 2 * kv_heads) * head_dim: queries, then keys, then values
    attention_output: Linear
    attention_norm: torch.Tensor | None = None
    attention_post_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    gate_up: GatedLinear | None = None  # to the intermediate features
    down: Linear | None = None
    router: Linear | None = None
    experts: Experts | None = None

    @property
    def kind(self) -> Hashable:
        """Equal for layers of equal parts, see `Linear.kind`."""
        parts = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return tuple(part.kind if isinstance(part, Linear | GatedLinear) else type(part) for part in parts)


class LayerHook(Protocol):
    """Is told of the layers of a forward pass, one after the other."""

    def before_layer(self, layer: int) -> None:
        """Nothing of this layer's KV has been read or written yet."""

    def after_attention(self, layer: int) -> None:
        """The step's KV of this layer is written, and nothing will read it again in this step."""


class Decoder:
    """A decoder-only transformer, on the device of its kernels.

    Args:
        config: the model's numbers; a rank's own, see `Shard.model`.
        embedding: of all token ids; a rank's share of them.
        layers: the layers in order.
        norm: [hidden], the last norm, as in the layers.
        output: from the hidden states to the vocabulary.
        kernels: compute everything that is not a matrix product.
        parallel: the ranks that compute this model together, each with its shard; None: there is one.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        output: Linear,
        kernels: KernelSet,
        parallel: TensorParallel | None = None,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.output = output
        self.kernels = kernels
        self._parallel = parallel
        self._heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim)
        device = kernels.device
        self._rotary = [RotaryTable(rope, config.max_model_len, device) for rope in config.ropes]
        keeps_products = any(layer.gate_up and layer.gate_up.keeps_products for layer in layers)
        self._workspace = Workspace(config, embedding.dtype, device, keeps_products=keeps_products)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states."""
        return self.embedding.dtype

    def reserve(self, num_tokens: int) -> None:
        """Allocate what steps of up to `num_tokens` tokens need, so that its addresses stay the same."""
        self._workspace.step(num_tokens)
        nowhere = torch.zeros(0, dtype=torch.int64, device=self.kernels.device)
        for table in self._rotary:
            table.rows(nowhere, last=self.config.max_model_len)

    def whole_step(
        self, batch: AttentionBatch, logit_rows: Int64Array | None
    ) -> AbstractContextManager[Self]:
        """Return what computes a step and the logits of some of its tokens: this decoder, alone."""
        return nullcontext(self)

    def agree(self, *, is_recorded: bool) -> bool:
        """Return whether all ranks have recorded a step: there is one."""
        return is_recorded

    def compile_only(self) -> AbstractContextManager[None] | None:
        """See `KernelSet.compile_only`."""
        return self.kernels.compile_only()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: PagedAttentionCache,
        batch: AttentionBatch,
        *,
        hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """Compute one step's tokens, writing their keys and values to the cache.

        Nobody waits for the device in here, nor in `logits`, unless the kernels' `experts` do.

        Args:
            token_ids: [T] int64, in the batch's order and on the device.
            kv_cache: holds the keys and values of all earlier tokens of these sequences.
            batch: which tokens these are.
            hook: is told of each layer.

        Returns:
            [T, hidden] on the device, normalized and ready for `logits`; the next step overwrites it.
        """
        hidden = self._embed(token_ids)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=hidden.dtype)
        positions, last = batch.positions_on(self.kernels.device), batch.last_position
        angles = [table.rows(positions, last=last) for table in self._rotary]
        buffers = self._workspace.step(len(token_ids))
        inputs = self._first_norm(hidden, buffers)
        only_compiles = self.kernels.compiles_only and hook is None
        for index in self._different_layers if only_compiles else range(len(self.layers)):
            layer = self.layers[index]
            if hook is not None:
                hook.before_layer(index)
            delta = self._attention(index, layer, inputs, buffers, angles, kv_cache.views[index], batch)
            if hook is not None:
                hook.after_attention(index)
            inputs = self._add(hidden, delta, layer.attention_post_norm, layer.mlp_norm, buffers)
            delta = self._feed_forward(layer, inputs, buffers)
            inputs = self._add(hidden, delta, layer.mlp_post_norm, self._norm_after(index), buffers)
        return inputs

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, vocab] float32 of rows [R, hidden] of `forward`'s result.

        They are on the device, in a buffer that the next call overwrites.
        """
        logits = self.output(hidden, out=self._workspace.logits(len(hidden)))
        if self.config.logits_divisor != 1.0:
            logits /= self.config.logits_divisor
        if self.config.logits_softcap:
            cap = self.config.logits_softcap
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._parallel is None:
            return self.embedding(token_ids)
        return self._parallel.embed(token_ids, self.embedding, self.config.vocab_size)

    @functools.cached_property
    def _different_layers(self) -> list[int]:
        """The first layer of each kind that kernels are compiled for; the same on all ranks."""
        first: dict[Hashable, int] = {}
        for index, layer in enumerate(self.layers):
            of_config = self.config.sliding_windows[index], self.config.layer_ropes[index]
            first.setdefault((layer.kind, of_config, type(self._norm_after(index))), index)
        return list(first.values())

    def _first_norm(self, hidden: torch.Tensor, buffers: StepBuffers) -> torch.Tensor:
        norm = self.layers[0].attention_norm if self.layers else self.norm
        if norm is None:
            return hidden
        return self.kernels.rms_norm(hidden, norm, eps=self.config.norm_eps, out=buffers.normed)

    def _norm_after(self, index: int) -> torch.Tensor | None:
        """Return the norm that takes what layer `index` leaves."""
        return self.layers[index + 1].attention_norm if index + 1 < len(self.layers) else self.norm

    def _attention(  # noqa: PLR0917 - one call site, on the hot path
        self,
        index: int,
        layer: DecoderLayer,
        inputs: torch.Tensor,
        buffers: StepBuffers,
        angles: list[Angles],
        kv: KVLayer,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        config = self.config
        rope = config.layer_ropes[index]
        cos, sin = (None, None) if rope == NO_ROPE else angles[rope]
        query = self.kernels.rotary_and_write_kv(
            layer.qkv(inputs, out=buffers.qkv),
            kv,
            batch,
            heads=self._heads,
            cos=cos,
            sin=sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.norm_eps,
        )
        attended = self.kernels.paged_attention(
            query,
            kv,
            batch,
            scale=config.attention_scale,
            window=config.sliding_windows[index],
            softcap=config.attention_softcap,
            out=buffers.attended,
        )
        return layer.attention_output(attended.flatten(1), out=buffers.delta)

    def _feed_forward(self, layer: DecoderLayer, inputs: torch.Tensor, buffers: StepBuffers) -> torch.Tensor:
        if layer.router is not None:
            assert layer.experts is not None
            return layer.experts(inputs, layer.router(inputs), out=buffers.delta)
        assert layer.gate_up is not None
        assert layer.down is not None
        inner = layer.gate_up(inputs, products=buffers.gate_up, out=buffers.inner)
        return layer.down(inner, out=buffers.delta)

    def _add(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor,
        post_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
        buffers: StepBuffers,
    ) -> torch.Tensor:
        """Add a sub-layer's result to the residual stream; return what the next sub-layer takes."""
        config = self.config
        if post_norm is not None:
            delta = self.kernels.rms_norm(delta, post_norm, eps=config.norm_eps, out=buffers.delta)
        return self.kernels.add_rms_norm(
            hidden, delta, next_norm, eps=config.norm_eps, scale=config.residual_scale, out=buffers.normed
        )
