"""Compiles every kernel but those of attention for Hopper, and prints their names.

A process of its own, as Triton decides once whether it interprets.
"""

from __future__ import annotations

import functools

import hopper
import numpy as np
import torch

from caches import make_cache
from quire.kernels.batch import AttentionBatch
from quire.kernels.tiles import HeadLayout
from quire.kernels.token_choice import RowDraws
from quire.kernels.triton import device

device.kernel_device = functools.partial(torch.device, "cpu")  # before the kernels' modules take it

from quire.kernels.triton.kernel_set import TritonKernels  # noqa: E402

BFLOAT16 = torch.bfloat16


def main() -> None:
    assert not device.is_interpreted
    compiled = hopper.compile_only()
    kernels = TritonKernels()
    rows = torch.zeros(3, 1024, dtype=BFLOAT16)
    kernels.add_rms_norm(rows, rows.clone(), torch.ones(1024), eps=1e-6)
    kernels.gated_activation(rows, "gelu")
    rotate(kernels)
    for quantization in ("none", "int8", "int4"):
        kernels.linear([torch.ones(128, 1024)], dtype=BFLOAT16, quantization=quantization)(rows)
    logits = np.zeros((2, 40_000), dtype=np.float32)
    kernels.sampling.largest(logits)
    kernels.sampling.likeliest(logits, np.arange(2))
    kernels.sampling.sum_exp(logits, logits[:, 0], np.ones(2))
    kernels.sampling.ranks(logits, np.arange(2))
    choose(kernels, torch.from_numpy(logits))
    print(*compiled, sep="\n")


def rotate(kernels: TritonKernels) -> None:
    """Write a prompt to a cache in int8 and to one in bfloat16."""
    heads = HeadLayout(8, 2, 128)
    batch = AttentionBatch.build(np.array([3]), np.array([5]), np.array([[0]]), 16)
    angles = torch.zeros(5, 64)
    for cache_dtype in (torch.int8, BFLOAT16):
        kv = make_cache(1, 1, 2, 16, 128, cache_dtype).views[0]
        kernels.rotary_and_write_kv(
            torch.zeros(5, 12 * 128, dtype=BFLOAT16), kv, batch, heads=heads, cos=angles, sin=angles,
            q_norm=torch.ones(128), k_norm=torch.ones(128), eps=1e-6,
        )  # fmt: skip


def choose(kernels: TritonKernels, logits: torch.Tensor) -> None:
    """Draw a token of each row."""
    ones = torch.ones(len(logits), dtype=torch.float64)
    kernels.token_choice.choose(logits, RowDraws(ones, ones.long(), ones, ones, ones))


if __name__ == "__main__":
    main()
