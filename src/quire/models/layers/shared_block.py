"""A Mamba-2 behind a transformer block that layers share (Glorioso et al. 2024, The Zamba2 Suite).

The block reads the residual stream and the embeddings that it began with. What it makes is added to what the
Mamba-2 reads, and not to the stream. Its projections have low-rank adapters, which layers do not share.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.kv.cache.page_layout import KVLayerSpec
from quire.kv.cache.state_layout import StateSpec
from quire.models.config import RopeConfig
from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer, SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.mamba import MambaConfig
from quire.models.layers.recurrence import RecurrentConfig
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

_SHARED_NORMS = "block_norm", "block_inner_norm"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockConfig(RecurrentConfig):
    """The numbers of both, whose parts have no norms; it reads the residual stream as it is."""

    mamba: MambaConfig = dataclasses.field(default_factory=MambaConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    """Of the block; it reads twice as many features as the residual stream has."""
    feed_forward: FeedForwardConfig = dataclasses.field(default_factory=FeedForwardConfig)  # of the block
    first_layer: int = 0  # of those that share the block; has its weights in checkpoints
    use: int = 0  # number of the layer among all with a block, by which adapters are called
    adapter_rank: int = 0  # features of an adapter
    adapts_attention: bool = False  # not only the feed-forward layer has adapters
    pre_norm: bool = False

    weight_names: ClassVar[Mapping[str, str]] = {
        **{name: f"mamba_decoder.{published}" for name, published in MambaConfig.weight_names.items()},
        **{
            name: f"shared_transformer.{published}"
            for name, published in AttentionConfig.weight_names.items()
        },
        **{
            f"{name}_adapter_{end}": f"shared_transformer.self_attn.linear_{name}_adapter_list.{{}}.{number}"
            for name in "qkv"
            for number, end in enumerate(("in", "out"))
        },
        "gate_up": "shared_transformer.feed_forward.gate_up_proj",
        "down": "shared_transformer.feed_forward.down_proj",
        "gate_up_adapter_in": "shared_transformer.feed_forward.gate_up_proj_adapter_list.{}.0",
        "gate_up_adapter_out": "shared_transformer.feed_forward.gate_up_proj_adapter_list.{}.1",
        "block_norm": "shared_transformer.input_layernorm",
        "block_inner_norm": "shared_transformer.pre_ff_layernorm",
        "block_output": "linear",
        "mamba_input_norm": "mamba_decoder.input_layernorm",
    }

    @property
    @override
    def inner(self) -> tuple[SubLayerConfig, ...]:
        return self.attention, self.feed_forward

    @property
    @override
    def kv(self) -> KVLayerSpec | None:
        return self.attention.kv

    @property
    @override
    def state(self) -> StateSpec | None:
        return self.mamba.state

    @property
    @override
    def rope(self) -> RopeConfig | None:
        return self.attention.rope

    @property
    @override
    def reads_embeddings(self) -> bool:
        return True

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        yield from self.mamba.weights(hidden_size, names, shard)
        yield LayerWeight("mamba_input_norm", (("mamba_input_norm.weight", (hidden_size,)),))
        output = ("block_output.weight", (hidden_size, hidden_size))
        yield LayerWeight("block_output", (output,), is_quantized=True)
        for name, size in zip(_SHARED_NORMS, (self.attention.input_size, hidden_size), strict=True):
            norm = LayerWeight(name, ((f"{name}.weight", (size,)),))
            yield dataclasses.replace(norm, layer=self.first_layer)
        for weight in itertools.chain(
            self.attention.weights(hidden_size, names, shard),
            self.feed_forward.weights(hidden_size, names, shard),
        ):
            yield dataclasses.replace(weight, layer=self.first_layer)
            if weight.field == "gate_up" or (weight.field == "qkv" and self.adapts_attention):
                yield from self._adapters(weight)

    def _adapters(self, weight: LayerWeight) -> Iterator[LayerWeight]:
        """Yield the adapters of a matrix; ranks have their outputs as they have those of the matrix."""
        into, back = [], []
        for source, (outputs, inputs) in weight.sources:
            name = f"{source.removesuffix('.weight')}_adapter.{self.use}"
            into.append((f"{name}.in.weight", (self.adapter_rank, inputs)))
            back.append((f"{name}.out.weight", (outputs, self.adapter_rank)))
        layer, sections = self.first_layer, weight.sections
        yield LayerWeight(f"{weight.field}_adapter_in", tuple(into), layer=layer)
        yield LayerWeight(f"{weight.field}_adapter_out", tuple(back), sections=sections, layer=layer)

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(
            self,
            mamba=self.mamba.on_rank(shard),
            attention=self.attention.on_rank(shard),
            feed_forward=self.feed_forward.on_rank(shard),
        )

    @override
    def check_divisible(self, size: int) -> None:
        self.mamba.check_divisible(size)
        self.attention.check_divisible(size)

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        size = self.attention.input_size
        own = {"block_inputs": (size,), "block": (size // 2,)}
        return self.mamba.buffers() | self.attention.buffers() | self.feed_forward.buffers() | own

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        embeddings = step.tokens * step.hidden_size * step.item
        widest = max(2 * self.feed_forward.inner_size, self.attention.output_size)
        adapters = step.tokens * (3 * self.adapter_rank + widest) * step.item
        block = max(self.attention.peak_bytes(step), self.feed_forward.peak_bytes(step) + adapters)
        return embeddings + max(block, self.mamba.peak_bytes(step))

    @override
    def load(self, loader: LayerLoader) -> SharedBlock:
        return SharedBlock(self, loader)


class SharedBlock(SubLayer):
    """Both with their weights.

    Args:
        config: their numbers.
        loader: of the layer.
    """

    def __init__(self, config: SharedBlockConfig, loader: LayerLoader) -> None:
        super().__init__(config, loader)
        self.mamba = config.mamba.load(loader)
        self.attention = config.attention.load(loader)
        self.feed_forward = config.feed_forward.load(loader)
        self.block_output = loader.linear("block_output")
        self.buffers |= self.mamba.buffers | self.attention.buffers | self.feed_forward.buffers
        self._norms = [loader.norm(name) for name in (*_SHARED_NORMS, "mamba_input_norm")]
        self._kernels, self._eps = loader.kernels, loader.model.norm_eps

    @property
    @override
    def kind(self) -> Hashable:
        parts = self.mamba, self.attention, self.feed_forward
        return type(self), *(part.kind for part in parts), self.block_output.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        both, block = buffers["block_inputs"], buffers["block"]
        before, between, behind = self._norms
        assert step.embeddings is not None
        both[:, : inputs.shape[1]] = inputs
        both[:, inputs.shape[1] :] = step.embeddings
        self._normalize(both, before)
        attended = self.attention.forward(both, step, buffers, out)
        self._normalize(attended, between)
        self.feed_forward.forward(attended, step, buffers, block)
        made = self.block_output(block, out=out)
        sums = self._kernels.add_rms_norm(made, inputs, behind, eps=self._eps, out=block)
        return self.mamba.forward(sums, step, buffers, out)

    def _normalize(self, rows: torch.Tensor, weight: torch.Tensor | None) -> None:
        assert weight is not None
        self._kernels.rms_norm(rows, weight, eps=self._eps, out=rows)
