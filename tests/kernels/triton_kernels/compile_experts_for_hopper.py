"""Compiles the kernels of experts for a GPU of compute capability 9.0, which need not be there.

A process of its own, as Triton decides once whether it interprets. Prints how many programs there are after
steps of few rows, after steps of many, after those of quantized experts, and after those with biases; what
shared memory the largest takes in bytes; and which products are the tensor cores'.
"""

from __future__ import annotations

import functools
import json

import hopper
import torch

from quire.kernels.triton import device

device.kernel_device = functools.partial(torch.device, "cpu")  # before the kernels' modules take it

from quire.kernels.layers.experts import CLAMPED_SWIGLU, ExpertWeights, Mixture  # noqa: E402
from quire.kernels.triton.experts import products as expert_products  # noqa: E402
from quire.kernels.triton.experts import routing as expert_routing  # noqa: E402
from quire.kernels.triton.kernel_set import TritonKernels  # noqa: E402

HIDDEN, SIZE, EXPERTS, CHOSEN = 128, 256, 16, 8
KERNELS = (
    expert_routing.choose_experts_kernel,
    expert_routing.sort_by_expert_kernel,
    expert_products.expert_product_kernel,
    expert_products.add_results_kernel,
)


def compile_steps(
    quantization: str, *steps: int, activation: str = "silu", biases: tuple[torch.Tensor, ...] = ()
) -> int:
    """Compute steps of so many rows; return how many programs there are of all kernels."""
    weight = torch.ones(SIZE, HIDDEN)
    kernels = TritonKernels()
    layer = kernels.experts(
        [ExpertWeights([weight, weight], [weight.t()], *biases)] * EXPERTS,
        Mixture(EXPERTS, CHOSEN, normalize=True, activation=activation),
        dtype=torch.bfloat16,
        quantization=quantization,
    )
    with kernels.compile_only():
        for num_rows in steps:
            layer(*(torch.empty(num_rows, width, dtype=torch.bfloat16) for width in (HIDDEN, EXPERTS)))
    return sum(len(kernel.device_caches[0][0]) for kernel in KERNELS)


hopper.compile_only()
report = {
    "few": compile_steps("none", 1, 2, 13),
    "many": compile_steps("none", 90, 1200, 5000),
    "quantized": [compile_steps(quantization, 1) for quantization in ("int8", "int4", "fp8")],
    "biased": [
        compile_steps(
            quantization,
            1,
            activation=CLAMPED_SWIGLU,
            biases=(torch.ones(2 * SIZE), torch.ones(HIDDEN)),
        )
        for quantization in ("none", "int4")
    ],
}
programs = [program for kernel in KERNELS for program in kernel.device_caches[0][0].values()]
hopper.check_order(programs)
hopper.check_reductions(programs)
report["shared"] = max(program.metadata.shared for program in programs)
report["tensor_cores"] = [
    "wgmma.mma_async" in program.asm["ptx"]
    for program in expert_products.expert_product_kernel.device_caches[0][0].values()
]
print(json.dumps(report))
