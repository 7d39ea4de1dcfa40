"""Compiles every kernel but those of attention and of experts for Hopper, and prints their names.

A process of its own, as Triton decides once whether it interprets.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import re
from typing import Any

import hopper
import numpy as np
import torch

import quire.kernels.triton
from caches import make_cache
from quire.kernels.attention.batch import AttentionBatch, StepStates
from quire.kernels.attention.kv_layer import KVOfRows
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.layers.recurrence import DeltaHeads, ScanHeads
from quire.kernels.layers.weights import Float8Weight
from quire.kernels.sampling.token_choice import (
    NUM_EDIT_NUMBERS,
    LogitChanges,
    LogitEdits,
    LogitMasks,
    RowDraws,
    RowPenalties,
)
from quire.kernels.triton import device
from quire.kernels.triton.sampling.token_choice import TritonChoice

device.kernel_device = functools.partial(torch.device, "cpu")  # before the kernels' modules take it

from quire.kernels.triton.kernel_set import TritonKernels  # noqa: E402
from quire.kernels.triton.linear.float8_products import float8_linear_kernel, quantize_float8_kernel  # noqa: E402
from quire.kernels.triton.linear.tma_products import tma_linear_kernel  # noqa: E402

BFLOAT16 = torch.bfloat16


def main() -> None:
    assert not device.is_interpreted
    compiled = hopper.compile_only()
    kernels = TritonKernels()
    with kernels.compile_only():
        compute(kernels)
    programs = all_programs()
    compute(kernels)
    assert all_programs() == programs  # none was compiled again
    check_float8()
    for num_rows in (1, 3, 16):
        choose(num_rows)
    assert all_programs() == programs
    hopper.check_order(programs.values())
    hopper.check_reductions(programs.values())
    print(*compiled, sep="\n")


def compute(kernels: TritonKernels) -> None:
    """Launch every kernel but those of attention and of experts."""
    rows = torch.zeros(3, 1024, dtype=BFLOAT16)
    kernels.add_rms_norm(rows, rows.clone(), torch.ones(1024), eps=1e-6)
    kernels.rms_norm(rows, torch.ones(1024), bias=torch.ones(1024), eps=1e-6)
    kernels.gated_activation(rows, "gelu")
    rotate(kernels)
    recur(kernels)
    for quantization in ("none", "int8", "int4"):
        linear = kernels.linear([torch.ones(128, 1024)], dtype=BFLOAT16, quantization=quantization)
        for num_rows in (3, 40, 200):
            linear(torch.zeros(num_rows, 1024, dtype=BFLOAT16))
        gated = kernels.gated_linear(linear, "silu")
        assert not gated.keeps_products
        for num_rows in (3, 40, 200):
            gated(torch.zeros(num_rows, 1024, dtype=BFLOAT16))
    multiply_in_float8(kernels)
    choose(2)


def multiply_in_float8(kernels: TritonKernels) -> None:
    """Multiply few rows and many, with scales for rows and for blocks."""
    weight = torch.ones(128, 1024)
    in_blocks = Float8Weight(weight.to(torch.float8_e4m3fn), torch.ones(1, 8), (128, 128))
    for part in (weight, in_blocks):
        linear = kernels.linear([part], dtype=BFLOAT16, quantization="fp8")
        for num_rows in (3, 200):
            linear(torch.zeros(num_rows, 1024, dtype=BFLOAT16))


def check_float8() -> None:
    """See that products are of the matrix units that take float8."""
    programs = list(float8_linear_kernel.device_caches[0][0].values())
    fetched = [
        program for program in tma_linear_kernel.device_caches[0][0].values() if "e4m3" in program.asm["ptx"]
    ]
    assert (len(programs), len(fetched)) == (2, 2)
    for few_or_many in (programs, fetched):
        codes = [program.asm["ptx"] for program in few_or_many]
        assert all(re.search(r"wgmma\S+\.f32\.e4m3\.e4m3", code) for code in codes)
        # With scales for blocks, sums of 128 products are added.
        assert sum(bool(re.search(r"add(\.rn)?\.f32|fma\.rn\.f32", code)) for code in codes) == 1
    for program in quantize_float8_kernel.device_caches[0][0].values():
        assert "cvt.rn.satfinite.e4m3x2.f32" in program.asm["ptx"]


def rotate(kernels: TritonKernels) -> None:
    """Write a prompt to caches in int8, float8 and bfloat16, to none, and its latents to one of keys."""
    heads = HeadLayout(8, 2, 128)
    batch = AttentionBatch.build(np.array([3]), np.array([5]), np.array([[0]]), 16)
    angles = torch.zeros(5, 64)
    for cache_dtype in (torch.int8, torch.float8_e4m3fn, BFLOAT16):
        kv = make_cache(1, 1, 2, 16, 128, cache_dtype).views[0]
        kernels.rotary_and_write_kv(
            torch.zeros(5, 12 * 128, dtype=BFLOAT16), kv, batch, heads=heads, cos=angles, sin=angles,
            q_norm=torch.ones(128), k_norm=torch.ones(128), eps=1e-6,
        )  # fmt: skip
    whole = AttentionBatch.build(np.array([0]), np.array([5]), np.array([[0]]), 16).over_rows()
    qkv = torch.zeros(5, 12 * 128, dtype=BFLOAT16)
    kernels.rotary_and_write_kv(
        qkv, KVOfRows.of(qkv, heads), whole, heads=heads, cos=angles, sin=angles, q_norm=None, k_norm=None,
        eps=1e-6,
    )  # fmt: skip
    kv = make_cache(1, 1, 1, 16, 576, BFLOAT16).views[0]
    kernels.rotary_and_write_kv(
        torch.zeros(5, 17 * 576, dtype=BFLOAT16), kv.replace(value_pages=kv.key_pages), batch,
        heads=HeadLayout(16, 1, 576, value_dim=0), cos=angles[:, :32].clone(), sin=angles[:, :32].clone(),
        q_norm=None, k_norm=None, eps=1e-6,
    )  # fmt: skip


def recur(kernels: TritonKernels) -> None:
    """Compute layers with a state, of steps of several sizes."""
    scan = ScanHeads(4, 64, 1, 128, -torch.ones(4), torch.ones(4), torch.ones(4))
    state = torch.zeros(5, 4 * 128 * 128)
    for counts in ([1], [7, 1, 1]):
        size = len(counts)
        batch = AttentionBatch.build(
            np.full(size, 3),
            np.array(counts),
            np.zeros((size, 1), dtype=np.int32),
            16,
            states=StepStates(np.arange(size), []),
        )
        num_rows = sum(counts)
        rows = torch.zeros(num_rows, 1024, dtype=BFLOAT16)
        kernels.causal_conv(
            rows, torch.ones(4, 1024), torch.zeros(5, 3, 1024, dtype=BFLOAT16), batch, activation="silu"
        )
        for num_times in (1, 128):
            delta = DeltaHeads(2, 4, 128, 128, -torch.ones(4), torch.ones(4, num_times))
            kernels.gated_delta_rule(
                rows,
                torch.zeros(num_rows, 4, dtype=BFLOAT16),
                torch.zeros(num_rows, 4 * num_times, dtype=BFLOAT16),
                state.view(5, 4, 128, 128),
                batch,
                heads=delta,
                out=torch.zeros(num_rows, 4, 128, dtype=BFLOAT16),
            )
        kernels.selective_scan(
            rows[:, :512],
            rows[:, 512:516],
            state[:, : 4 * 128 * 64].view(5, 4, 128, 64),
            batch,
            heads=scan,
            out=rows[:, 768:],
        )


def choose(num_rows: int) -> None:
    """Draw a token of each row, after changes and penalties, and look for what is likely beside it.

    What the host tells lies in places that depend on the number of rows.
    """
    logits = torch.zeros(num_rows, 40_000)
    draws = torch.ones(5, num_rows, dtype=torch.float64)
    numbers = torch.zeros(4, num_rows, dtype=torch.int64)
    mask_of_row, rows = numbers[0], numbers[3]
    changes = LogitChanges(
        LogitMasks(torch.ones(1, 1250, dtype=torch.int32), mask_of_row),
        LogitEdits(torch.zeros(NUM_EDIT_NUMBERS, num_rows, dtype=torch.float64), rows),
    )
    choice = TritonChoice()
    for dtype in (torch.int16, torch.int32):
        of_rows = RowPenalties(torch.zeros(1, 40_000, dtype=dtype), rows, *torch.ones(3, num_rows))
        drafts = torch.zeros(num_rows, num_rows, dtype=torch.int64)
        choice.choose(logits, penalties=dataclasses.replace(of_rows, drafts=drafts))
        choice.choose(logits, RowDraws(draws[0], numbers[1], *draws[2:]), changes, of_rows)
    choice.logprobs(logits, numbers[2], 5 * num_rows - 4, rows)
    choice.input_ids(rows, numbers[2])
    choice.keep_last(rows, rows, numbers[2])


def all_programs() -> dict[str, Any]:
    """Return the programs that kernels have been compiled to, by kernel and what is special about them."""
    found = {}
    for module in pkgutil.walk_packages(quire.kernels.triton.__path__, "quire.kernels.triton."):
        for name, item in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel"):
                programs = item.device_caches[0][0]
                found |= {f"{name} {key}": program for key, program in programs.items()}
    return found


if __name__ == "__main__":
    main()
