"""Recurrent layers in plain torch: what a token computes follows from itself and the state before it.

The tokens of a sequence are taken in order, and each is computed by the same operations on the same numbers.
So the bits do not depend on how a sequence is divided into steps, nor on the other sequences of a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from quire.kernels.attention.batch import AttentionBatch


UNIT_EPS = 1e-6  # added to the square of a length
LINEAR_FROM = 20.0  # softplus(x) is x from here on, as in torch


def check_states(batch: AttentionBatch, num_states: int | None = None) -> None:
    """Raise unless a step's sequences have states of their own.

    Args:
        batch: the step.
        num_states: that there are; None: not known yet.

    Raises:
        TypeError: an array of the batch is of another type than `AttentionBatch` says.
        ValueError: it is of another shape, two sequences have the same state, or there are no states.
        IndexError: a number in one is out of range, or a state takes in more tokens than there are, or none.
    """
    if batch.states is None:
        raise ValueError("the batch has no states, which recurrent layers need")
    numbers, counts, taken_in = batch.states.numbers, batch.num_tokens, batch.num_state_tokens
    for name, array in (
        ("state numbers", numbers),
        ("num_tokens", counts),
        ("num_state_tokens", taken_in),
        ("num_cached_tokens", batch.num_cached_tokens),
    ):
        _check_array(name, array, len(counts))
    if not ((taken_in > 0) & (taken_in <= counts)).all():
        raise IndexError(
            f"states take in {taken_in.tolist()} of {counts.tolist()} tokens; of each at least 1"
        )
    if len(np.unique(numbers)) < len(counts):
        raise ValueError(f"state numbers are {numbers.tolist()}; each sequence must have its own")
    if num_states is not None and numbers.max(initial=-1) >= num_states:
        raise IndexError(f"a sequence has state {numbers.max()}; there are {num_states}")


def _check_array(name: str, array: npt.NDArray[np.int64], size: int) -> None:
    if array.dtype != np.int64:
        raise TypeError(f"{name} are {array.dtype}; they must be int64")
    if array.shape != (size,) or not array.flags.c_contiguous:
        raise ValueError(f"{name} are {list(array.shape)}; they must be [{size}] and contiguous")
    if array.min(initial=0) < 0:
        raise IndexError(f"{name} go down to {array.min()}; they must be at least 0")


@dataclasses.dataclass(slots=True, frozen=True)
class ConvRows:
    """Which inputs each token of a step is computed from, for filters of `K` taps.

    Inputs are numbered: first the K - 1 that each state keeps, sequence after sequence, then the step's T.

    Args:
        inputs: [K, T] for each tap the oldest first.
        kept: [S, K - 1] what each sequence's state keeps after the step.
    """

    inputs: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, num_taps: int) -> ConvRows:
        """Return those of a step, made once for each number of taps."""
        rows: ConvRows | None = batch.plans.get(("conv", num_taps))
        if rows is None:
            rows = batch.plans["conv", num_taps] = cls._of(batch.num_tokens, batch.num_state_tokens, num_taps)
        return rows

    @classmethod
    def _of(cls, num_tokens: np.ndarray, num_state_tokens: np.ndarray, num_taps: int) -> ConvRows:
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
            input_of(
                np.arange(num_seqs)[:, None], num_state_tokens[:, None] + kept, (ends - num_tokens)[:, None]
            ),
        )


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class DeltaHeads:
    """The heads of a gated DeltaNet; each key head serves equally many value heads, in order.

    Args:
        num_keys: heads of queries and keys.
        num_values: heads of values.
        key_dim: features of a head of queries and keys.
        value_dim: features of a head of values.
        decay: [num_values] float32, below 0: of each head's memory, per unit of time.
        time_bias: [num_values, times] float32, added to the time that a token takes before softplus; there is
            one time of a head, or one of each feature of its keys (Kimi Team 2025, Kimi Linear).
        max_strength: multiplies the sigmoid of the strength with which a token is written; above 1, a memory
            may turn around (Grazzi et al. 2024).
    """

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    decay: torch.Tensor
    time_bias: torch.Tensor
    max_strength: float = 1.0

    @property
    def times_per_head(self) -> int:
        """1, or `key_dim` if each row of a memory decays by itself."""
        return self.time_bias.shape[1]


def gated_delta_rule(
    qkv: torch.Tensor,
    strengths: torch.Tensor,
    times: torch.Tensor,
    state: torch.Tensor,
    batch: AttentionBatch,
    *,
    heads: DeltaHeads,
    out: torch.Tensor,
) -> None:
    """Token by token, so that all operations have one shape; see `KernelSet.gated_delta_rule`."""
    key_size = heads.num_keys * heads.key_dim
    for token, memory in _with_memory(state, batch):
        row = qkv[token].float()
        query, key, value = row[:key_size], row[key_size : 2 * key_size], row[2 * key_size :]
        query, key = (_unit(each.view(-1, heads.key_dim)) for each in (query, key))
        group = heads.num_values // heads.num_keys
        query, key = (each.repeat_interleave(group, 0)[:, :, None] for each in (query, key))
        time = _softplus(times[token].float().view(heads.num_values, -1) + heads.time_bias)
        memory.mul_(torch.exp(heads.decay[:, None] * time)[:, :, None])
        recalled = (memory * key).sum(1)
        written = heads.max_strength * (value.view(recalled.shape) - recalled)
        written = written / (1 + torch.exp(-strengths[token].float()))[:, None]
        memory.add_(key * written[:, None])
        out[token] = (memory * (query * heads.key_dim**-0.5)).sum(1)


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class ScanHeads:
    """The heads of a Mamba-2; each group of keys and queries serves equally many heads, in order.

    Args:
        num_heads: memories.
        head_dim: features of a head's values.
        num_groups: of keys and queries.
        state_size: features of keys and queries.
        decay: [num_heads] float32, below 0: of each head's memory, per unit of time.
        time_bias: [num_heads] float32, added to the time that a token takes before softplus.
        skip: [num_heads] float32: what of the values is added to the result.
        time_limits: the least and the most time that a token takes.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    decay: torch.Tensor
    time_bias: torch.Tensor
    skip: torch.Tensor
    time_limits: tuple[float, float] = (0.0, math.inf)


