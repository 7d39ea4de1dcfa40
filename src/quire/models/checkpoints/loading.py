"""Loads a decoder, matrix by matrix, from the checkpoint directly into the kernels' layout."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quire.errors import ConfigError, ModelError
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.devices.staging import weight_memory
from quire.kernels.dispatch import kernel_set
from quire.kernels.interface import KernelSet
from quire.kernels.layers.act_order import linear_in_order
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.layers.linear import AdaptedLinear, Linear
from quire.kernels.layers.weights import BlockWeight, Weight, dequantize
from quire.models.checkpoints.cached_weights import CachedWeights
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.weight_cache import WeightCache, cache_key
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.embedding import Embedding
from quire.models.layer import Norm
from quire.models.layers.per_layer import EMBEDDING as PER_LAYER_EMBEDDING
from quire.models.layers.per_layer import PerLayerInputs
from quire.models.parallel import (
    RowParallelExperts,
    RowParallelLinear,
    TensorParallel,
    VocabularyParallelLinear,
)
from quire.models.row_layers import DenseRows
from quire.models.shard import WHOLE, Shard
from quire.models.weights import (
    WeightSource,
    WeightSpec,
    may_find_largest,
    output_quantization,
    weight_specs,
)

Progress = Callable[[int, int], None]


@dataclasses.dataclass(slots=True, frozen=True)
class WeightOptions:
    """How weights are held in memory.

    Args:
        dtype: bfloat16, float16, float32, or auto for the type in the checkpoint's config.
        quantization: for weights stored in floating point: none, int8, int4 or fp8.
        group_size: inputs that share a scale, for int4.
        int4_activations: what activations are made for int4: int8 or bfloat16.
        kernels: which kernels compute: auto, native or reference.
        cache: cache of weights packed by native kernels; None: no cache.
    """

    dtype: str = "auto"
    quantization: str = "none"
    group_size: int = 128
    int4_activations: str = "int8"
    kernels: str = "auto"
    cache: WeightCache | None = None


def load_decoder(
    path: Path,
    config: ModelConfig,
    dtype: str = "auto",
    *,
    options: WeightOptions | None = None,
    parallel: TensorParallel | None = None,
    on_progress: Progress | None = None,
) -> Decoder:
    """Load the model at `path`, or this rank's shard of it.

    Args:
        path: directory of the checkpoint, see `quire.models.checkpoints.checkpoint`.
        config: the whole model's numbers, from the same place.
        dtype: as in `WeightOptions`; used without `options`.
        options: how to hold the weights.
        parallel: the ranks; each loads its shard. None: there is one rank.
        on_progress: called with (bytes loaded, total bytes) after each matrix, counted unquantized.

    Raises:
        ModelError: names a missing, unexpected or misshapen weight, or a file that cannot be read.
        ConfigError: a quantized matrix cannot be divided among the ranks, or the model has no vectors for so
            many positions.
    """
    options = options or WeightOptions(dtype=dtype)
    options = dataclasses.replace(options, dtype=config.dtype if options.dtype == "auto" else options.dtype)
    kernels = kernel_set(options.kernels)

    def load(checkpoint: Checkpoint | CachedWeights, memory: WeightMemory) -> Decoder:
        loader = _Loader(
            checkpoint, kernels, config, options, parallel, memory=memory, on_progress=on_progress
        )
        return loader.load()

    with Checkpoint(path) as checkpoint:
        checkpoint.check_names(list(weight_specs(config)), config)
        cache = _cache_that_pays(checkpoint, kernels, options)
        if cache is None:
            with weight_memory(kernels.device) as memory:
                try:
                    return load(checkpoint, memory)
                except OSError as error:
                    raise ModelError(f"the weights in {path} cannot be read: {error}") from error
        key = _cache_key(path, options, kernels, WHOLE if parallel is None else parallel.shard)
        cached = CachedWeights(checkpoint, cache, key)
        decoder = load(cached, cached.memory)
        cached.save()
        return decoder


class _Loader:
    """Builds a decoder layer by layer, so that at most one layer is in memory twice; see `LayerLoader`."""

    def __init__(
        self,
        checkpoint: Checkpoint | CachedWeights,
        kernels: KernelSet,
        config: ModelConfig,
        options: WeightOptions,
        parallel: TensorParallel | None,
        *,
        memory: WeightMemory,
        on_progress: Progress | None,
    ) -> None:
        self.index = -1  # current layer; -1: outside layers
        self.model = config
        self.ropes = config.ropes
        self.kernels = kernels
        self.shard = WHOLE if parallel is None else parallel.shard
        self.parallel = parallel
        self._checkpoint = checkpoint
        self._quantization = options.quantization
        self._output_bits = kernels.output_bits(options.int4_activations)
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._how_held: dict[str, Any] = {
            "dtype": self._dtype,
            "group_size": options.group_size,
            "int4_activations": options.int4_activations,
            "memory": memory,
        }
        self._memory = memory
        specs = list(weight_specs(config, self.shard))
        self._specs = {(spec.layer, spec.field): spec for spec in specs}
        num_users = collections.Counter(spec.sources for spec in specs)
        self._is_shared = {sources for sources, count in num_users.items() if count > 1}
        self._shared: dict[tuple[WeightSource, ...], Linear] = {}  # those that have been loaded
        self._on_progress = on_progress
        different = {source for spec in specs for source in spec.sources}
        self._num_weights = sum(math.prod(source.held_shape) for source in different)
        self._num_loaded = 0

    def load(self) -> Decoder:
        """Return the decoder."""
        embedding = self._embedding("embedding")
        per_layer = None
        if self.model.per_layer_size:
            per_layer = PerLayerInputs(self._embedding(PER_LAYER_EMBEDDING), self)
        layers = []
        for index, layer in enumerate(self.model.layers):
            self.index = index
            layers.append(tuple(part.load(self) for part in layer.parts))
        self.index = -1
        return Decoder(
            self.shard.model(self.model),
            embedding=embedding,
            layers=layers,
            norm=self.residual_norm("norm"),
            embedding_norm=self.residual_norm("embedding_norm"),
            row_layers=[self._row_layer(number) for number in range(len(self.model.row_layers))],
            output=self._output(),
            per_layer=per_layer,
            kernels=self.kernels,
            parallel=self.parallel,
            positions=self._positions(),
        )

    def _positions(self) -> torch.Tensor | None:
        """Return what is added to the vectors of tokens, by their types and positions."""
        count, length = self.model.learned_positions, self.model.max_model_len
        types = self.tensor("token_types")
        if not count:
            return None if types is None else types.to(self._dtype)[:, None].expand(-1, length, -1)
        if length > count:
            raise ConfigError(
                f"max_model_len is {length}, but {self.model.architecture} has vectors of only {count} "
                "positions; lower it to that"
            )
        rows = self._tensor(self._specs[-1, "positions"])[self.model.unused_positions :]
        rows = rows.to(self.kernels.device)
        return rows[None] if types is None else (rows.float() + types[:, None]).to(self._dtype)

    def _embedding(self, field: str) -> Embedding:
        sources = self._specs[-1, field].sources
        embedding = self._checkpoint.embedding(sources[0], self._dtype).on(self.kernels.device, self._memory)
        self._release(sources)
        return embedding

    def _output(self) -> Linear | None:
        if self.model.pooling is not None:
            return None
        field = "embedding" if self.model.tie_word_embeddings else "output"
        quantization = output_quantization(self._quantization, self._output_bits)
        output = self._linear(field, quantization, is_output=may_find_largest(self.model, self.shard))
        if self.parallel is None:
            return output
        return VocabularyParallelLinear(output, self.parallel, self.model.vocab_size)

    def _row_layer(self, number: int) -> DenseRows:
        fields = (f"row_{part}_{number}{end}" for part in ("layer", "norm") for end in ("", "_bias"))
        found = (self.tensor(field) for field in fields)
        weight, bias, norm, norm_bias = (None if tensor is None else tensor.cpu() for tensor in found)
        assert weight is not None
        layer = self.model.row_layers[number]
        if layer.tokens:
            weight = weight[-1:] - weight[:-1].sum(0)
        kernels = kernel_set() if self.kernels.device.type == "cuda" else self.kernels
        linear = kernels.linear([weight], bias, dtype=torch.float32)
        return DenseRows(linear, layer.activation, norm, norm_bias, self.model.norm_eps)

    def norm(self, field: str) -> torch.Tensor | None:
        weight = self.tensor(field)
        return None if weight is None else weight + self.model.norm_offset

    def unit_norm(self, size: int) -> torch.Tensor:
        return torch.ones(size, device=self.kernels.device)

    def tensor(self, field: str) -> torch.Tensor | None:
        spec = self._specs.get((self.index, field))
        if spec is None:
            return None
        parts = [self._checkpoint.tensor(source).float() for source in spec.sources]
        self._release(spec.sources)
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self.kernels.device)

    def residual_norm(self, field: str) -> Norm | None:
        weight = self.norm(field)
        if weight is None or self.model.norm_kind == "rms":
            return None if weight is None else Norm(weight)
        bias = self.tensor(f"{field}_bias")
        return Norm(weight, torch.zeros_like(weight) if bias is None else bias)

    def linear(self, field: str, *, is_quantized: bool = True, is_summed: bool = False) -> Linear:
        linear = self._linear(field, self._quantization if is_quantized else "none")
        if (self.index, f"{field}_adapter_in") in self._specs:
            linear = self._adapted(linear, field)
        return linear if self.parallel is None or not is_summed else RowParallelLinear(linear, self.parallel)

    def _adapted(self, linear: Linear, field: str) -> Linear:
        sources = self._specs[self.index, f"{field}_adapter_out"].sources
        sizes = [source.held_shape[0] for source in sources]
        into = self._linear(f"{field}_adapter_in", "none")
        back = self.linears(f"{field}_adapter_out", lambda rows: torch.split(rows, sizes))
        return AdaptedLinear(linear, into, back)

    def linears(self, field: str, matrices: Callable[[torch.Tensor], Iterable[torch.Tensor]]) -> list[Linear]:
        sources = self._specs[self.index, field].sources
        rows = torch.cat([dequantize(part) for part in self._checkpoint.matrix(sources)])
        made = [self.kernels.linear([each], **self._how_held) for each in matrices(rows)]
        self._release(sources)
        return made

    def experts(self, gate_up: str, down: str, mixture: Mixture) -> Experts:
        gate_ups, downs = (self._specs[self.index, field].sources for field in (gate_up, down))
        gate_up_biases, down_biases = (
            self._specs.get((self.index, f"{field}_bias")) for field in (gate_up, down)
        )

        def bias_of(spec: WeightSpec | None, start: int, stop: int) -> torch.Tensor | None:
            if spec is None:
                return None
            return self._tensor(dataclasses.replace(spec, sources=spec.sources[start:stop]))

        def weights() -> Iterator[ExpertWeights]:
            count = 2 if mixture.is_gated else 1
            for index in range(mixture.num_experts):
                first = count * index
                sources = gate_ups[first : first + count], downs[index : index + 1]
                yield ExpertWeights(
                    self._matrix(sources[0]),
                    self._matrix(sources[1]),
                    bias_of(gate_up_biases, first, first + count),
                    bias_of(down_biases, index, index + 1),
                )
                self._release(itertools.chain(*sources))

        experts = self.kernels.experts(weights(), mixture, quantization=self._quantization, **self._how_held)
        return experts if self.parallel is None else RowParallelExperts(experts, self.parallel)

    def _linear(self, field: str, quantization: str, *, is_output: bool = False) -> Linear:
        sources = self._specs[self.index, field].sources
        if sources in self._shared:
            return self._shared[sources]
        bias = self._specs.get((self.index, f"{field}_bias"))
        linear = linear_in_order(
            self.kernels,
            self._matrix(sources),
            None if bias is None else self._tensor(bias),
            quantization=quantization,
            is_output=is_output,
            **self._how_held,
        )
        if sources in self._is_shared:
            self._shared[sources] = linear
        self._release(sources)
        return linear

    def _matrix(self, sources: Sequence[WeightSource]) -> list[Weight]:
        """Return a matrix in parts that the kernels take."""
        parts = self._checkpoint.matrix(sources)
        return [
            part.decoded()
            if isinstance(part, BlockWeight) and part.kind not in self.kernels.block_kinds
            else part
            for part in parts
        ]

    def _tensor(self, spec: WeightSpec) -> torch.Tensor:
        """Return the sources joined by rows; a single one of the right dtype stays in the mapped file."""
        parts = [self._checkpoint.tensor(source).to(self._dtype) for source in spec.sources]
        self._release(spec.sources)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _release(self, sources: Iterable[WeightSource]) -> None:
        for source in sources:
            self._checkpoint.release(source)
            self._num_loaded += math.prod(source.held_shape)
        if self._on_progress is not None:
            done = min(self._num_loaded, self._num_weights)  # a tied embedding is read twice
            self._on_progress(done * self._dtype.itemsize, self._num_weights * self._dtype.itemsize)


def _cache_that_pays(
    checkpoint: Checkpoint, kernels: KernelSet, options: WeightOptions
) -> WeightCache | None:
    cache = options.cache
    if cache is None or kernels.weight_layout is None:
        return None
    is_quick = options.quantization == "none" and checkpoint.is_packed_quickly(kernels.block_kinds)
    return None if is_quick and not cache.is_for_all else cache


def _cache_key(path: Path, options: WeightOptions, kernels: KernelSet, shard: Shard) -> str:
    return cache_key(
        path,
        **({} if shard.size == 1 else {"shard": [shard.rank, shard.size]}),
        dtype=options.dtype,
        quantization=options.quantization,
        group_size=options.group_size,
        output_bits=kernels.output_bits(options.int4_activations),
        instruction_set=kernels.weight_layout,
    )
