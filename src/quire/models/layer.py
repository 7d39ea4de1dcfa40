"""The layers of a decoder: sub-layers with their weights, cache, memory and reductions.

Nothing here, nor where a sub-layer is described, needs torch: only what a checkpoint is loaded into does.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import torch

    from quire.config import SchedulerConfig
    from quire.kernels.attention.batch import AttentionBatch
    from quire.kernels.attention.kv_layer import KVLayer
    from quire.kernels.interface import KernelSet
    from quire.kernels.layers.experts import Experts, Mixture
    from quire.kernels.layers.linear import Linear
    from quire.kv.cache.page_layout import KVLayerSpec
    from quire.kv.cache.state_layout import StateSpec
    from quire.models.config import ModelConfig, RopeConfig
    from quire.models.parallel import TensorParallel
    from quire.models.shard import Shard

Angles = tuple["torch.Tensor", "torch.Tensor"]  # cos and sin, each [T, rotary_dim / 2] float32
_FLOAT32_BYTES = 4

Section = tuple[int, tuple[range, ...]]
"""Length of a part of a tensor along an axis, and what of it a rank holds."""


def joined_section(sections: Sequence[Section]) -> Section:
    """Return sections, one after the other, as one."""
    starts = itertools.accumulate((length for length, _ in sections), initial=0)
    ranges = tuple(
        range(start + held.start, start + held.stop, held.step)
        for start, (_, parts) in zip(starts, sections, strict=False)
        for held in parts
    )
    return sum(length for length, _ in sections), ranges


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeight:
    """A tensor of a sub-layer: tensors of the checkpoint, one after the other along the first dimension.

    Args:
        field: its name among the tensors of the layer.
        sources: name and shape of each tensor of the checkpoint. A name is "q.weight" where the sub-layer or
            the family says what "q" is called, "expert.3.gate.weight" if that name has a place for a number.
        axis: along which ranks divide it.
        sections: the parts of the sources along `axis`, in turns; none: every rank has all.
        is_quantized: whether it is a matrix that may be held quantized.
        is_of_first_rank: whether only rank 0 has it: a bias of what is summed over the ranks.
        layer: whose tensors of the checkpoint the sources are, if several layers share them; None: its own.
    """

    field: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    axis: int = 0
    sections: tuple[Section, ...] = ()
    is_quantized: bool = False
    is_of_first_rank: bool = False
    layer: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The largest step that memory is estimated for, and what computes it."""

    scheduler: SchedulerConfig  # with `max_num_batched_tokens` decided
    tokens: int  # rows of the step's tensors
    max_model_len: int
    hidden_size: int
    item: int  # bytes of an activation
    is_native: bool
    on_gpu: bool
    num_threads: int

    def product_bytes(self, *widths: int) -> int:
        """Return the bytes of the widest of hidden states and rows of these sizes, as products read them."""
        return self.tokens * max(self.hidden_size, *widths) * _FLOAT32_BYTES

    def reference_gate_bytes(self, inner_size: int) -> int:
        """Return the bytes that the reference kernels take for norms and a gated activation, in float32."""
        if self.is_native or self.on_gpu:
            return 0
        return self.tokens * (2 * self.hidden_size + 3 * inner_size) * _FLOAT32_BYTES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubLayerConfig(ABC):
    """One sub-layer: norms, and between them what a subclass computes, added to the residual stream."""

    pre_norm: bool = True  # its input is normalized
    post_norm: bool = False  # its output is normalized
    is_parallel: bool = False
    """It reads the residual stream as the sub-layer before it did, without that one's result; if it has no
    norm of its own, it reads that one's normalized input.
    """
    output_scale: float = 1.0  # multiplies what it adds to the residual stream

    norms_stream: bool = False
    """The residual stream, with its result, is normalized, and goes on so (Vaswani et al. 2017)."""

    scales_stream: bool = False
    """The residual stream, with its result, is multiplied by a number of the layer's, whose last it is."""

    role: ClassVar[str]  # the name of its norms: "attention" if it mixes tokens, otherwise mostly "mlp"
    weight_names: ClassVar[Mapping[str, str]]  # in checkpoints, where a family has no others

    @abstractmethod
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        """Yield the tensors beside the norms of its input and output.

        Args:
            hidden_size: features of the residual stream.
            names: names of its weights in the checkpoint; their number may depend on that.
            shard: whose part the sections say.
        """

    @abstractmethod
    def on_rank(self, shard: Shard) -> Self:
        """Return what a rank computes of it."""

    def check_divisible(self, size: int) -> None:  # noqa: B027 - many can be divided in any case
        """Raise `ConfigError` if it cannot be divided among `size` ranks; the message has possible sizes."""

    @property
    def inner(self) -> tuple[SubLayerConfig, ...]:
        """Sub-layers that it has within itself, whose numbers are checked as its own."""
        return ()

    @property
    def kv(self) -> KVLayerSpec | None:
        """Its KV per token; None: it has none."""
        return None

    @property
    def state(self) -> StateSpec | None:
        """What it keeps of a sequence, however long that is; None: nothing."""
        return None

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary frequencies whose angles it needs."""
        return None

    @property
    def is_causal(self) -> bool:
        """Whether no result depends on a later token; otherwise each prompt is computed in one step."""
        return True

    @property
    def reads_embeddings(self) -> bool:
        """Whether it reads what the residual stream began with, see `Step.embeddings`."""
        return False

    def buffers(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes, for each token, of intermediate results that are kept from step to step.

        Sub-layers share the memory of those of one name.
        """
        return {}

    @abstractmethod
    def peak_bytes(self, step: StepSizes) -> int:
        """Return its peak memory in bytes, besides its weights and buffers."""

    @abstractmethod
    def load(self, loader: LayerLoader) -> SubLayer:
        """Return it with its weights, as `loader.shard` computes it."""

    def scale_weights(self) -> Iterator[LayerWeight]:
        """Yield what the residual stream is multiplied by."""
        if self.scales_stream:
            yield LayerWeight("stream_scale", (("stream_scale", (1,)),))

    def norm_weights(self, hidden_size: int) -> Iterator[LayerWeight]:
        """Yield the norms of its input and output, and of the residual stream behind it."""
        for is_there, name in (
            (self.pre_norm, f"{self.role}_norm"),
            (self.post_norm, f"{self.role}_post_norm"),
            (self.norms_stream, f"{self.role}_stream_norm"),
        ):
            if is_there:
                yield LayerWeight(name, ((f"{name}.weight", (hidden_size,)),))