def selective_scan(
    inputs: torch.Tensor,
    times: torch.Tensor,
    state: torch.Tensor,
    batch: AttentionBatch,
    *,
    heads: ScanHeads,
    out: torch.Tensor,
) -> None:
    """Token by token, so that all operations have one shape; see `KernelSet.selective_scan`."""
    value_size, group = heads.num_heads * heads.head_dim, heads.num_heads // heads.num_groups
    for token, memory in _with_memory(state, batch):
        row = inputs[token].float()
        value = row[:value_size].view(heads.num_heads, heads.head_dim)
        key, query = row[value_size:].view(2, heads.num_groups, -1).repeat_interleave(group, 1)
        time = _softplus(times[token].float() + heads.time_bias).clamp(*heads.time_limits)
        memory.mul_(torch.exp(heads.decay * time)[:, None, None])
        memory.add_(key[:, :, None] * (value * time[:, None])[:, None])
        recalled = (memory * query[:, :, None]).sum(1)
        out[token] = (recalled + value * heads.skip[:, None]).flatten()


def _with_memory(state: torch.Tensor, batch: AttentionBatch) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a step's tokens, each with the memory that it is to update; states keep what they take in."""
    numbers = _numbers(batch)
    ends = np.cumsum(batch.num_tokens)
    starts = ends - batch.num_tokens
    bounds = starts.tolist(), ends.tolist(), (starts + batch.num_state_tokens).tolist()
    for number, memory, *of_sequence in zip(numbers, _begun(state[numbers], batch), *bounds, strict=True):
        start, end, state_end = of_sequence
        for token in range(start, end):
            yield token, memory
            if token + 1 == state_end:
                state[number] = memory


def _softplus(time: torch.Tensor) -> torch.Tensor:
    return torch.where(time > LINEAR_FROM, time, torch.log1p(torch.exp(time)))


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of length 1."""
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + UNIT_EPS)


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
