"""All experts of a layer at once: as many kernels, of the same sizes, whatever rows choose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from typing_extensions import override

from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.act_order import take_order
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.experts.matrices import ExpertMatrices
from quire.kernels.triton.experts.products import add_results_kernel
from quire.kernels.triton.experts.routing import MAX_EXPERTS, route
from quire.kernels.triton.linear.dense import linear
from quire.kernels.triton.tensors import check_rows

_BLOCK = 1024  # features of a program that adds up results


class FusedExperts(Experts):
    """The host does not wait, and only the number of rows decides what is launched.

    Of experts that are equally likely, the first are chosen.

    Args:
        weights: those of each expert.
        mixture: what to compute.
        memory: brings weights to the device; None: memory of its own.
        options: the other ones of `KernelSet.linear`.

    Raises:
        ValueError: there are more experts than the kernels have room for, or others than the mixture's; they
            differ in shape or in how they are held; or their two matrices do not fit each other.
    """

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        mixture: Mixture,
        *,
        memory: WeightMemory | None = None,
        **options: Any,
    ) -> None:
        if not 1 <= mixture.experts_per_token <= mixture.num_experts <= MAX_EXPERTS:
            raise ValueError(
                f"each row goes to {mixture.experts_per_token} of {mixture.num_experts} experts; 1 to all of "
                f"at most {MAX_EXPERTS} are supported"
            )
        memory = memory or WeightMemory()
        self._mixture = mixture
        up, down = self._gate_up, self._down = [ExpertMatrices(mixture.num_experts) for _ in range(2)]
        for number, expert in zip(range(mixture.num_experts), weights, strict=True):
            for held, matrix, bias in zip((up, down), expert[:2], expert[2:], strict=True):
                parts, order = take_order(matrix, memory)
                held.set(number, linear(parts, bias, memory=memory, **options), order)
        per_input = 2 if mixture.is_gated else 1
        if (up.in_features, up.out_features) != (down.out_features, per_input * down.in_features):
            raise ValueError(
                f"experts take {up.in_features} features to {up.out_features}, and then {down.in_features} "
                f"to {down.out_features}; the first must give {per_input} for each input of the second"
            )

    @override
    def __call__(
        self, rows: torch.Tensor, scores: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            out = rows.new_empty(rows.shape)
        self._check(rows, scores, out)
        if not len(rows):
            return out
        k = self._mixture.experts_per_token
        num_pairs = len(rows) * k
        # Most experts that get rows get less than twice the mean: then one tile has them.
        rows_of_expert = -(-2 * num_pairs // self._mixture.num_experts)
        tiles = self._gate_up.tile(rows_of_expert), self._down.tile(rows_of_expert)
        routing = route(scores, self._mixture, tiles[0].rows)
        inner = rows.new_empty(num_pairs, self._down.in_features)
        self._gate_up.multiply(
            rows,
            routing,
            tiles[0],
            inner,
            pairs_per_row=k,
            activation=self._mixture.activation,
            is_gated=self._mixture.is_gated,
        )
        results = rows.new_empty(num_pairs, self._down.out_features)
        self._down.multiply(inner, routing, tiles[1], results)
        num_features = results.shape[1]
        block = min(next_power_of_2(num_features), _BLOCK)
        add_results_kernel[len(rows), -(-num_features // block)](
            results, routing.weights, out, num_features, out.stride(0), K=k, BLOCK=block
        )
        return out

    def _check(self, rows: torch.Tensor, scores: torch.Tensor, out: torch.Tensor) -> None:
        for name, tensor, width in (
            ("rows", rows, self._gate_up.in_features),
            ("scores", scores, self._mixture.num_experts),
            ("out", out, self._down.out_features),
        ):
            check_rows(name, tensor)
            if tensor.shape != (len(rows), width):
                raise ValueError(f"{name} is {list(tensor.shape)}; it must be {[len(rows), width]}")