@dataclasses.dataclass(frozen=True, slots=True)
class LayerConfig:
    """A layer of a checkpoint: its sub-layers, in order. At most one writes KV, and one keeps a state."""

    parts: tuple[SubLayerConfig, ...]

    @property
    def kv(self) -> KVLayerSpec | None:
        """Its KV per token; None: it has none."""
        return next((part.kv for part in self.parts if part.kv is not None), None)

    @property
    def state(self) -> StateSpec | None:
        """What it keeps of a sequence; None: nothing."""
        return next((part.state for part in self.parts if part.state is not None), None)

    def changed(self, kind: type[Any], **changes: Any) -> LayerConfig:
        """Return a layer whose sub-layers of `kind` have other values in some fields."""
        return LayerConfig(
            tuple(
                dataclasses.replace(part, **changes) if isinstance(part, kind) else part
                for part in self.parts
            )
        )


class Norm(NamedTuple):
    """A norm of the residual stream, or of what is added to it."""

    weight: torch.Tensor  # [hidden] float32
    bias: torch.Tensor | None = None  # [hidden] float32, of a layer norm; None: it is an RMS norm


class LayerLoader(Protocol):
    """The weights of one layer, as sub-layers take them; the fields are those of their `LayerWeight`s."""

    index: int  # of the layer
    model: ModelConfig  # the whole one
    ropes: tuple[RopeConfig, ...]  # its `ropes`
    kernels: KernelSet
    shard: Shard
    parallel: TensorParallel | None  # the ranks; None: there is one

    def norm(self, field: str) -> torch.Tensor | None:
        """Return a norm's weight in float32, with the model's `norm_offset`; None: there is none."""

    def unit_norm(self, size: int) -> torch.Tensor:
        """Return the weights [size] of a norm without any, in float32."""

    def tensor(self, field: str) -> torch.Tensor | None:
        """Return a tensor in float32; None: there is none."""

    def residual_norm(self, field: str) -> Norm | None:
        """Return a norm of the model's `norm_kind`; None: there is none."""

    def linear(self, field: str, *, is_quantized: bool = True, is_summed: bool = False) -> Linear:
        """Return the dense layer of a matrix, with the bias `<field>_bias` if there is one.

        So are low-rank adapters: `<field>_adapter_in` makes the features of each, and `<field>_adapter_out`
        has, one below another, what makes outputs of them. A matrix that layers share is loaded once.

        Args:
            field: of the matrix.
            is_quantized: whether the quantization that was asked for applies.
            is_summed: whether ranks have parts of its inputs, so that their results are summed.
        """

    def linears(self, field: str, matrices: Callable[[torch.Tensor], Iterable[torch.Tensor]]) -> list[Linear]:
        """Return the dense layers of matrices that are made of one, in the model's type.

        Args:
            field: of the matrix.
            matrices: returns those of its rows in floating point.
        """

    def experts(self, gate_up: str, down: str, mixture: Mixture) -> Experts:
        """Return the experts whose matrices are those two fields, summed over the ranks."""


@dataclasses.dataclass(slots=True, frozen=True)
class Step:
    """The inputs of a forward pass to its sub-layers."""

    batches: Sequence[AttentionBatch]  # of each cache group, alike but for where its blocks are
    angles: Sequence[Angles]  # of each of the model's `ropes`
    query_scales: Sequence[torch.Tensor | None]  # of each of them, [T, 1, 1] float32; None: 1
    kv: Sequence[KVLayer]  # of each layer; of those without KV, nothing to touch
    per_layer: torch.Tensor | None = None  # [T, layers, per_layer_size], see `PerLayerInputs`
    embeddings: torch.Tensor | None = None  # [T, hidden], what the stream began with; None: nobody reads it

    def state(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return a recurrent layer's tensors of all states, by the names of its `StatePart`s."""
        states = self.batches[0].states
        assert states is not None
        return states.layers[layer]


class SubLayer(ABC):
    """A sub-layer with its weights. Norms are those around it, applied by the decoder.

    Args:
        config: what a rank computes.
        loader: has the norms.
    """

    def __init__(self, config: SubLayerConfig, loader: LayerLoader) -> None:
        self.pre_norm = loader.residual_norm(f"{config.role}_norm") if config.pre_norm else None
        self.post_norm = loader.residual_norm(f"{config.role}_post_norm") if config.post_norm else None
        self.stream_norm = loader.residual_norm(f"{config.role}_stream_norm") if config.norms_stream else None
        self.stream_scale = loader.tensor("stream_scale") if config.scales_stream else None
        self.buffers = config.buffers()

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """Equal for sub-layers that the same kernels compute, see `Linear.kind`."""

    @abstractmethod
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        """Return what is added to the residual stream.

        Args:
            inputs: [T, hidden], normalized if the layer does that.
            step: which tokens these are.
            buffers: those that `buffers` names, [T, *shape] each, to be used freely.
            out: [T, hidden], for the result.
        """
