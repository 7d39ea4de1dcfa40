"""Per-layer embeddings (Gemma 3n, 2025, and Gemma 4): what each layer gets of a token, beside the stream.

A second embedding has a vector of each token for each layer, and a projection makes others of the first
embedding. Of their sum, a layer multiplies its own with a gate that reads the residual stream.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer, SubLayerConfig
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

    from quire.models.config import ModelConfig
    from quire.models.embedding import Embedding

_FLOAT32_BYTES = 4
EMBEDDING, PROJECTION, NORM = "per_layer_embedding", "per_layer_projection", "per_layer_projection_norm"
"""Tensors of the whole model."""


def per_layer_weights(model: ModelConfig, names: Mapping[str, str]) -> Iterator[LayerWeight]:
    """Yield the tensors of the whole model that are for its per-layer embeddings; each rank has all."""
    size = model.per_layer_size
    if not size:
        return
    width = model.num_layers * size
    yield LayerWeight(EMBEDDING, ((names[EMBEDDING], (model.per_layer_vocab_size, width)),))
    yield LayerWeight(PROJECTION, ((names[PROJECTION], (width, model.hidden_size)),), is_quantized=True)
    yield LayerWeight(NORM, ((names[NORM], (size,)),))


def per_layer_bytes(model: ModelConfig, step: StepSizes) -> int:
    """Return the bytes of a step's vectors, and of what they are made of."""
    numbers = step.tokens * model.num_layers * model.per_layer_size
    wide = 0 if step.is_native or step.on_gpu else 2 * _FLOAT32_BYTES
    return numbers * (3 * step.item + wide)


class PerLayerInputs:
    """Makes the vectors of a step's tokens for all layers.

    Args:
        embedding: of all token ids, one layer's vector after the other.
        loader: outside layers; has projection and norm.
    """

    def __init__(self, embedding: Embedding, loader: LayerLoader) -> None:
        model, norm = loader.model, loader.norm(NORM)
        assert norm is not None
        self._embedding = embedding
        self._projection = loader.linear(PROJECTION)
        self._kernels = loader.kernels
        self._size = model.per_layer_size
        # The projection is divided by sqrt(hidden_size), which its norm undoes but for what that adds.
        self._eps = model.norm_eps * model.hidden_size
        self._norm = norm * math.sqrt(0.5)
        self._scale = math.sqrt(self._size * 0.5)

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, layers, size].

        Args:
            token_ids: [T] int64.
            hidden: [T, hidden], their vectors of the first embedding.
        """
        rows = self._projection(hidden).view(-1, self._size)
        self._kernels.rms_norm(rows, self._norm, eps=self._eps, out=rows)
        own = self._embedding(token_ids).view(-1, self._size)
        self._kernels.add_rms_norm(rows, own, None, eps=self._eps, scale=self._scale)
        return rows.view(len(token_ids), -1, self._size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerConfig(SubLayerConfig):
    """The numbers of the sub-layer that adds a layer's own vectors; every rank computes all of it."""

    size: int = 0  # features of a vector
    activation: str = "gelu_tanh"  # of the gate, as for `KernelSet.gated_activation`

    role: ClassVar[str] = "per_layer"
    weight_names: ClassVar[Mapping[str, str]] = {
        "per_layer_gate": "per_layer_input_gate",
        "per_layer_output": "per_layer_projection",
        "per_layer_post_norm": "post_per_layer_input_norm",
    }

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        gate = ("per_layer_gate.weight", (self.size, hidden_size))
        output = ("per_layer_output.weight", (hidden_size, self.size))
        yield LayerWeight("per_layer_gate", (gate,), is_quantized=True)
        yield LayerWeight("per_layer_output", (output,), is_quantized=True)

    @override
    def on_rank(self, shard: Shard) -> Self:
        return self

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        return {"per_layer": (self.size,)}

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        return step.product_bytes(self.size) + step.reference_gate_bytes(self.size)

    @override
    def load(self, loader: LayerLoader) -> PerLayer:
        return PerLayer(self, loader)


class PerLayer(SubLayer):
    """The sub-layer with its weights.

    Args:
        config: its numbers.
        loader: of the layer.
    """

    def __init__(self, config: PerLayerConfig, loader: LayerLoader) -> None:
        super().__init__(config, loader)
        self.gate, self.output = loader.linear("per_layer_gate"), loader.linear("per_layer_output")
        self._activation = config.activation
        self._kernels = loader.kernels
        self._layer = loader.index

    @property
    @override
    def kind(self) -> Hashable:
        return type(self), self.gate.kind, self.output.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        assert step.per_layer is not None
        gate = self.gate(inputs, out=buffers["per_layer"])
        gate = self._kernels.activation(gate, self._activation, out=gate)
        return self.output(gate.mul_(step.per_layer[:, self._layer]), out=out)
