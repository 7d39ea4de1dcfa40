"""The mixture of experts: a router sends each token to some of many feed-forward layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from quire.kernels import bounds
from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer, SubLayerConfig
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

_FLOAT32_BYTES = 4
_ROUTING_TENSORS = 5  # float32 numbers for each score where experts are not simply the likeliest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(SubLayerConfig):
    """The numbers of one mixture of experts."""

    num_experts: int = 0
    experts_per_token: int = 0
    inner_size: int = 0  # features inside one expert
    normalize: bool = False  # the weights of a token's experts sum to 1
    activation: str = "silu"  # silu, gelu_tanh, gelu, relu2 or clamped_swiglu
    gated: bool = True  # as of `FeedForwardConfig`
    bias: bool = False  # the router and the projections have a bias
    latent_size: int = 0  # features that experts read and make, between two projections; 0: all
    latent_bias: bool = False  # the two projections have a bias
    scoring: str = "softmax"  # this and the next are as in `Mixture`
    jitter: float = 0.0
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    correction: tuple[int, ...] = ()  # shape of what is added to weights for the choice; (): nothing
    scales_inputs: bool = False
    """Not results are multiplied by a score, but what an expert reads, by its sigmoid; a token has one expert
    (Llama 4).
    """
    has_expert_scales: bool = False  # each expert's weight is multiplied by a number of its own

    role: ClassVar[str] = "mlp"
    weight_names: ClassVar[Mapping[str, str]] = {
        "router": "mlp.gate",
        "router_correction": "mlp.gate.e_score_correction_bias",
        "latent_in": "mlp.fc1_latent_proj",
        "latent_out": "mlp.fc2_latent_proj",
        "expert_gate": "mlp.experts.{}.gate_proj",
        "expert_up": "mlp.experts.{}.up_proj",
        "expert_down": "mlp.experts.{}.down_proj",
    }

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        """Experts lie one below another, [experts * 2 * size, n] and [experts * n, size].

        Without gates the first is [experts * size, n]; n is `latent_size` or `hidden_size`.
        """
        size, experts = self.inner_size, range(self.num_experts)
        features = self.latent_size or hidden_size
        inner = size, (shard.share(size),)
        parts = ("gate", "up") if self.gated else ("up",)
        gate_up = tuple((f"expert.{e}.{part}.weight", (size, features)) for e in experts for part in parts)
        down = tuple((f"expert.{e}.down.weight", (features, size)) for e in experts)
        yield LayerWeight("router", (("router.weight", (self.num_experts, hidden_size)),))
        if self.correction:
            yield LayerWeight("router_correction", (("router_correction", self.correction),))
        if self.has_expert_scales:
            yield LayerWeight("expert_scales", (("expert_scales", (self.num_experts,)),))
        yield LayerWeight("expert_gate_up", gate_up, sections=(inner,), is_quantized=True)
        yield LayerWeight("expert_down", down, axis=1, sections=(inner,), is_quantized=True)
        if self.latent_size:
            for field, outputs, inputs in (
                ("latent_in", features, hidden_size),
                ("latent_out", hidden_size, features),
            ):
                yield LayerWeight(field, ((f"{field}.weight", (outputs, inputs)),), is_quantized=True)
                if self.latent_bias:
                    yield LayerWeight(f"{field}_bias", ((f"{field}.bias", (outputs,)),))
        if self.bias:
            yield LayerWeight("router_bias", (("router.bias", (self.num_experts,)),))
            inner_biases, biases = (
                tuple((name.replace(".weight", ".bias"), shape[:1]) for name, shape in matrices)
                for matrices in (gate_up, down)
            )
            yield LayerWeight("expert_gate_up_bias", inner_biases, sections=(inner,))
            yield LayerWeight("expert_down_bias", biases, is_of_first_rank=True)

    @override
    def on_rank(self, shard: Shard) -> Self:
        return dataclasses.replace(self, inner_size=len(shard.share(self.inner_size)))

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        rows = step.product_bytes(self.inner_size) + step.reference_gate_bytes(self.inner_size)
        if self.scoring != "softmax" or self.correction or self.has_expert_scales:
            rows += step.tokens * _ROUTING_TENSORS * self.num_experts * _FLOAT32_BYTES
        hidden, inner, item = step.hidden_size, self.inner_size, step.item
        rows += step.tokens * (2 * self.latent_size + hidden * self.scales_inputs) * item
        if step.on_gpu:  # inner features, as they are and as they are multiplied, and results
            of_pair = (2 * inner + hidden) * item + bounds.GPU_PAIR_BYTES
            return rows + step.tokens * self.experts_per_token * of_pair
        if step.is_native:  # inputs as they are multiplied, inner features, results
            of_pair = (max(hidden, inner) + inner) * item + hidden * _FLOAT32_BYTES + bounds.NATIVE_PAIR_BYTES
            return rows + step.tokens * self.experts_per_token * of_pair
        # Experts compute one after the other, and one may get every token.
        outputs = self.experts_per_token * hidden * _FLOAT32_BYTES
        of_one = (2 * hidden + 3 * inner) * item + hidden * _FLOAT32_BYTES
        if self.activation == "clamped_swiglu":  # in plain torch
            of_one += 4 * inner * _FLOAT32_BYTES
        return rows + step.tokens * (outputs + of_one)

    @override
    def load(self, loader: LayerLoader) -> MixtureOfExperts:
        return MixtureOfExperts(self, loader)


class MixtureOfExperts(SubLayer):
    """A mixture of experts with its weights.

    Args:
        config: of all ranks.
        loader: of the layer.
    """

    def __init__(self, config: ExpertsConfig, loader: LayerLoader) -> None:
        from quire.kernels.layers.experts import Mixture

        super().__init__(config, loader)
        correction = loader.tensor("router_correction")
        mixture = Mixture(
            config.num_experts,
            config.experts_per_token,
            normalize=config.normalize,
            activation=config.activation,
            is_gated=config.gated,
            scoring=config.scoring,
            jitter=config.jitter,
            correction=None if correction is None else correction.flatten(),
            num_groups=config.num_groups,
            groups_per_token=config.groups_per_token,
            scale=config.scale,
            expert_scales=loader.tensor("expert_scales"),
        )
        self.router = loader.linear("router", is_quantized=False)
        self._apply_gate = loader.kernels.apply_gate if config.scales_inputs else None
        self._latent = [loader.linear(field) for field in ("latent_in", "latent_out") if config.latent_size]
        self.experts = loader.experts("expert_gate_up", "expert_down", mixture)

    @property
    @override
    def kind(self) -> Hashable:
        latent = tuple(linear.kind for linear in self._latent)
        return type(self), self.router.kind, type(self.experts), latent

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        scores = self.router(inputs)
        if self._apply_gate is not None:
            inputs = self._apply_gate(inputs.clone(), scores.amax(1, keepdim=True), activation="sigmoid")
        if not self._latent:
            return self.experts(inputs, scores, out=out)
        into, back = self._latent
        return back(self.experts(into(inputs), scores), out=out)
