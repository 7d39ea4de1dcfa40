"""Layers with a state, of each kind and of odd sizes, and steps of several sequences for them."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.batch import AttentionBatch, StepStates
from quire.kernels.devices.device import HOST
from quire.kernels.interface import KernelSet
from quire.kernels.layers.recurrence import DeltaHeads, ScanHeads

COUNTS = [3, 1, 20, 2]
BEFORE = [0, 9, 5, 0]
NUMBERS = [4, 0, 2, 5]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def random_numbers(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device = HOST
) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def int_array(numbers: list[int]) -> npt.NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def step_of(
    counts: list[int], before: list[int], numbers: list[int], taken_in: list[int] | None = None
) -> AttentionBatch:
    tables = np.zeros((len(counts), 8), dtype=np.int32)
    states = StepStates(int_array(numbers), [], None if taken_in is None else int_array(taken_in))
    return AttentionBatch.build(int_array(before), int_array(counts), tables, 64, states=states)


class Conv:
    """A convolution of features that fill no vector, out of rows that are further apart."""

    def __init__(
        self,
        dtype: torch.dtype,
        num_taps: int,
        activation: str,
        *,
        has_bias: bool,
        device: torch.device = HOST,
    ) -> None:
        random = functools.partial(random_numbers, device=device)
        self.size, self.activation = 275, activation
        self.weight = random(num_taps, self.size, seed=1)
        self.bias = random(self.size, seed=2) if has_bias else None
        self.rows = random(sum(COUNTS), self.size + 5, dtype=dtype)[:, : self.size]
        self.states = [random(6, num_taps - 1, self.size, dtype=dtype, seed=3)]

    def run(
        self, kernels: KernelSet, rows: slice, states: list[torch.Tensor], batch: AttentionBatch
    ) -> torch.Tensor:
        return kernels.causal_conv(
            self.rows[rows], self.weight, states[0], batch, bias=self.bias, activation=self.activation
        )


class Delta:
    """A gated DeltaNet, whose strengths and times are parts of wider rows."""

    def __init__(
        self,
        dtype: torch.dtype,
        key_dim: int,
        value_dim: int,
        *,
        max_strength: float = 1.0,
        by_channel: bool = False,
        device: torch.device = HOST,
    ) -> None:
        random = functools.partial(random_numbers, device=device)
        num_times = key_dim if by_channel else 1
        self.heads = DeltaHeads(
            2,
            6,
            key_dim,
            value_dim,
            decay=-random(6, seed=1).exp(),
            time_bias=random(6, num_times, seed=2),
            max_strength=max_strength,
        )
        width = 2 * 2 * key_dim + 6 * value_dim
        self.rows = random(sum(COUNTS), width, dtype=dtype)
        gates = random(sum(COUNTS), 6 * (1 + num_times) + 3, dtype=dtype, seed=3) * 4
        self.strengths, self.times = gates[:, :6], gates[:, 9:]
        self.states = [random(6, 6, key_dim, value_dim, seed=4)]

    def run(
        self, kernels: KernelSet, rows: slice, states: list[torch.Tensor], batch: AttentionBatch
    ) -> torch.Tensor:
        qkv = self.rows[rows]
        out = qkv.new_empty(len(qkv), 6, self.heads.value_dim)
        kernels.gated_delta_rule(
            qkv, self.strengths[rows], self.times[rows], states[0], batch, heads=self.heads, out=out
        )
        return out


class Scan:
    """A Mamba-2 of two groups, whose times and results are parts of wider rows."""

    def __init__(
        self,
        dtype: torch.dtype,
        state_size: int,
        head_dim: int,
        *,
        least_time: float = 0.0,
        device: torch.device = HOST,
    ) -> None:
        random = functools.partial(random_numbers, device=device)
        self.heads = ScanHeads(
            6,
            head_dim,
            2,
            state_size,
            decay=-random(6, seed=1).exp(),
            time_bias=random(6, seed=2),
            skip=random(6, seed=5),
            time_limits=(least_time, 1.5),
        )
        self.inputs = random(sum(COUNTS), 6 * head_dim + 4 * state_size, dtype=dtype)
        self.times = random(sum(COUNTS), 9, dtype=dtype, seed=3)[:, 3:] * 4
        self.states = [random(6, 6, state_size, head_dim, seed=4)]

    def run(
        self, kernels: KernelSet, rows: slice, states: list[torch.Tensor], batch: AttentionBatch
    ) -> torch.Tensor:
        inputs = self.inputs[rows]
        size = 6 * self.heads.head_dim
        out = inputs.new_zeros(len(inputs), size + 3)
        kernels.selective_scan(
            inputs, self.times[rows], states[0], batch, heads=self.heads, out=out[:, 2 : size + 2]
        )
        assert not out[:, :2].any()
        assert not out[:, -1].any()
        return out[:, 2:-1]


RecurrentLayer = Conv | Delta | Scan

CASES = [
    *((Conv, (dtype, 4, "silu"), {"has_bias": False}) for dtype in DTYPES),
    (Conv, (torch.float32, 3, ""), {"has_bias": True}),
    (Conv, (torch.bfloat16, 2, "silu"), {"has_bias": True}),
    *((Delta, (dtype, 32, 48), {}) for dtype in DTYPES),
    (Delta, (torch.float32, 17, 21), {}),
    (Delta, (torch.float32, 16, 32), {"max_strength": 2.0}),
    (Delta, (torch.float32, 128, 128), {}),
    *((Delta, (dtype, 32, 48), {"by_channel": True}) for dtype in DTYPES),
    (Delta, (torch.float32, 17, 21), {"by_channel": True}),
    (Delta, (torch.float32, 128, 128), {"by_channel": True}),
    *((Scan, (dtype, 32, 48), {}) for dtype in DTYPES),
    (Scan, (torch.float32, 17, 21), {"least_time": 0.4}),
    (Scan, (torch.float32, 256, 64), {}),
]


def layer_of(case: tuple[type, tuple, dict], device: torch.device = HOST) -> RecurrentLayer:
    kind, arguments, options = case
    return kind(*arguments, **options, device=device)


def name_of(case: tuple[type, tuple, dict]) -> str:
    return "-".join(map(str, (case[0].__name__, *case[1], *case[2])))


def results(layer: RecurrentLayer, kernels: KernelSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a step computes, and the states after it."""
    states = [layer.states[0].clone()]
    states[0][NUMBERS[0]] = torch.nan  # of a sequence that begins
    return layer.run(kernels, slice(None), states, step_of(COUNTS, BEFORE, NUMBERS)), states[0]


