"""The decoder of all families: one loop over layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, Self

import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.devices.device import HOST, to_device
from quire.kernels.interface import KernelSet
from quire.kernels.layers.linear import Linear
from quire.models.config import ModelConfig
from quire.models.embedding import Embedding
from quire.models.layer import Norm, Step, SubLayer
from quire.models.layers.per_layer import PerLayerInputs
from quire.models.parallel import TensorParallel
from quire.models.rotary import RotaryTable
from quire.models.row_layers import DenseRows
from quire.step import Int64Array

Layer = tuple[SubLayer, ...]  # its sub-layers, in order
_NO_NORM = None, None  # weight and bias


class LayerHook(Protocol):
    """Hooks for the layers of a forward pass that write KV, in order."""

    def before_layer(self, layer: int) -> None:
        """Nothing of this layer's KV has been read or written yet."""

    def after_attention(self, layer: int) -> None:
        """The step's KV of this layer is written."""


class Decoder:
    """A decoder-only transformer, on the device of its kernels.

    Args:
        config: the model's numbers; a rank's own, see `Shard.model`.
        embedding: of all token ids; a rank's share of them.
        layers: the layers in order.
        norm: the last norm; None: there is none.
        output: from the hidden states to the vocabulary; None: they are pooled.
        per_layer: makes what each layer gets of the tokens by itself; None: nothing.
        kernels: compute everything that is not a matrix product.
        parallel: the ranks that compute this model together, each with its shard; None: there is one.
        positions: [types, positions, hidden], of the embeddings' type, added to them; None: nothing.
        embedding_norm: of the sum; None: there is none.
        row_layers: what pooled rows go through, on the host.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        norm: Norm | None,
        output: Linear | None,
        per_layer: PerLayerInputs | None = None,
        kernels: KernelSet,
        parallel: TensorParallel | None = None,
        positions: torch.Tensor | None = None,
        embedding_norm: Norm | None = None,
        row_layers: Sequence[DenseRows] = (),
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.output = output
        self.per_layer = per_layer
        self.kernels = kernels
        self._parallel = parallel
        self._learned_positions = positions
        self._embedding_norm = embedding_norm
        self._keeps_embeddings = any(part.reads_embeddings for part in config.parts)
        self.row_layers = row_layers
        device = kernels.device
        self._rotary = [RotaryTable(rope, config.max_model_len, device) for rope in config.ropes]
        parts = [part for layer in layers for part in layer]
        hidden_rows = dict.fromkeys(("decoder normed", "decoder delta"), (config.hidden_size,))
        shapes: list[Mapping[str, tuple[int, ...]]] = [hidden_rows, *(part.buffers for part in parts)]
        self._workspace = Workspace(shapes, embedding.dtype, device)
        self._logits = torch.empty(0, config.vocab_size, device=device)
        norms = [*(part.pre_norm for part in parts), norm]
        self._first_norm, next_norms = norms[0], iter(norms[1:])
        are_parallel = iter([*(part.is_parallel for part in config.parts), False][1:])
        numbers = iter(range(1, len(shapes)))
        self._layers = [
            [
                _PartStep(
                    part,
                    next(next_norms),
                    next(are_parallel),
                    next(numbers),
                    None if own.kv is None else index,
                    config.residual_scale * own.output_scale,
                )
                for part, own in zip(layer, config.layers[index].parts, strict=True)
            ]
            for index, layer in enumerate(layers)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states."""
        return self.embedding.dtype

    @property
    def finds_largest_logits(self) -> bool:
        """Whether `logits` may take less time where only the largest are wanted."""
        return self.output is not None and self.output.finds_largest

    def reserve(self, num_tokens: int) -> None:
        """Allocate what steps of up to `num_tokens` tokens need, so that its addresses stay the same."""
        self._workspace.step(num_tokens)
        if self.kernels.device == HOST:
            return
        nowhere = torch.zeros(0, dtype=torch.int64, device=self.kernels.device)
        for table in self._rotary:
            table.rows(nowhere, last=self.config.max_model_len)

    def whole_step(
        self, batch: AttentionBatch, logit_rows: Int64Array | None
    ) -> AbstractContextManager[Self]:
        """Return what computes a step and the logits of some of its tokens: this decoder, alone."""
        return nullcontext(self)

    def agree(self, *, is_captured: bool) -> bool:
        """Return whether all ranks have captured a step: there is one."""
        return is_captured

    def compile_only(self) -> AbstractContextManager[None] | None:
        """See `KernelSet.compile_only`."""
        return self.kernels.compile_only()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        kv: Sequence[KVLayer],
        batch: AttentionBatch,
        *,
        hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """Compute one step's tokens, writing their keys and values to the cache.

        Neither this nor `logits` waits for the device, unless the kernels' `experts` do.

        Args:
            token_ids: [T] int64, in the batch's order and on the device.
            kv: of each layer; holds the keys and values of all earlier tokens of these sequences that it
                sees.
            batch: which tokens these are.
            hook: is called at each layer that writes KV.

        Returns:
            [T, hidden] on the device, normalized and ready for `logits`; the next step overwrites it.
        """
        positions = batch.positions_on(self.kernels.device)
        hidden = self._begun_stream(token_ids, positions, batch.token_types)
        rotary = [table.of_step(batch) for table in self._rotary]
        angles, scales = [(cos, sin) for cos, sin, _ in rotary], [scale for _, _, scale in rotary]
        per_layer = None if self.per_layer is None else self.per_layer(token_ids, hidden)
        embeddings = hidden.clone() if self._keeps_embeddings else None
        step = Step((batch, *batch.others), angles, scales, kv, per_layer, embeddings)
        buffers = self._workspace.step(len(token_ids))
        normed, out = buffers[0].values()
        kernels, eps = self.kernels, self.config.norm_eps
        inputs = hidden
        if self._first_norm is not None:
            weight, bias = self._first_norm
            inputs = kernels.rms_norm(hidden, weight, bias=bias, eps=eps, out=normed)
        only_compiles = kernels.compiles_only and hook is None
        for layer in self._different_layers if only_compiles else self._layers:
            for part, next_norm, next_is_parallel, number, kv_layer, scale in layer:
                if hook is not None and kv_layer is not None:
                    hook.before_layer(kv_layer)
                delta = part.forward(inputs, step, buffers[number], out)
                if hook is not None and kv_layer is not None:
                    hook.after_attention(kv_layer)
                if part.post_norm is not None:
                    weight, bias = part.post_norm
                    delta = kernels.rms_norm(delta, weight, bias=bias, eps=eps, out=out)
                following, bias = next_norm or _NO_NORM
                if part.stream_norm is not None:
                    weight, bias = part.stream_norm
                    inputs = kernels.add_rms_norm(
                        hidden, delta, weight, bias=bias, eps=eps, scale=scale, out=normed
                    )
                    hidden, normed = inputs, hidden
                elif part.stream_scale is not None:
                    kernels.add_rms_norm(hidden, delta, None, eps=eps, scale=scale)
                    inputs = hidden.mul_(part.stream_scale)
                    if following is not None:
                        inputs = kernels.rms_norm(hidden, following, bias=bias, eps=eps, out=normed)
                elif not next_is_parallel:
                    inputs = kernels.add_rms_norm(
                        hidden, delta, following, bias=bias, eps=eps, scale=scale, out=normed
                    )
                else:
                    if following is not None:
                        inputs = kernels.rms_norm(hidden, following, bias=bias, eps=eps, out=normed)
                    kernels.add_rms_norm(hidden, delta, None, eps=eps, scale=scale)
        return inputs

    def _begun_stream(
        self, token_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what the residual stream begins with, [T, hidden]."""
        hidden = self._embed(token_ids)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=hidden.dtype)
        if self._learned_positions is not None:
            if token_types is None:
                learned = self._learned_positions[0].index_select(0, positions)
            else:
                learned = self._learned_positions[to_device(token_types, positions.device), positions]
            self.kernels.add_rms_norm(hidden, learned, None, eps=self.config.norm_eps)
        if self._embedding_norm is not None:
            weight, bias = self._embedding_norm
            self.kernels.rms_norm(hidden, weight, bias=bias, eps=self.config.norm_eps, out=hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, num_largest: torch.Tensor | int | None = None) -> torch.Tensor:
        """Return the logits [R, vocab] float32 of rows [R, hidden] of `forward`'s result.

        They are on the device, in a buffer that the next call overwrites.

        Args:
            hidden: the rows.
            num_largest: see `Linear.largest`; only where that is what this model finds. None: all.
        """
        assert self.output is not None, "the hidden states of this model are pooled"
        if len(hidden) > len(self._logits):
            self._logits = self._logits.new_empty(len(hidden), self.config.vocab_size)
        logits = self._logits[: len(hidden)]
        if num_largest is None:
            self.output(hidden, out=logits)
        else:
            self.output.largest(hidden, num_largest, out=logits)
        if self.config.logits_divisor != 1.0:
            logits /= self.config.logits_divisor
        if self.config.logits_softcap:
            logits = self.kernels.soft_cap(logits, self.config.logits_softcap)
        return logits

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._parallel is None:
            return self.embedding(token_ids)
        return self._parallel.embed(token_ids, self.embedding, self.config.vocab_size)

    @functools.cached_property
    def _different_layers(self) -> list[list[_PartStep]]:
        """The first layer of each kind that kernels are compiled for; the same on all ranks."""
        first: dict[Hashable, list[_PartStep]] = {}
        for layer in self._layers:
            first.setdefault(tuple((step.part.kind, type(step.next_norm)) for step in layer), layer)
        return list(first.values())


class _PartStep(NamedTuple):
    """A sub-layer's part of a forward pass."""

    part: SubLayer
    next_norm: Norm | None  # of the sum that its result is added to, or of the residual stream before that
    next_is_parallel: bool  # the next sub-layer reads what is there before its result is added
    number: int  # of its buffers
    kv_layer: int | None  # whose KV it writes
    scale: float  # of its result


Buffers = Mapping[str, torch.Tensor]


class Workspace:
    """Buffers for intermediate results of a forward pass; they grow to the largest step so far.

    Args:
        shapes: names and shapes, for each token, of the buffers of each user. Those of one name share memory.
        dtype: of the hidden states.
        device: whose memory the buffers are in.
    """

    def __init__(
        self, shapes: Sequence[Mapping[str, tuple[int, ...]]], dtype: torch.dtype, device: torch.device
    ) -> None:
        different = {tuple(each.items()): each for each in shapes}
        self._shapes = list(different.values())
        self._number_of = [list(different).index(tuple(each.items())) for each in shapes]
        self._dtype = dtype
        self._device = device
        self._capacity = 0
        self._memory: dict[str, torch.Tensor] = {}
        self._current: tuple[int, list[Buffers]] = 0, []

    def step(self, num_tokens: int) -> list[Buffers]:
        """Return the buffers of a step, [num_tokens, *shape], for each user; equal steps get the same."""
        if num_tokens > self._capacity:
            self._allocate(num_tokens)
        if self._current[0] != num_tokens or not self._current[1]:
            made = [
                {
                    name: self._memory[name][: num_tokens * math.prod(shape)].view(num_tokens, *shape)
                    for name, shape in shapes.items()
                }
                for shapes in self._shapes
            ]
            self._current = num_tokens, [made[number] for number in self._number_of]
        return self._current[1]

    def _allocate(self, num_tokens: int) -> None:
        sizes: dict[str, int] = {}
        for shapes in self._shapes:
            for name, shape in shapes.items():
                sizes[name] = max(sizes.get(name, 0), num_tokens * math.prod(shape))
        self._memory = {
            name: torch.empty(size, dtype=self._dtype, device=self._device) for name, size in sizes.items()
        }
        self._capacity = num_tokens
        self._current = 0, []
