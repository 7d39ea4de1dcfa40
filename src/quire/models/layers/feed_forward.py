"""The feed-forward layer: down(activation(gate) * up), or down(activation(up))."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer, SubLayerConfig
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

    from quire.kernels.layers.gated_linear import GatedLinear

_FLOAT32_BYTES = 4
_XIELU_TENSORS = 5  # float32 numbers for each number of the input
_XIELU_NUMBERS: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""What the activation xielu has of its own in each layer, and the shapes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig(SubLayerConfig):
    """The numbers of one feed-forward layer."""

    inner_size: int = 0  # features between its matrices
    activation: str = "silu"  # silu, gelu_tanh, gelu, relu2, or xielu without a gate
    gated: bool = True  # the activation is that of a gate, which multiplies `up`
    gate_scale: float = 1.0  # multiplies gates before their activation
    bias: bool = False  # its projections have a bias
    has_split_gates: bool = False  # files have no matrix of gates and `up`, though others of the family do
    is_shared_expert: bool = False  # beside a mixture of experts: its weights have names of their own
    output_gate: bool = False  # the sigmoid of a product with its input, one number, multiplies its output

    role: ClassVar[str] = "mlp"
    weight_names: ClassVar[Mapping[str, str]] = {
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "shared_gate": "mlp.shared_experts.gate_proj",
        "shared_up": "mlp.shared_experts.up_proj",
        "shared_down": "mlp.shared_experts.down_proj",
        "output_gate": "mlp.shared_expert_gate",
        "activation": "mlp.act_fn",
    }

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        size, of = self.inner_size, "shared_" if self.is_shared_expert else ""
        inner = size, (shard.share(size),)
        sizes = {f"{of}gate": size, f"{of}up": size}
        if not self.gated:
            sizes = {f"{of}up": size}
        elif f"{of}gate_up" in names and not self.has_split_gates:
            sizes = {f"{of}gate_up": 2 * size}
        sections = (inner, inner) if self.gated else (inner,)
        matrices = tuple((f"{name}.weight", (rows, hidden_size)) for name, rows in sizes.items())
        yield LayerWeight("gate_up", matrices, sections=sections, is_quantized=True)
        down = ((f"{of}down.weight", (hidden_size, size)),)
        yield LayerWeight("down", down, axis=1, sections=(inner,), is_quantized=True)
        if self.bias:
            biases = tuple((f"{name}.bias", (rows,)) for name, rows in sizes.items())
            yield LayerWeight("gate_up_bias", biases, sections=sections)
            bias = ((f"{of}down.bias", (hidden_size,)),)
            yield LayerWeight("down_bias", bias, is_of_first_rank=True)
        if self.output_gate:
            yield LayerWeight("output_gate", (("output_gate.weight", (1, hidden_size)),))
        if self.activation == "xielu":
            for name, shape in _XIELU_NUMBERS.items():
                yield LayerWeight(name, ((f"activation.{name}", shape),))

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(self, inner_size=len(shard.share(self.inner_size)))

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        inner: dict[str, tuple[int, ...]] = {"inner": (self.inner_size,)}
        return {"gate_up": (2 * self.inner_size,), **inner} if self.gated else inner

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        peak = step.product_bytes(self.inner_size) + step.reference_gate_bytes(self.inner_size)
        if not self.gated and (self.activation == "xielu" or step.on_gpu):  # in plain torch
            peak += step.tokens * _XIELU_TENSORS * self.inner_size * _FLOAT32_BYTES
        return peak

    @override
    def load(self, loader: LayerLoader) -> FeedForward:
        return FeedForward(self.on_rank(loader.shard), loader)


class FeedForward(SubLayer):
    """A feed-forward layer with its weights.

    Args:
        config: of this rank.
        loader: of the layer.
    """

    def __init__(self, config: FeedForwardConfig, loader: LayerLoader) -> None:
        super().__init__(config, loader)
        self.gate_up = _inner(config, loader)
        self.down = loader.linear("down", is_summed=True)
        self.output_gate = loader.linear("output_gate", is_quantized=False) if config.output_gate else None
        self._kernels = loader.kernels
        if not self.gate_up.keeps_products:
            self.buffers["gate_up"] = (0,)

    @property
    @override
    def kind(self) -> Hashable:
        gate = None if self.output_gate is None else self.output_gate.kind
        return type(self), self.gate_up.kind, self.down.kind, gate

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        inner = self.gate_up(inputs, products=buffers["gate_up"], out=buffers["inner"])
        result = self.down(inner, out=out)
        if self.output_gate is None:
            return result
        gate = self.output_gate(inputs, out=result.new_empty(len(result), 1))
        return self._kernels.apply_gate(result, gate, activation="sigmoid")


def _inner(config: FeedForwardConfig, loader: LayerLoader) -> GatedLinear:
    from quire.kernels.layers.activations import XIELU
    from quire.kernels.layers.gated_linear import ActivatedLinear, ScaledGateLinear

    products = loader.linear("gate_up")
    if config.gate_scale != 1.0:
        return ScaledGateLinear(loader.kernels, products, config.activation, config.gate_scale)
    if config.gated:
        return loader.kernels.gated_linear(products, config.activation)
    if config.activation != "xielu":
        return ActivatedLinear(loader.kernels, products, config.activation)
    numbers = {name: loader.tensor(name) for name in _XIELU_NUMBERS}
    return ActivatedLinear(loader.kernels, products, XIELU(**numbers))  # type: ignore[arg-type]
