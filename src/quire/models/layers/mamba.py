"""Mamba-2 (Dao and Gu 2024): a selective state space, whose memory decays with the time that tokens take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.kv.cache.state_layout import StatePart, StateSpec
from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer
from quire.models.layers.attention import check_heads_divisible, head_section
from quire.models.layers.recurrence import RecurrentConfig, conv_taps
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(RecurrentConfig):
    """The numbers of one Mamba-2. Each group of keys and queries serves equally many heads, in order."""

    num_heads: int = 0
    head_dim: int = 0  # features of a head's values
    num_groups: int = 1
    state_size: int = 0  # features of keys and queries, which other code calls B and C
    num_taps: int = 0  # of the convolution of values, keys and queries
    conv_bias: bool = True
    bias: bool = False  # the projection of the input has one
    output_bias: bool = False
    norm: str = "gated"
    """Norm of each group's result: of what gates have multiplied ("gated"), before that ("ungated"), or none
    (empty).
    """
    norm_eps: float = 0.0  # of that norm; 0: as of the model's norms
    input_scales: tuple[float, ...] = ()  # of gates, values, keys, queries and times; (): they are 1
    time_limits: tuple[float, float] = (0.0, math.inf)  # of what a token takes, by which memories decay

    weight_names: ClassVar[Mapping[str, str]] = {
        "mamba_in": "mamba.in_proj",
        "mamba_conv": "mamba.conv1d",
        "mamba_parameters": "mamba",
        "mamba_norm": "mamba.norm",
        "mamba_out": "mamba.out_proj",
    }

    @property
    def value_size(self) -> int:
        """Features of the values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Features of values, keys and queries together."""
        return self.value_size + 2 * self.num_groups * self.state_size

    @property
    def input_size(self) -> int:
        """Features of what the input becomes: gates, values, keys and queries, and times."""
        return self.value_size + self.conv_size + self.num_heads

    @property
    def feature_scales(self) -> list[float]:
        """By what each feature of the projected input is multiplied; empty: by 1."""
        keys = self.num_groups * self.state_size
        sizes = self.value_size, self.value_size, keys, keys, self.num_heads
        return [scale for scale, size in zip(self.input_scales, sizes, strict=False) for _ in range(size)]

    @property
    @override
    def state(self) -> StateSpec:
        memory = StatePart("memory", (self.num_heads, self.state_size, self.head_dim), "float32")
        return StatePart("conv", (self.num_taps - 1, self.conv_size)), memory

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        heads, groups = shard.query_heads(self.num_heads), self.held_groups(shard)
        value, head = (head_section(self.num_heads, size, heads) for size in (self.head_dim, 1))
        key = head_section(self.num_groups, self.state_size, groups)
        inputs, convolved = (value, value, key, key, head), (value, key, key)
        matrix = (("mamba_in.weight", (self.input_size, hidden_size)),)
        yield LayerWeight("mamba_in", matrix, sections=inputs, is_quantized=True)
        output = (("mamba_out.weight", (hidden_size, self.value_size)),)
        yield LayerWeight("mamba_out", output, axis=1, sections=(value,), is_quantized=True)
        taps = (("mamba_conv.weight", (self.conv_size, 1, self.num_taps)),)
        yield LayerWeight("mamba_conv", taps, sections=convolved)
        if self.bias:
            yield LayerWeight("mamba_in_bias", (("mamba_in.bias", (self.input_size,)),), sections=inputs)
        if self.conv_bias:
            yield LayerWeight(
                "mamba_conv_bias", (("mamba_conv.bias", (self.conv_size,)),), sections=convolved
            )
        if self.output_bias:
            yield LayerWeight("mamba_out_bias", (("mamba_out.bias", (hidden_size,)),), is_of_first_rank=True)
        for field, name in (("mamba_decay", "A_log"), ("mamba_time_bias", "dt_bias"), ("mamba_skip", "D")):
            numbers = ((f"mamba_parameters.{name}", (self.num_heads,)),)
            yield LayerWeight(field, numbers, sections=(head,))
        if self.norm:
            yield LayerWeight("mamba_norm", (("mamba_norm.weight", (self.value_size,)),), sections=(value,))

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(
            self,
            num_heads=len(shard.query_heads(self.num_heads)),
            num_groups=len(self.held_groups(shard)),
        )

    @override
    def check_divisible(self, size: int) -> None:
        check_heads_divisible(self.num_heads, size, "heads of state spaces")

    def held_groups(self, shard: Shard) -> tuple[int, ...]:
        """Return the groups of a rank: as KV heads, they are those of its heads."""
        return shard.kv_heads(self.num_heads, self.num_groups)

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        return {"mamba_in": (self.input_size,), "mamba_gated": (self.value_size,)}

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        rows = 5 * step.tokens * self.conv_size * _FLOAT32_BYTES
        return step.product_bytes(self.value_size) + step.reference_gate_bytes(self.value_size) + rows

    @override
    def load(self, loader: LayerLoader) -> Mamba:
        return Mamba(self, loader)


class Mamba(SubLayer):
    """A Mamba-2 with its weights.

    Args:
        whole: of all ranks.
        loader: of the layer.
    """

    def __init__(self, whole: MambaConfig, loader: LayerLoader) -> None:
        from quire.kernels.layers.recurrence import ScanHeads

        config = whole.on_rank(loader.shard)
        super().__init__(config, loader)
        self.project = loader.linear("mamba_in")
        self.output = loader.linear("mamba_out", is_summed=True)
        self._taps = conv_taps(loader, "mamba_conv")
        self._conv_bias = loader.tensor("mamba_conv_bias")
        fields = "mamba_decay", "mamba_time_bias", "mamba_skip"
        decay, time_bias, skip = map(loader.tensor, fields)
        assert decay is not None
        assert time_bias is not None
        assert skip is not None
        self._heads = ScanHeads(
            config.num_heads,
            config.head_dim,
            config.num_groups,
            config.state_size,
            decay=-decay.exp(),
            time_bias=time_bias,
            skip=skip,
            time_limits=config.time_limits,
        )
        self._norm = _norm(whole, config, loader)
        scales = config.feature_scales
        self._scales = decay.new_tensor(scales) if set(scales) - {1.0} else None
        self._config = config
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
        batch, state = step.batches[0], step.state(self._index)
        size, conv_size = self._config.value_size, self._config.conv_size
        projected = self.project(inputs, out=buffers["mamba_in"])
        if self._scales is not None:
            projected.mul_(self._scales)
        convolved = self._kernels.causal_conv(
            projected[:, size : size + conv_size],
            self._taps,
            state["conv"],
            batch,
            bias=self._conv_bias,
            activation="silu",
        )
        # The result takes the place of the values, beside the gates.
        times, result = projected[:, size + conv_size :], projected[:, size : 2 * size]
        self._kernels.selective_scan(convolved, times, state["memory"], batch, heads=self._heads, out=result)
        if self._config.norm == "ungated":
            self._norm(result)
        gated = self._kernels.gated_activation(projected[:, : 2 * size], "silu", out=buffers["mamba_gated"])
        if self._config.norm == "gated":
            self._norm(gated)
        return self.output(gated, out=out)


def _norm(whole: MambaConfig, config: MambaConfig, loader: LayerLoader) -> Callable[[torch.Tensor], None]:
    """Return what replaces the features of each group by their norm, in rows [T, value_size]."""
    weight, kernels = loader.tensor("mamba_norm"), loader.kernels
    eps = config.norm_eps or loader.model.norm_eps
    if loader.parallel is not None and whole.num_groups % loader.shard.size and weight is not None:
        from quire.models.parallel import DividedNorm

        groups, size = whole.held_groups(loader.shard), whole.value_size // whole.num_groups
        return DividedNorm(weight, groups, loader.parallel, num_groups=whole.num_groups, size=size, eps=eps)
    norms = () if weight is None else weight.chunk(config.num_groups)

    def normalize(rows: torch.Tensor) -> None:
        for part, norm in zip(rows.chunk(len(norms), dim=1), norms, strict=True):
            kernels.rms_norm(part, norm, eps=eps, out=part)

    return normalize
