"""Loading a decoder: each matrix goes from the checkpoint straight into the layout that it is computed in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from quire.kernels.dispatch import kernel_set
from quire.kernels.interface import KernelSet
from quire.kernels.linear import Linear
from quire.kernels.memory import WeightMemory
from quire.models.checkpoints.cached_weights import CachedWeights
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.weight_cache import WeightCache, cache_key
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.moe import Expert
from quire.models.weights import WeightSource, WeightSpec, output_quantization, weight_specs

Progress = Callable[[int, int], None]

_MATRICES = ("qkv", "attention_output", "gate_up", "down", "router")
_NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm")


@dataclasses.dataclass(slots=True, frozen=True)
class WeightOptions:
    """How weights are held.

    Args:
        dtype: bfloat16, float16, float32, or auto for the type in the checkpoint's config.
        quantization: of weights that are stored in floating point: none, int8 or int4.
        group_size: inputs that share a scale, for int4.
        kernels: which kernels compute: auto, native or reference.
        cache: where weights that native kernels have packed are kept; None: nowhere.
    """

    dtype: str = "auto"
    quantization: str = "none"
    group_size: int = 128
    kernels: str = "auto"
    cache: WeightCache | None = None


def load_decoder(
    path: Path,
    config: ModelConfig,
    dtype: str = "auto",
    *,
    options: WeightOptions | None = None,
    on_progress: Progress | None = None,
) -> Decoder:
    """Load the model at `path`.

    Args:
        path: directory of the checkpoint, see `quire.models.checkpoints.checkpoint`.
        config: the model's numbers, from the same place.
        dtype: as in `WeightOptions`; counts if there are no `options`.
        options: how to hold the weights.
        on_progress: called with (bytes loaded, bytes in all) after each matrix, counted as if unquantized.

    Raises:
        ModelError: names a missing, unexpected or misshapen weight, or a file that cannot be read.
    """
    options = options or WeightOptions(dtype=dtype)
    options = dataclasses.replace(options, dtype=config.dtype if options.dtype == "auto" else options.dtype)
    kernels = kernel_set(options.kernels)
    with Checkpoint(path) as checkpoint:
        specs = list(weight_specs(config))
        checkpoint.check_names(specs, config)
        if options.cache is None or kernels.weight_layout is None:
            return _Loader(checkpoint, kernels, config, options, specs=specs, on_progress=on_progress).load()
        cached = CachedWeights(checkpoint, options.cache, _cache_key(path, options, kernels.weight_layout))
        decoder = _Loader(cached, kernels, config, options, specs=specs, on_progress=on_progress).load()
        cached.save()
        return decoder


class _Loader:
    """Builds a decoder layer by layer, so that no more than a layer is held twice."""

    def __init__(
        self,
        checkpoint: Checkpoint | CachedWeights,
        kernels: KernelSet,
        config: ModelConfig,
        options: WeightOptions,
        *,
        specs: list[WeightSpec],
        on_progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._options = options
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._kernels = kernels
        self._memory = checkpoint.memory if isinstance(checkpoint, CachedWeights) else WeightMemory()
        self._by_layer: dict[int, dict[str, WeightSpec]] = {}
        for spec in specs:
            self._by_layer.setdefault(spec.layer, {})[spec.field] = spec
        self._on_progress = on_progress
        self._num_weights = sum(math.prod(source.shape) for spec in specs for source in spec.sources)
        self._num_loaded = 0

    def load(self) -> Decoder:
        """Return the decoder."""
        model = self._by_layer.pop(-1)
        embedding = self._tensor(model["embedding"])
        layers = [self._layer(self._by_layer[index]) for index in range(self._config.num_layers)]
        output = model["embedding" if self._config.tie_word_embeddings else "output"]
        return Decoder(
            self._config,
            embedding=embedding,
            layers=layers,
            norm=self._norm(model["norm"]),
            output=self._linear(
                output.sources, None, quantization=output_quantization(self._options.quantization)
            ),
            kernels=self._kernels,
        )

    def _layer(self, specs: dict[str, WeightSpec]) -> DecoderLayer:
        fields: dict[str, Any] = {name: self._norm(specs[name]) for name in _NORMS if name in specs}
        for name in _MATRICES:
            if name in specs:
                quantization = "none" if name == "router" else self._options.quantization
                fields[name] = self._linear(
                    specs[name].sources, specs.get(f"{name}_bias"), quantization=quantization
                )
        if "expert_down" in specs:
            fields["experts"] = self._experts(specs["expert_gate_up"], specs["expert_down"])
        return DecoderLayer(**fields)

    def _experts(self, gate_up: WeightSpec, down: WeightSpec) -> list[Expert]:
        return [
            Expert(
                self._linear(gate_up.sources[2 * index : 2 * index + 2], None),
                self._linear(down.sources[index : index + 1], None),
            )
            for index in range(self._config.num_experts)
        ]

    def _linear(
        self, sources: Iterable[WeightSource], bias: WeightSpec | None, *, quantization: str | None = None
    ) -> Linear:
        sources = tuple(sources)
        linear = self._kernels.linear(
            [self._checkpoint.weight(source) for source in sources],
            None if bias is None else self._tensor(bias),
            dtype=self._dtype,
            quantization=self._options.quantization if quantization is None else quantization,
            group_size=self._options.group_size,
            memory=self._memory,
        )
        self._release(sources)
        return linear

    def _norm(self, spec: WeightSpec) -> torch.Tensor:
        (source,) = spec.sources
        weight = self._checkpoint.tensor(source).float() + self._config.norm_offset
        self._release(spec.sources)
        return weight

    def _tensor(self, spec: WeightSpec) -> torch.Tensor:
        """Return the sources joined by rows; one alone, of the right dtype, stays in the mapped file."""
        parts = [self._checkpoint.tensor(source).to(self._dtype) for source in spec.sources]
        self._release(spec.sources)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _release(self, sources: Iterable[WeightSource]) -> None:
        for source in sources:
            self._checkpoint.release(source)
            self._num_loaded += math.prod(source.shape)
        if self._on_progress is not None:
            done = min(self._num_loaded, self._num_weights)  # a tied embedding is read twice
            self._on_progress(done * self._dtype.itemsize, self._num_weights * self._dtype.itemsize)


def _cache_key(path: Path, options: WeightOptions, weight_layout: str) -> str:
    return cache_key(
        path,
        dtype=options.dtype,
        quantization=options.quantization,
        group_size=options.group_size,
        instruction_set=weight_layout,
    )
