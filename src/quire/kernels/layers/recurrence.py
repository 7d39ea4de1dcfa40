"""Recurrent layers in plain torch: what a token computes follows from itself and the state before it.

The tokens of a sequence are taken in order, and each is computed by the same operations on the same numbers.
So the bits do not depend on how a sequence is divided into steps, nor on the other sequences of a step.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from quire.kernels.attention.batch import AttentionBatch


@dataclasses.dataclass(slots=True, frozen=True)
class ConvRows:
    """Which inputs each token of a step is computed from, for filters of `K` taps.

    Inputs are numbered: first the K - 1 that each state keeps, sequence after sequence, then the step's T.

    Args:
        inputs: [K, T] for each tap the oldest first.
        kept: [S, K - 1] what each sequence keeps after the step.
    """

    inputs: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, num_taps: int) -> ConvRows:
        """Return those of a step, made once for each number of taps."""
        rows: ConvRows | None = batch.plans.get(("conv", num_taps))
        if rows is None:
            rows = batch.plans["conv", num_taps] = cls._of(batch.num_tokens, num_taps)
        return rows

    @classmethod
    def _of(cls, num_tokens: np.ndarray, num_taps: int) -> ConvRows:
        before, num_seqs = num_taps - 1, len(num_tokens)
        ends = np.cumsum(num_tokens)
        sequence = np.repeat(np.arange(num_seqs), num_tokens)
        token = np.arange(len(sequence))
        first = (ends - num_tokens)[sequence]

        def input_of(sequence: np.ndarray, place: np.ndarray, first: np.ndarray) -> torch.Tensor:
            """Return the inputs `place` tokens behind each sequence's first of this step."""
            in_state = (sequence + 1) * before + place
            return torch.from_numpy(np.where(place < 0, in_state, num_seqs * before + first + place))

        taps = np.arange(-before, 1)[:, None]
        kept = np.arange(-before, 0)
        return cls(
            input_of(sequence, token - first + taps, first),
            input_of(np.arange(num_seqs)[:, None], num_tokens[:, None] + kept, (ends - num_tokens)[:, None]),
        )


def causal_conv(
    rows: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    batch: AttentionBatch,
    *,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the convolution in float32, and keep the last inputs; see `KernelSet.causal_conv`."""
    num_taps = weight.shape[0]
    numbers = _numbers(batch)
    plan = ConvRows.of(batch, num_taps)
    inputs = torch.cat((_begun(state[numbers], batch).flatten(0, 1), rows))
    total = inputs[plan.inputs[0]].float() * weight[0]
    for tap in range(1, num_taps):
        total += inputs[plan.inputs[tap]].float() * weight[tap]
    if bias is not None:
        total += bias
    state[numbers] = inputs[plan.kept]
    return total


def _numbers(batch: AttentionBatch) -> torch.Tensor:
    assert batch.states is not None
    return torch.from_numpy(batch.states.numbers)


def _begun(states: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """Return sequences' states [S, ...], zeros for those that begin."""
    begins = batch.num_cached_tokens == 0
    if begins.any():
        states[torch.from_numpy(begins)] = 0
    return states
