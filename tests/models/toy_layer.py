"""A layer type that Quire does not have, by the recipe in CONTRIBUTING.md: widen(tanh(squeeze(x)))."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import ClassVar, Self

import torch
from typing_extensions import override

from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer, SubLayerConfig
from quire.models.shard import Shard


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckConfig(SubLayerConfig):
    """The numbers of one layer that looks at each token alone, and keeps nothing of it."""

    inner_size: int = 0

    role: ClassVar[str] = "attention"
    weight_names: ClassVar[Mapping[str, str]] = {"squeeze": "mixer.squeeze", "widen": "mixer.widen"}

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        size = self.inner_size
        inner = ((size, (shard.share(size),)),)
        squeeze, widen = (size, hidden_size), (hidden_size, size)
        yield LayerWeight("squeeze", (("squeeze.weight", squeeze),), sections=inner, is_quantized=True)
        yield LayerWeight("widen", (("widen.weight", widen),), axis=1, sections=inner, is_quantized=True)

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(self, inner_size=len(shard.share(self.inner_size)))

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        return {"inner": (self.inner_size,)}

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        return step.product_bytes(self.inner_size)

    @override
    def load(self, loader: LayerLoader) -> Bottleneck:
        return Bottleneck(self.on_rank(loader.shard), loader)


class Bottleneck(SubLayer):
    """Such a layer with its weights."""

    def __init__(self, config: BottleneckConfig, loader: LayerLoader) -> None:
        super().__init__(config, loader)
        self.squeeze = loader.linear("squeeze")
        self.widen = loader.linear("widen", is_summed=True)

    @property
    @override
    def kind(self) -> Hashable:
        return type(self), self.squeeze.kind, self.widen.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        inner = self.squeeze(inputs, out=buffers["inner"])
        return self.widen(inner.tanh_(), out=out)
