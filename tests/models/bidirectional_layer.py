"""A layer type that Quire does not have: not causal and without KV, as each token sees its whole prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import ClassVar, Self

import torch
from typing_extensions import override

from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer, SubLayerConfig
from quire.models.shard import Shard


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BidirectionalConfig(SubLayerConfig):
    """The numbers of one such layer, which has one head without positions."""

    size: int = 0  # features of queries, keys and values

    role: ClassVar[str] = "attention"
    weight_names: ClassVar[Mapping[str, str]] = {"qkv": "mixer.qkv", "out": "mixer.out"}

    @property
    @override
    def is_causal(self) -> bool:
        return False

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        yield LayerWeight("qkv", (("qkv.weight", (3 * self.size, hidden_size)),), is_quantized=True)
        yield LayerWeight("out", (("out.weight", (hidden_size, self.size)),), is_quantized=True)

    @override
    def on_rank(self, shard: Shard) -> Self:
        return self

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        return {"qkv": (3 * self.size,), "mixed": (self.size,)}

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        return step.product_bytes(3 * self.size) + step.tokens**2 * 4

    @override
    def load(self, loader: LayerLoader) -> Bidirectional:
        return Bidirectional(self, loader)


class Bidirectional(SubLayer):
    """Such a layer with its weights."""

    def __init__(self, config: BidirectionalConfig, loader: LayerLoader) -> None:
        super().__init__(config, loader)
        self.qkv = loader.linear("qkv")
        self.out = loader.linear("out")

    @property
    @override
    def kind(self) -> Hashable:
        return type(self), self.qkv.kind, self.out.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        assert not step.batches[0].num_cached_tokens.any(), "prompts come whole"
        states = self.qkv(inputs, out=buffers["qkv"]).split(step.batches[0].num_tokens.tolist())
        mixed = torch.cat([attended(each) for each in states], out=buffers["mixed"])
        return self.out(mixed, out=out)


def attended(states: torch.Tensor) -> torch.Tensor:
    """Return [T, size] of queries, keys and values [T, 3 * size]."""
    query, key, value = states.chunk(3, dim=-1)
    return (query @ key.T * query.shape[1] ** -0.5).softmax(-1) @ value
