"""The gated feed-forward layer: down(activation(gate) * up)."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer, SubLayerConfig
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig(SubLayerConfig):
    """The numbers of one feed-forward layer."""

    inner_size: int = 0  # features between its matrices
    activation: str = "silu"  # silu, gelu_tanh or gelu
    bias: bool = False  # its projections have a bias

    role: ClassVar[str] = "mlp"
    weight_names: ClassVar[Mapping[str, str]] = {
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        size = self.inner_size
        inner = size, (shard.share(size),)
        sizes = {"gate_up": 2 * size} if "gate_up" in names else {"gate": size, "up": size}
        matrices = tuple((f"{name}.weight", (rows, hidden_size)) for name, rows in sizes.items())
        yield LayerWeight("gate_up", matrices, sections=(inner, inner), is_quantized=True)
        down = (("down.weight", (hidden_size, size)),)
        yield LayerWeight("down", down, axis=1, sections=(inner,), is_quantized=True)
        if self.bias:
            biases = tuple((f"{name}.bias", (rows,)) for name, rows in sizes.items())
            yield LayerWeight("gate_up_bias", biases, sections=(inner, inner))
            yield LayerWeight("down_bias", (("down.bias", (hidden_size,)),), is_of_first_rank=True)

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(self, inner_size=len(shard.share(self.inner_size)))

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        return {"gate_up": (2 * self.inner_size,), "inner": (self.inner_size,)}

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        return step.product_bytes(self.inner_size) + step.reference_gate_bytes(self.inner_size)

    @override
    def load(self, loader: LayerLoader) -> FeedForward:
        return FeedForward(self.on_rank(loader.shard), loader)


class FeedForward(SubLayer):
    """A gated feed-forward layer with its weights.

    Args:
        config: of this rank.
        loader: of the layer.
    """

    def __init__(self, config: FeedForwardConfig, loader: LayerLoader) -> None:
        super().__init__(config, loader)
        self.gate_up = loader.kernels.gated_linear(loader.linear("gate_up"), config.activation)
        self.down = loader.linear("down", is_summed=True)
        if not self.gate_up.keeps_products:
            self.buffers["gate_up"] = (0,)

    @property
    @override
    def kind(self) -> Hashable:
        return type(self), self.gate_up.kind, self.down.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        inner = self.gate_up(inputs, products=buffers["gate_up"], out=buffers["inner"])
        return self.down(inner, out=out)
