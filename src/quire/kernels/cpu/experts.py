"""All experts of a layer in one native call: pairs of a row and an expert are sorted by expert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from typing_extensions import override

from quire.kernels.cpu import _native
from quire.kernels.cpu.linear import GATED_COLUMNS, PackedMatrix, row_numbers
from quire.kernels.cpu.tensors import (
    Form,
    address,
    check_vector,
    checked_once,
    float_type,
    form_of,
    row_stride,
)
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.layers.weights import num_rows

_ACTIVATIONS = {kind.name: kind.value for kind in _native.Activation}


class PackedExperts(Experts):
    """Experts whose inputs are in their own order; see native/src/experts.h.

    Gates, what they are multiplied with, and the activation are one product, and a row is quantized once for
    all of its experts.

    Args:
        weights: those of each expert.
        mixture: what to compute.
        memory: where packed weights go; None: memory of its own.
        options: the other ones of `KernelSet.linear`.

    Raises:
        TypeError: see `PackedMatrix`.
        ValueError: see `PackedMatrix`; or experts differ in shape or in how they are held, or there are
            others than the mixture's.
    """

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        mixture: Mixture,
        *,
        memory: WeightMemory | None = None,
        **options: Any,
    ) -> None:
        if mixture.activation not in _ACTIVATIONS:
            raise ValueError(
                f"the activation is {mixture.activation}; it must be one of {', '.join(_ACTIVATIONS)}"
            )
        memory = memory or WeightMemory()
        self._mixture = mixture
        self._gate_ups: list[PackedMatrix] = []
        self._downs: list[PackedMatrix] = []
        biases: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        for _, expert in zip(range(mixture.num_experts), weights, strict=True):
            inner = sum(map(num_rows, expert.gate_up)) // 2
            self._gate_ups.append(
                PackedMatrix(expert.gate_up, gated_features=inner, memory=memory, **options)
            )
            self._downs.append(PackedMatrix(expert.down, memory=memory, **options))
            self._check_last(inner)
            gate_up_bias = None if expert.gate_up_bias is None else _by_turns(expert.gate_up_bias, inner)
            biases.append((gate_up_bias, expert.down_bias))
        self._hidden = self._gate_ups[0].layout[2]
        self._gate_up_bias, self._down_bias = map(_stacked, zip(*biases, strict=True))
        self._native = _native.PackedExperts(
            [matrix.native for matrix in self._gate_ups],
            [matrix.native for matrix in self._downs],
            address(self._gate_up_bias),
            address(self._down_bias),
            _ACTIVATIONS[mixture.activation],
            _routing(mixture),
        )

    def _check_last(self, inner: int) -> None:
        """Raise ValueError unless the last expert is like the first, and its matrices fit each other."""
        number, gate_up, down = len(self._downs) - 1, self._gate_ups[-1].layout, self._downs[-1].layout
        first = self._gate_ups[0].layout, self._downs[0].layout
        if (gate_up, down) != first:
            raise ValueError(
                f"expert {number} is held as {(gate_up, down)}, expert 0 as {first} (format, outputs, inputs "
                "and group size of its matrices); the native kernels need all experts of a layer to have one "
                "shape and one quantization"
            )
        if down[1:3] != (gate_up[2], inner):
            raise ValueError(
                f"an expert takes {gate_up[2]} features to {inner} with gates, and then {down[2]} to "
                f"{down[1]}; the second matrix must take what the first gives, back to as many"
            )

    @override
    def __call__(
        self, rows: torch.Tensor, scores: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            out = rows.new_empty(rows.shape)
        row_type, stride, count, out_type, out_stride = row_numbers(
            (rows.shape, rows.stride(), rows.dtype, rows.is_cpu),
            (out.shape, out.stride(), out.dtype, out.is_cpu),
            self._hidden,
            self._hidden,
        )
        score_type, score_stride = _score_numbers(
            (scores.shape, scores.stride(), scores.dtype, scores.is_cpu), count, self._mixture.num_experts
        )
        self._native.compute(
            rows.data_ptr(),
            row_type,
            stride,
            count,
            scores.data_ptr(),
            score_type,
            score_stride,
            out.data_ptr(),
            out_type,
            out_stride,
        )
        return out


def _routing(mixture: Mixture) -> _native.Routing:
    """Return how experts are chosen; the tensors stay the mixture's."""
    count, k = mixture.num_experts, mixture.experts_per_token
    groups, groups_per_token = mixture.num_groups, mixture.groups_per_token
    if not 1 <= k <= count <= _native.MAX_EXPERTS or count % groups or not 1 <= groups_per_token <= groups:
        raise ValueError(
            f"{k} of {count} experts are chosen, from {groups_per_token} of {groups} groups; there must be "
            f"at most {_native.MAX_EXPERTS} experts, as many in each group, and no more chosen than there are"
        )
    for name in ("correction", "expert_scales"):
        tensor = getattr(mixture, name)
        if tensor is not None:
            check_vector(name, form_of(tensor), count)
    return _native.Routing(
        _native.Scoring[mixture.scoring].value,
        count,
        k,
        mixture.normalize,
        mixture.jitter,
        address(mixture.correction),
        groups,
        groups_per_token,
        mixture.scale,
        address(mixture.expert_scales),
    )


@checked_once
def _score_numbers(scores: Form, num_rows: int, num_experts: int) -> tuple[int, int]:
    """Return the type and the stride of scores."""
    return float_type("scores", scores), row_stride("scores", scores, (num_rows, num_experts))


def _by_turns(bias: torch.Tensor, inner: int) -> torch.Tensor:
    """Return biases [2 * inner] of gates and what they are multiplied with as panels have their columns."""
    padded = torch.zeros(2, -(-inner // GATED_COLUMNS) * GATED_COLUMNS)
    padded[:, :inner] = bias.view(2, inner)
    return padded.view(2, -1, GATED_COLUMNS).transpose(0, 1).flatten()


def _stacked(biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the biases of all experts, [experts, n] float32; None: they have none."""
    found = [bias for bias in biases if bias is not None]
    if found and len(found) != len(biases):
        raise ValueError("some experts have biases and others do not; the native kernels need all or none")
    return torch.stack(found).float().contiguous() if found else None
