"""Measures the maximum rates of the machine, for the limits that engines are compared with.

    python benchmarks/peers_machine.py

Prints one line of JSON: bytes read from memory per second, and operations per second of matrix
products by dtype (a multiplication and an addition are two operations). Each is the best of several ways and
many runs. Where oneDNN has no products in bf16, its products in float32 count beside Quire's own.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peers_shapes import SHAPES
from peers_workload import NUM_THREADS
from timing import least_seconds

from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.devices.torch_internals import has_onednn_bfloat16

CONFIG = SHAPES["0.6b"].config
HIDDEN_SIZE = CONFIG["hidden_size"]
MLP_SIZES = CONFIG["intermediate_size"], HIDDEN_SIZE
HEAD_SIZES = CONFIG["vocab_size"], HIDDEN_SIZE

READ_BYTES = 2**30  # far more than any cache holds
READ_REPEATS = 20
ROWS = (128, 256, 512)
GEMM_REPEATS = 40
ONE_ROW_REPEATS = 20


Product = Callable[[torch.Tensor], Any]

DTYPE = torch.bfloat16 if has_onednn_bfloat16() else torch.float32


def onednn(weights: torch.Tensor, rows: int) -> Product:
    """Return oneDNN's product with weights [out, in] in DTYPE, packed for this number of rows."""
    if weights.dtype == torch.float32:
        return lambda x: F.linear(x, weights)
    layout = torch.ops.mkldnn._reorder_linear_weight(weights, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, layout, None, "none", [], "")


def quires(weights: torch.Tensor, quantization: str) -> Product:
    """Return Quire's product with weights [out, in], which takes and returns bfloat16."""
    return NativeKernels().linear([weights], dtype=torch.bfloat16, quantization=quantization)


def read_bandwidth() -> float:
    """Return bytes read per second: the best of a sum, and products of the output head with one row."""
    values = torch.ones(READ_BYTES // 4)
    rates = [READ_BYTES / least_seconds(values.sum, READ_REPEATS)]
    head = torch.ones(HEAD_SIZES, dtype=DTYPE)
    ways = [(onednn(head, 1), DTYPE.itemsize)]
    ways += [
        (quires(head.bfloat16(), quantization), size) for quantization, size in (("none", 2), ("int8", 1))
    ]
    for product, size in ways:
        row = torch.ones(1, HIDDEN_SIZE, dtype=DTYPE if product is ways[0][0] else torch.bfloat16)
        seconds = least_seconds(functools.partial(product, row), ONE_ROW_REPEATS)
        rates.append(size * math.prod(HEAD_SIZES) / seconds)
    return max(rates)


def rate(product: Callable[[], object], rows: int) -> float:
    """Return operations per second of a product of the MLP's sizes."""
    return 2 * rows * math.prod(MLP_SIZES) / least_seconds(product, GEMM_REPEATS)


def bf16_rate(rows: int) -> float:
    """Return operations per second of the MLP's products in bf16: the better of oneDNN's and Quire's."""
    weights, x = torch.randn(MLP_SIZES), torch.randn(rows, HIDDEN_SIZE)
    theirs = functools.partial(onednn(weights.to(DTYPE), rows), x.to(DTYPE))
    ours = functools.partial(quires(weights.bfloat16(), "none"), x.bfloat16())
    return max(rate(theirs, rows), rate(ours, rows))


def int8_rate(rows: int) -> float:
    """Return operations per second of the same products in int8 with bf16 results.

    They are Quire's with weights in 8 or 4 bits, or oneDNN's, whichever is fastest; where oneDNN would take
    seconds for one, Quire's.
    """
    weights, x = torch.randn(MLP_SIZES), torch.randn(rows, HIDDEN_SIZE).bfloat16()
    ways = [functools.partial(quires(weights, form), x) for form in ("int8", "int4")]
    if has_onednn_bfloat16():  # and then int8, too
        ways.append(onednn_int8(rows))
    return max(rate(way, rows) for way in ways)


def onednn_int8(rows: int) -> Callable[[], Any]:
    """Return oneDNN's `qlinear`."""
    weights = torch.randint(-127, 128, MLP_SIZES, dtype=torch.int8)
    layout = torch.ops.onednn.qlinear_prepack(weights, [rows, HIDDEN_SIZE])
    scales, zeros = torch.full(MLP_SIZES[:1], 0.01), torch.zeros(MLP_SIZES[:1], dtype=torch.int32)
    x = torch.randint(0, 255, (rows, HIDDEN_SIZE), dtype=torch.uint8)
    return lambda: torch.ops.onednn.qlinear_pointwise(
        x, 0.01, 128, layout, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
    )


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(NUM_THREADS)
    NativeKernels().use_threads(NUM_THREADS)
    rates = {"bf16": max(map(bf16_rate, ROWS)), "int8": max(map(int8_rate, ROWS))}
    print(json.dumps({"bandwidth": read_bandwidth(), "gemm_rate": rates}))


if __name__ == "__main__":
    main()
