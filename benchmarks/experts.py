"""Time of one mixture of experts on a CPU: in one native call, and expert by expert.

Weights are random, and tokens choose experts evenly. Each call has other tokens, so that weights come from
memory. Both ways take turns, and the best time of each call counts. Rates are of the matrices of all experts
that any token has chosen, and of the products. With one thread, times are of the CPU, which other programs do
not disturb.

    python benchmarks/experts.py [--shape qwen3-30b-a3b] [--kinds int4 int8] [--experts 16] [--threads 1]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.layers.expert_by_expert import ExpertByExpert
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.layers.weights import GroupedWeight, Weight


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer."""

    hidden: int
    inner: int
    num_experts: int
    experts_per_token: int
    activation: str
    biased: bool


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, "silu", biased=False),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, "clamped_swiglu", biased=True),
}
BYTES = {
    "bfloat16": 2.0,
    "int8": 1.0,
    "int4": 0.5 + 4 / 32,
    "grouped_int8": 1 + 4 / 32,
    "mxfp4": 0.5 + 1 / 32,
}
GROUP = 32  # inputs that share a scale; 2880 are no multiple of 128
CALLS = 4  # of a round, each with other tokens


def _matrix(outputs: int, inputs: int, kind: str, generator: torch.Generator) -> Weight:
    if kind not in ("mxfp4", "grouped_int8"):
        return torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5).bfloat16()
    halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.uint8)
    signs = torch.randint(0, 2, (outputs, inputs), generator=generator, dtype=torch.int8) * 2 - 1
    values = halves[torch.randint(0, 8, (outputs, inputs), generator=generator)].to(torch.int8) * signs
    scales = torch.full((outputs, inputs // GROUP), 2.0**-8)
    values = (values.view(torch.uint8)) ^ 128
    return GroupedWeight(values, scales, torch.full_like(scales, 128), 8, is_mxfp4=kind == "mxfp4")


def weights_of(shape: Shape, kind: str) -> Iterator[ExpertWeights]:
    """Yield experts, all of the same random matrices."""
    generator = torch.Generator().manual_seed(0)
    gate_up = [_matrix(shape.inner, shape.hidden, kind, generator) for _ in range(2)]
    down = [_matrix(shape.hidden, shape.inner, kind, generator)]
    biases = (torch.zeros(2 * shape.inner), torch.zeros(shape.hidden)) if shape.biased else (None, None)
    for _ in range(shape.num_experts):
        yield ExpertWeights(gate_up, down, *biases)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--kinds", nargs="+", choices=BYTES, default=["int4", "int8", "bfloat16", "mxfp4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 256])
    parser.add_argument("--experts", type=int, help="of the layer, in place of the shape's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    shape, kernels = SHAPES[options.shape], NativeKernels()
    shape = dataclasses.replace(shape, num_experts=options.experts or shape.num_experts)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    kernels.use_threads(options.threads)
    print(
        f"{options.shape}, {shape.num_experts} experts, {_native.instruction_set()}, "
        f"{_native.num_threads()} threads"
    )
    print("| weights | tokens | one call, ms | expert by expert, ms | ratio | GB/s | Gop/s |")
    print("|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        mixture = Mixture(
            shape.num_experts, shape.experts_per_token, normalize=True, activation=shape.activation
        )
        quantization = kind if kind in ("int4", "int8") else "none"
        held = {"dtype": torch.bfloat16, "quantization": quantization, "group_size": GROUP}
        together = kernels.experts(weights_of(shape, kind), mixture, **held)
        one_by_one = ExpertByExpert(weights_of(shape, kind), mixture, kernels, **held)
        for count in options.tokens:
            _print_row(kind, count, shape, (together, one_by_one), rounds=options.rounds, clock=clock)


def _print_row(
    kind: str,
    count: int,
    shape: Shape,
    ways: tuple[Experts, Experts],
    *,
    rounds: int,
    clock: Callable[[], float],
) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(CALLS, count, shape.hidden, generator=generator).bfloat16()
    scores = torch.randn(CALLS, count, shape.num_experts, generator=generator)
    seconds = [[math.inf] * CALLS for _ in ways]
    for _ in range(rounds):
        for way, best in zip(ways, seconds, strict=True):
            for call, (rows, of_rows) in enumerate(zip(inputs, scores, strict=True)):
                started = clock()
                way(rows, of_rows)
                best[call] = min(best[call], clock() - started)
    one_call, one_by_one = (sum(best) / CALLS for best in seconds)
    num_chosen = (
        sum(len(of_rows.topk(shape.experts_per_token).indices.unique()) for of_rows in scores) / CALLS
    )
    weights = 3 * shape.hidden * shape.inner
    rate = num_chosen * weights * BYTES[kind] / one_call / 1e9
    operations = 2 * count * shape.experts_per_token * weights / one_call / 1e9
    print(
        f"| {kind} | {count} | {one_call * 1e3:.2f} | {one_by_one * 1e3:.2f} | {one_by_one / one_call:.2f} "
        f"| {rate:.1f} | {operations:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
