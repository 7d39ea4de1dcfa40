"""A feed-forward layer and a mixture of experts that read the same residual stream, as in Gemma 4's 26B-A4B.

Each has norms of its own around it, and the router another one. Their sum is what is normalized and added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes
from quire.models.layers.experts import ExpertsConfig, MixtureOfExperts
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

_NORMS = ("dense_norm", "dense_post_norm", "experts_norm", "experts_post_norm")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseAndExpertsConfig(ExpertsConfig):
    """The numbers of both; it reads the residual stream as it is."""

    dense: FeedForwardConfig = dataclasses.field(default_factory=FeedForwardConfig)  # without norms
    pre_norm: bool = False

    weight_names: ClassVar[Mapping[str, str]] = {
        **FeedForwardConfig.weight_names,
        "router": "router.proj",
        "router_norm": "router.scale",
        "expert_scales": "router.per_expert_scale",
        "expert_gate": "experts.{}.gate_proj",
        "expert_up": "experts.{}.up_proj",
        "expert_down": "experts.{}.down_proj",
        "dense_norm": "pre_feedforward_layernorm",
        "dense_post_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_post_norm": "post_feedforward_layernorm_2",
    }

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        yield from self.dense.weights(hidden_size, names, shard)
        yield from ExpertsConfig.weights(self, hidden_size, names, shard)
        yield LayerWeight("router_norm", (("router_norm", (hidden_size,)),))
        for name in _NORMS:
            yield LayerWeight(name, ((f"{name}.weight", (hidden_size,)),))

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(ExpertsConfig.on_rank(self, shard), dense=self.dense.on_rank(shard))

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        return self.dense.buffers()

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        rows = 2 * step.tokens * step.hidden_size * step.item
        return rows + max(self.dense.peak_bytes(step), ExpertsConfig.peak_bytes(self, step))

    @override
    def load(self, loader: LayerLoader) -> DenseAndExperts:
        return DenseAndExperts(self, loader)


class DenseAndExperts(MixtureOfExperts):
    """Both with their weights.

    Args:
        config: of all ranks.
        loader: of the layer.
    """

    def __init__(self, config: DenseAndExpertsConfig, loader: LayerLoader) -> None:
        super().__init__(config, loader)
        self.dense = config.dense.load(loader)
        self.buffers = self.dense.buffers
        self._kernels, self._eps = loader.kernels, loader.model.norm_eps
        router_norm, *norms = (loader.norm(name) for name in ("router_norm", *_NORMS))
        assert router_norm is not None
        self._router_norm = router_norm * loader.model.hidden_size**-0.5
        self._norms = norms

    @property
    @override
    def kind(self) -> Hashable:
        return super().kind, self.dense.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        dense_norm, dense_post_norm, experts_norm, experts_post_norm = self._norms
        scores = self.router(self._normalized(inputs, self._router_norm))
        rows = self._normalized(inputs, experts_norm)
        sum_of_experts = self.experts(rows, scores)
        self._normalized(sum_of_experts, experts_post_norm, out=sum_of_experts)
        rows = self._normalized(inputs, dense_norm, out=rows)
        result = self.dense.forward(rows, step, buffers, out)
        self._normalized(result, dense_post_norm, out=result)
        return self._kernels.add_rms_norm(result, sum_of_experts, None, eps=self._eps)

    def _normalized(
        self, rows: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert weight is not None
        return self._kernels.rms_norm(rows, weight, eps=self._eps, out=out)
