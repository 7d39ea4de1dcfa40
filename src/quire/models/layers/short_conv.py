"""The gated short convolution of LFM2: out(c * conv(b * x)); b, c and x are projections of the input."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.kv.cache.state_layout import StatePart, StateSpec
from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer
from quire.models.layers.recurrence import RecurrentConfig, conv_taps
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig(RecurrentConfig):
    """The numbers of one short convolution: it has the features of the residual stream, or a rank's."""

    size: int = 0  # features
    num_taps: int = 0  # tokens that one is computed from, itself included
    bias: bool = False  # projections and convolution have one

    weight_names: ClassVar[Mapping[str, str]] = {
        "conv_in": "conv.in_proj",
        "conv": "conv.conv",
        "conv_out": "conv.out_proj",
    }

    @property
    @override
    def state(self) -> StateSpec:
        return (StatePart("conv", (self.num_taps - 1, self.size)),)

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        size, inner = self.size, 3 * self.size
        held = size, (shard.share(size),)
        inputs, output = (
            (("conv_in.weight", (inner, hidden_size)),),
            (("conv_out.weight", (hidden_size, size)),),
        )
        yield LayerWeight("conv_in", inputs, sections=(held,) * 3, is_quantized=True)
        yield LayerWeight("conv", (("conv.weight", (size, 1, self.num_taps)),), sections=(held,))
        yield LayerWeight("conv_out", output, axis=1, sections=(held,), is_quantized=True)
        if self.bias:
            yield LayerWeight("conv_in_bias", (("conv_in.bias", (inner,)),), sections=(held,) * 3)
            yield LayerWeight("conv_bias", (("conv.bias", (size,)),), sections=(held,))
            bias = (("conv_out.bias", (hidden_size,)),)
            yield LayerWeight("conv_out_bias", bias, is_of_first_rank=True)

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(self, size=len(shard.share(self.size)))

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        return {"conv_inputs": (3, self.size)}

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        return step.product_bytes(self.size) + 4 * step.tokens * self.size * _FLOAT32_BYTES

    @override
    def load(self, loader: LayerLoader) -> ShortConv:
        return ShortConv(self.on_rank(loader.shard), loader)


class ShortConv(SubLayer):
    """A short convolution with its weights.

    Args:
        config: of this rank.
        loader: of the layer.
    """

    def __init__(self, config: ShortConvConfig, loader: LayerLoader) -> None:
        super().__init__(config, loader)
        self.project = loader.linear("conv_in")
        self.output = loader.linear("conv_out", is_summed=True)
        self._taps = conv_taps(loader, "conv")
        self._bias = loader.tensor("conv_bias")
        self._index = loader.index
        self._kernels = loader.kernels

    @property
    @override
    def kind(self) -> Hashable:
        return type(self), self.project.kind, self.output.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        projected = buffers["conv_inputs"]
        self.project(inputs, out=projected.flatten(1))
        before, behind, values = projected.unbind(1)
        gated = before * values
        mixed = self._kernels.causal_conv(
            gated, self._taps, step.state(self._index)["conv"], step.batches[0], bias=self._bias
        )
        return self.output(mixed.mul_(behind), out=out)
