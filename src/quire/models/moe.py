"""The mixture of experts in place of a feed-forward layer (Mixtral, Qwen3-MoE)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from quire.kernels.interface import KernelSet
from quire.kernels.linear import Linear


class Expert(NamedTuple):
    """One feed-forward layer of a mixture."""

    gate_up: Linear  # to 2 * size, gate first
    down: Linear


def mixture_of_experts(
    inputs: torch.Tensor,
    router: Linear,
    experts: Sequence[Expert],
    kernels: KernelSet,
    *,
    experts_per_token: int,
    normalize: bool,
    activation: str,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's best experts, added from the best to the least.

    That order is the token's own, so its bits do not depend on the other tokens. Waits for the device: the
    experts that tokens have chosen are run one after the other.

    Args:
        inputs: [T, hidden].
        router: to one score per expert.
        experts: all of them.
        kernels: compute the experts' activations.
        experts_per_token: how many experts a token goes to (k).
        normalize: scale a token's k weights to sum to 1.
        activation: as for `gated_activation`.
        sum_over_ranks: adds up what the ranks' parts of the experts return; None: there is one rank.
    """
    scores = router(inputs).float()
    probabilities = (scores - scores.amax(-1, keepdim=True)).exp()
    best, chosen = probabilities.topk(experts_per_token, dim=-1)  # [T, k]
    total = best if normalize else probabilities
    weights = best / _sum_in_order(total).unsqueeze(-1)
    outputs = torch.empty(*chosen.shape, inputs.shape[-1], device=inputs.device)  # [T, k, hidden] float32
    for number in sorted(set(chosen.flatten().tolist())):
        token, rank = torch.where(chosen == number)
        expert = experts[number]
        inner = kernels.gated_activation(expert.gate_up(inputs[token]), activation)
        outputs[token, rank] = expert.down(inner).float()
    weighted = outputs.mul_(weights.unsqueeze(-1))
    result = _sum_in_order(weighted.transpose(1, 2))
    return (result if sum_over_ranks is None else sum_over_ranks(result)).to(inputs.dtype)


def _sum_in_order(values: torch.Tensor) -> torch.Tensor:
    """Add up the last dimension from first to last."""
    total = values[..., 0].clone()
    for index in range(1, values.shape[-1]):
        total += values[..., index]
    return total
