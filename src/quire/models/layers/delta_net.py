"""Gated DeltaNet (Yang et al. 2024): linear attention whose memory forgets, and is corrected.

In Kimi's delta attention (Kimi Team 2025, Kimi Linear), each feature of a key forgets at its own pace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.kv.cache.state_layout import StatePart, StateSpec
from quire.models.layer import (
    LayerLoader,
    LayerWeight,
    Section,
    Step,
    StepSizes,
    SubLayer,
    joined_section,
)
from quire.models.layers.attention import check_heads_divisible, head_section, whole_section
from quire.models.layers.recurrence import RecurrentConfig, conv_taps
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig(RecurrentConfig):
    """The numbers of one gated DeltaNet. Each key head serves equally many value heads, in order.

    Checkpoints have projections by themselves, in the two forms of `weight_names` and of `delta_q`; or, as
    `delta_qkvz` or `delta_ba`, those of all for one key head after another. With a `gate_rank`, those of
    times and of gates are products: `delta_times` of `delta_a`, and `delta_gate` of `delta_z`.
    """

    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim: int = 0  # features of a head of queries and keys
    value_dim: int = 0  # features of a head of values
    num_taps: int = 0  # of the convolution of queries, keys and values
    norm_eps: float = 0.0  # of the norm of results; 0: as of the model's norms
    max_strength: float = 1.0  # as in `DeltaHeads`
    gate_rank: int = 0
    """Features that a time for each feature of keys, and gates of results by sigmoid, are made of; 0: a head
    has one time, made of the hidden states as the gates by silu are.
    """

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
    def times_per_head(self) -> int:
        """As in `DeltaHeads`."""
        return self.key_dim if self.gate_rank else 1

    @property
    def input_size(self) -> int:
        """Features of queries, keys and values, and of what else is projected with them."""
        return self.conv_size + (0 if self.gate_rank else self.value_size)

    @property
    @override
    def state(self) -> StateSpec:
        memory = StatePart("memory", (self.num_value_heads, self.key_dim, self.value_dim), "float32")
        return StatePart("conv", (self.num_taps - 1, self.conv_size)), memory

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        yield from self._projections(hidden_size, names, shard)
        sections = self._sections(shard)
        by_part = sections if "delta_q" in names else {"delta": joined_section(tuple(sections.values()))}
        taps = tuple((f"{name}_conv.weight", (size, 1, self.num_taps)) for name, (size, _) in by_part.items())
        yield LayerWeight("delta_conv", taps, sections=tuple(by_part.values()))
        heads, held = self.num_value_heads, shard.query_heads(self.num_value_heads)
        head, times = (head_section(heads, size, held) for size in (1, self.times_per_head))
        decays, axis = ((1, 1, heads, 1), 2) if self.gate_rank else ((heads,), 0)
        decay = (("delta_parameters.A_log", decays),)
        yield LayerWeight("delta_decay", decay, axis=axis, sections=(head,))
        time_bias = (("delta_parameters.dt_bias", times[:1]),)
        yield LayerWeight("delta_time_bias", time_bias, sections=(times,))
        value = sections["delta_v"]
        if self.gate_rank:
            for field, section in (("delta_times", times), ("delta_gate", value)):
                made = ((f"{field}.weight", (section[0], self.gate_rank)),)
                yield LayerWeight(field, made, sections=(section,))
        yield LayerWeight("delta_norm", (("delta_norm.weight", (self.value_dim,)),))
        output = (("delta_out.weight", (hidden_size, value[0])),)
        yield LayerWeight("delta_out", output, axis=1, sections=(value,), is_quantized=True)

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(
            self,
            num_key_heads=len(self._held_keys(shard)),
            num_value_heads=len(shard.query_heads(self.num_value_heads)),
        )

    @override
    def check_divisible(self, size: int) -> None:
        check_heads_divisible(self.num_value_heads, size, "heads of values")

    def _held_keys(self, shard: Shard) -> tuple[int, ...]:
        """Return the key heads of a rank: as KV heads, they are those of its value heads."""
        return shard.kv_heads(self.num_value_heads, self.num_key_heads)

    def _sections(self, shard: Shard) -> dict[str, Section]:
        """Return what a rank holds of queries, keys and values."""
        key = head_section(self.num_key_heads, self.key_dim, self._held_keys(shard))
        values = shard.query_heads(self.num_value_heads)
        value = head_section(self.num_value_heads, self.value_dim, values)
        return {"delta_q": key, "delta_k": key, "delta_v": value}

    def _projections(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        """Yield the matrices of what hidden states become: quantized ones, and those of gates."""
        heads, group = self.num_value_heads, self.num_value_heads // self.num_key_heads
        keys, values = self._held_keys(shard), shard.query_heads(heads)
        sections = self._sections(shard)
        projections = {"delta_qkv": joined_section(tuple(sections.values())), "delta_z": sections["delta_v"]}
        gates = dict.fromkeys(("delta_b", "delta_a"), head_section(heads, 1, values))
        if "delta_ba" in names:
            gates = {"delta_ba": self._rows_by_key_head(*[(1, group, values)] * 2)}
        if "delta_qkvz" in names:
            of_keys, of_values = (self.key_dim, 1, keys), (self.value_dim, group, values)
            projections = {"delta_qkvz": self._rows_by_key_head(*[of_keys] * 2, *[of_values] * 2)}
        elif "delta_q" in names:
            projections = sections | {"delta_z": sections["delta_v"]}
        if self.gate_rank:
            del projections["delta_z"]
            latent = whole_section(self.gate_rank)
            gates = {"delta_b": gates["delta_b"], "delta_a": latent, "delta_z": latent}
        for field, parts in (("delta_in", projections), ("delta_gates", gates)):
            sources = tuple((f"{name}.weight", (rows, hidden_size)) for name, (rows, _) in parts.items())
            held = tuple(parts.values())
            yield LayerWeight(field, sources, sections=held, is_quantized=field == "delta_in")

    def _rows_by_key_head(self, *parts: tuple[int, int, Sequence[int]]) -> Section:
        """Return where rows of parts lie that are together for each key head.

        Args:
            parts: rows of each head, heads for each key head, and the heads that are held.
        """
        of_key, before, ranges = sum(size * count for size, count, _ in parts), 0, []
        for size, count, held in parts:
            for head in held:
                start = head // count * of_key + before + head % count * size
                ranges.append(range(start, start + size))
            before += size * count
        return self.num_key_heads * of_key, tuple(ranges)

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        buffers: dict[str, tuple[int, ...]] = {
            "delta_in": (self.input_size,),
            "delta_gates": (self.num_value_heads + (2 * self.gate_rank or self.num_value_heads),),
            "delta_out": (self.num_value_heads, self.value_dim),
        }
        if self.gate_rank:
            buffers["delta_times"] = (self.num_value_heads * self.key_dim,)
            buffers["delta_gate"] = (self.value_size,)
        return buffers

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        rows = 5 * step.tokens * self.conv_size * _FLOAT32_BYTES
        return step.product_bytes(self.value_size) + rows

    @override
    def load(self, loader: LayerLoader) -> DeltaNet:
        return DeltaNet(self.on_rank(loader.shard), loader)


class DeltaNet(SubLayer):
    """A gated DeltaNet with its weights.

    Args:
        config: of this rank.
        loader: of the layer.
    """

    def __init__(self, config: DeltaNetConfig, loader: LayerLoader) -> None:
        from quire.kernels.layers.recurrence import DeltaHeads

        super().__init__(config, loader)
        self.project = loader.linear("delta_in")
        self.gates = loader.linear("delta_gates", is_quantized=False)
        self.output = loader.linear("delta_out", is_summed=True)
        self._taps = conv_taps(loader, "delta_conv")
        self.times = loader.linear("delta_times", is_quantized=False) if config.gate_rank else None
        self.gate = loader.linear("delta_gate", is_quantized=False) if config.gate_rank else None
        decay, time_bias, norm = map(loader.tensor, ("delta_decay", "delta_time_bias", "delta_norm"))
        assert decay is not None
        assert time_bias is not None
        assert norm is not None
        self._heads = DeltaHeads(
            config.num_key_heads,
            config.num_value_heads,
            config.key_dim,
            config.value_dim,
            decay=-decay.flatten().exp(),
            time_bias=time_bias.view(config.num_value_heads, -1),
            max_strength=config.max_strength,
        )
        self._norm = norm
        self._eps = config.norm_eps or loader.model.norm_eps
        self._config = config
        self._index = loader.index
        self._kernels = loader.kernels

    @property
    @override
    def kind(self) -> Hashable:
        linears = self.project, self.gates, self.times, self.gate, self.output
        return type(self), *(None if linear is None else linear.kind for linear in linears)

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        config, batch, state = self._config, step.batches[0], step.state(self._index)
        attended = buffers["delta_out"]
        projected = self.project(inputs, out=buffers["delta_in"])
        gates = self.gates(inputs, out=buffers["delta_gates"])
        strengths, times = gates[:, : config.num_value_heads], gates[:, config.num_value_heads :]
        gate = projected[:, config.conv_size :]
        if self.times is not None and self.gate is not None:
            gate = self.gate(times[:, config.gate_rank :], out=buffers["delta_gate"])
            times = self.times(times[:, : config.gate_rank], out=buffers["delta_times"])
        qkv = self._kernels.causal_conv(
            projected[:, : config.conv_size], self._taps, state["conv"], batch, activation="silu"
        )
        self._kernels.gated_delta_rule(
            qkv, strengths, times, state["memory"], batch, heads=self._heads, out=attended
        )
        normed = self._kernels.apply_gate(
            attended,
            gate.view(attended.shape),
            activation="sigmoid" if config.gate_rank else "silu",
            norm=self._norm,
            eps=self._eps,
        )
        return self.output(normed.flatten(1), out=out)