def check_company_and_chunks(layer: RecurrentLayer, kernels: KernelSet) -> None:
    """See that bits depend neither on the other sequences of a step nor on how one is divided into steps."""
    together, states = results(layer, kernels)
    start = sum(COUNTS[:2])
    for chunks in ([20], [1] * 20, [7, 13], [2, 1, 17]):
        alone, parts, first = [layer.states[0].clone()], [], 0
        for count in chunks:
            rows = slice(start + first, start + first + count)
            batch = step_of([count], [BEFORE[2] + first], [NUMBERS[2]])
            parts.append(layer.run(kernels, rows, alone, batch))
            first += count
        assert torch.equal(torch.cat(parts), together[start : start + 20])
        assert torch.equal(alone[0][NUMBERS[2]], states[NUMBERS[2]])


def check_taken_in(layer: RecurrentLayer, kernels: KernelSet) -> None:
    """See that a state takes in the first tokens of a step, as many as the step says."""
    whole, _ = results(layer, kernels)
    taken_in = [2, 1, 11, 1]
    states = [layer.states[0].clone()]
    out = layer.run(kernels, slice(None), states, step_of(COUNTS, BEFORE, NUMBERS, taken_in))
    assert torch.equal(out, whole)
    shorter = [layer.states[0].clone()]
    for start, count, before, number in zip(np.cumsum([0, *COUNTS]), taken_in, BEFORE, NUMBERS, strict=False):
        layer.run(kernels, slice(start, start + count), shorter, step_of([count], [before], [number]))
    assert torch.equal(states[0], shorter[0])
