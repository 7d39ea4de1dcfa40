"""The mixture of experts in place of a feed-forward layer (Mixtral, Qwen3-MoE)."""

from __future__ import annotations

import torch

from quire.kernels import dispatch as kernels


def mixture_of_experts(
    inputs: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    experts_per_token: int,
    normalize: bool,
    activation: str,
) -> torch.Tensor:
    """Return the weighted sum of each token's best experts, added from the best to the least.

    That order is the token's own, so its bits do not depend on the other tokens.

    Args:
        inputs: [T, hidden].
        router: [experts, hidden].
        gate_up: [experts, 2 * size, hidden].
        down: [experts, hidden, size].
        experts_per_token: how many experts a token goes to (k).
        normalize: scale a token's k weights to sum to 1.
        activation: as for `gated_activation`.
    """
    scores = kernels.linear(inputs, router).float()
    probabilities = (scores - scores.amax(-1, keepdim=True)).exp()
    best, chosen = probabilities.topk(experts_per_token, dim=-1)  # [T, k]
    total = best if normalize else probabilities
    weights = best / _sum_in_order(total).unsqueeze(-1)
    outputs = torch.empty(*chosen.shape, inputs.shape[-1])  # [T, k, hidden] float32
    for expert in sorted(set(chosen.flatten().tolist())):
        token, rank = torch.where(chosen == expert)
        inner = kernels.gated_activation(kernels.linear(inputs[token], gate_up[expert]), activation)
        outputs[token, rank] = kernels.linear(inner, down[expert]).float()
    weighted = outputs.mul_(weights.unsqueeze(-1))
    return _sum_in_order(weighted.transpose(1, 2)).to(inputs.dtype)


def _sum_in_order(values: torch.Tensor) -> torch.Tensor:
    """Add up the last dimension from first to last."""
    total = values[..., 0].clone()
    for index in range(1, values.shape[-1]):
        total += values[..., index]
    return total
