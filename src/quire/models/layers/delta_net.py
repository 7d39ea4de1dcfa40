"""Gated DeltaNet (Yang et al. 2024): linear attention whose memory forgets, and is corrected."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from quire.kv.cache.state_layout import StatePart, StateSpec
from quire.models.layer import LayerLoader, LayerWeight, Section, Step, StepSizes, SubLayer
from quire.models.layers.recurrence import RecurrentConfig, conv_taps
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig(RecurrentConfig):
    """The numbers of one gated DeltaNet. Each key head serves equally many value heads, in order.

    Checkpoints have projections by themselves, in the two forms of `weight_names` and of `delta_q`; or, as
    `delta_qkvz` and `delta_ba`, those of all for one key head after another.
    """

    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim: int = 0  # features of a head of queries and keys
    value_dim: int = 0  # features of a head of values
    num_taps: int = 0  # of the convolution of queries, keys and values
    norm_eps: float = 0.0  # of the norm of results; 0: as of the model's norms
    max_strength: float = 1.0  # as in `DeltaHeads`

    weight_names: ClassVar[Mapping[str, str]] = {
        "delta_qkv": "linear_attn.in_proj_qkv",
        "delta_z": "linear_attn.in_proj_z",
        "delta_b": "linear_attn.in_proj_b",
        "delta_a": "linear_attn.in_proj_a",
        "delta_conv": "linear_attn.conv1d",
        "delta_parameters": "linear_attn",
        "delta_norm": "linear_attn.norm",
        "delta_out": "linear_attn.out_proj",
    }

    @property
    def conv_size(self) -> int:
        """Features of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        """Features of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    @override
    def state(self) -> StateSpec:
        memory = StatePart("memory", (self.num_value_heads, self.key_dim, self.value_dim), "float32")
        return StatePart("conv", (self.num_taps - 1, self.conv_size)), memory

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        heads, value_size = self.num_value_heads, self.value_size
        projections: dict[str, int] = {"delta_qkv": self.conv_size, "delta_z": value_size}
        gates, convs = {"delta_b": heads, "delta_a": heads}, {"delta_conv": self.conv_size}
        by_head: tuple[tuple[Section, ...], ...] = (), ()
        if "delta_qkvz" in names:
            projections, gates = {"delta_qkvz": self.conv_size + value_size}, {"delta_ba": 2 * heads}
            group = heads // self.num_key_heads
            values = group * self.value_dim
            by_head = (
                (self._rows_by_key_head(self.key_dim, self.key_dim, values, values),),
                (self._rows_by_key_head(group, group),),
            )
        elif "delta_q" in names:
            key_size = self.num_key_heads * self.key_dim
            sizes = {"delta_q": key_size, "delta_k": key_size, "delta_v": value_size}
            convs = {f"{name}_conv": size for name, size in sizes.items()}
            projections = sizes | {"delta_z": value_size}
        for field, parts, sections in zip(
            ("delta_in", "delta_gates"), (projections, gates), by_head, strict=True
        ):
            sources = tuple((f"{name}.weight", (rows, hidden_size)) for name, rows in parts.items())
            yield LayerWeight(field, sources, sections=sections, is_quantized=field == "delta_in")
        taps = tuple((f"{name}.weight", (size, 1, self.num_taps)) for name, size in convs.items())
        yield LayerWeight("delta_conv", taps)
        yield LayerWeight("delta_decay", (("delta_parameters.A_log", (heads,)),))
        yield LayerWeight("delta_time_bias", (("delta_parameters.dt_bias", (heads,)),))
        yield LayerWeight("delta_norm", (("delta_norm.weight", (self.value_dim,)),))
        yield LayerWeight("delta_out", (("delta_out.weight", (hidden_size, value_size)),), is_quantized=True)

    def _rows_by_key_head(self, *sizes: int) -> Section:
        """Return where the rows of parts lie, each of which has so many for a key head."""
        of_head = sum(sizes)
        starts = itertools.accumulate(sizes, initial=0)
        ranges = tuple(
            range(head * of_head + start, head * of_head + start + size)
            for start, size in zip(starts, sizes, strict=False)
            for head in range(self.num_key_heads)
        )
        return self.num_key_heads * of_head, ranges

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        return {
            "delta_in": (self.conv_size + self.value_size,),
            "delta_gates": (2, self.num_value_heads),
            "delta_out": (self.num_value_heads, self.value_dim),
        }

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        rows = 5 * step.tokens * self.conv_size * _FLOAT32_BYTES
        return step.product_bytes(self.value_size) + rows

    @override
    def load(self, loader: LayerLoader) -> DeltaNet:
        return DeltaNet(self, loader)


class DeltaNet(SubLayer):
    """A gated DeltaNet with its weights.

    Args:
        config: its numbers.
        loader: of the layer.
    """

    def __init__(self, config: DeltaNetConfig, loader: LayerLoader) -> None:
        from quire.kernels.layers.recurrence import DeltaHeads

        super().__init__(config, loader)
        self.project = loader.linear("delta_in")
        self.gates = loader.linear("delta_gates", is_quantized=False)
        self.output = loader.linear("delta_out")
        self._taps = conv_taps(loader, "delta_conv")
        decay, time_bias, norm = map(loader.tensor, ("delta_decay", "delta_time_bias", "delta_norm"))
        assert decay is not None
        assert time_bias is not None
        assert norm is not None
        self._heads = DeltaHeads(
            config.num_key_heads,
            config.num_value_heads,
            config.key_dim,
            config.value_dim,
            decay=-decay.exp(),
            time_bias=time_bias,
            max_strength=config.max_strength,
        )
        self._norm = norm
        self._eps = config.norm_eps or loader.model.norm_eps
        self._conv_size = config.conv_size
        self._index = loader.index
        self._kernels = loader.kernels

    @property
    @override
    def kind(self) -> Hashable:
        return type(self), self.project.kind, self.gates.kind, self.output.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        batch, state = step.batches[0], step.state(self._index)
        projected, gates, attended = (buffers[name] for name in ("delta_in", "delta_gates", "delta_out"))
        self.project(inputs, out=projected)
        self.gates(inputs, out=gates.flatten(1))
        qkv = self._kernels.causal_conv(
            projected[:, : self._conv_size], self._taps, state["conv"], batch, activation="silu"
        )
        self._kernels.gated_delta_rule(qkv, gates, state["memory"], batch, heads=self._heads, out=attended)
        gate = projected[:, self._conv_size :].view(attended.shape)
        normed = self._kernels.gated_norm(attended, gate, self._norm, eps=self._eps)
        return self.output(normed.flatten(1), out=out)
