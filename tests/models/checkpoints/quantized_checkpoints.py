"""Random quantized checkpoints, packed number by number as each kind's description says.

A checkpoint is written twice: quantized, and in float32 with the numbers that the quantized one stands for.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass
class Steps:
    """A matrix: (values [out, in] - zeros [out, groups]) * scales [out, groups], group_of [in]."""

    values: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]
    zeros: np.ndarray[Any, Any]
    group_of: np.ndarray[Any, Any]

    def floats(self) -> torch.Tensor:
        result = np.empty(self.values.shape, dtype=np.float32)
        for column, group in enumerate(self.group_of):
            result[:, column] = (self.values[:, column] - self.zeros[:, group]) * self.scales[:, group]
        return torch.from_numpy(result)


def random_steps(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    shuffled: bool | str = False,
) -> Steps:
    """Return a random matrix of about unit gain; its scales are float16 numbers.

    Args:
        rng: where the numbers come from.
        shape: [out, in].
        bits: 4 or 8.
        group_size: inputs; -1: a row.
        symmetric: zeros are in the middle.
        shuffled: groups are no runs of inputs, but alike in matrices of as many inputs; "each": in none.
    """
    rows, inputs = shape
    group_size = inputs if group_size == -1 else group_size
    groups = inputs // group_size
    middle = 1 << (bits - 1)
    zeros = np.full((rows, groups), middle)
    if not symmetric:
        zeros = rng.integers(0, 2 * middle, zeros.shape)
    scales = rng.uniform(0.5, 1.5, (rows, groups)) * 2 / (middle * inputs**0.5)
    group_of = np.arange(inputs) // group_size
    return Steps(
        rng.integers(0, 2 * middle, shape),
        scales.astype(np.float16).astype(np.float32),
        zeros,
        (rng if shuffled == "each" else np.random.default_rng(inputs)).permutation(group_of)
        if shuffled
        else group_of,
    )


def pack(numbers: np.ndarray[Any, Any], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack the last dimension into int32 words; number `order[i]` of a word goes to its i-th lowest bits."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    padding = -numbers.shape[-1] % per_word
    padded = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, padding)]).astype(np.uint64)
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // per_word), dtype=np.uint64)
    for word in range(words.shape[-1]):
        for place, number in enumerate(order):
            words[..., word] |= padded[..., word * per_word + number] << np.uint64(place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def half(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(numbers).half()


def pack_quantized(steps: Steps, *, bits: int, symmetric: bool) -> Tensors:
    """compressed-tensors: along the inputs; zeros along the outputs."""
    tensors = {
        "weight_packed": pack(steps.values, bits),
        "weight_scale": half(steps.scales),
        "weight_shape": torch.tensor(steps.values.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(steps.zeros.T, bits).t().contiguous()
    return tensors


def int_quantized(steps: Steps) -> Tensors:
    """compressed-tensors: plain int8, zero in the middle."""
    return {
        "weight": torch.from_numpy(steps.values - 128).to(torch.int8),
        "weight_scale": torch.from_numpy(steps.scales),
    }


def gptq(steps: Steps, *, bits: int, version: int) -> Tensors:
    """GPTQ: weights along the inputs, zeros along the outputs, in version 1 less 1: each word at once."""
    ones = pack(np.ones(32 // bits), bits)
    return {
        "qweight": pack(steps.values, bits).t().contiguous(),
        "qzeros": pack(steps.zeros.T, bits) - (version == 1) * ones,
        "scales": half(steps.scales.T.copy()),
        "g_idx": torch.from_numpy(steps.group_of).int(),
    }


def awq(steps: Steps) -> Tensors:
    """AWQ, gemm: all along the outputs, the even ones of eight first."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": pack(steps.values.T, 4, order),
        "qzeros": pack(steps.zeros.T, 4, order),
        "scales": half(steps.scales.T.copy()),
    }


def write_quantized(
    path: Path,
    quantization_config: dict[str, Any],
    draw: Callable[[np.random.Generator, tuple[int, int]], Steps],
    encode: Callable[[Steps], Tensors],
    *,
    seed: int = 0,
) -> Path:
    """Quantize the projections of the float32 checkpoint in `path`; return the directory of its float twin.

    Args:
        path: a checkpoint in one file; becomes the quantized one.
        quantization_config: goes into config.json.
        draw: makes a matrix of some shape.
        encode: makes of it the tensors that are stored, by the last words of their names.
        seed: of the numbers.
    """
    twin = path.with_name(path.name + "-floats")
    shutil.copytree(path, twin)
    weights = load_file(path / "model.safetensors")
    floats = dict(weights)
    rng = np.random.default_rng(seed)
    for name in sorted(weights):
        if not name.endswith("_proj.weight"):
            continue
        weight = weights.pop(name)
        steps = draw(rng, tuple(weight.shape))
        floats[name] = steps.floats()
        stored = encode(steps)
        weights.update({f"{name.removesuffix('.weight')}.{last}": part for last, part in stored.items()})
    save_file(weights, path / "model.safetensors")
    save_file(floats, twin / "model.safetensors")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"quantization_config": quantization_config}))
    return twin
