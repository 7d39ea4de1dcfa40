"""Writes a checkpoint of the comparison in the quantized formats that vLLM reads.

    python benchmarks/peers_quantized.py CHECKPOINT int8|int4 DIRECTORY

CHECKPOINT was written by `peers_model.py`. int8 is compressed-tensors' W8A8 format: weights in int8 with a
scale per output channel, activations to be quantized dynamically per token. int4 is GPTQ's format, symmetric
in groups of 128. Models with experts are refused: vLLM's kernels for such experts need AMX.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INT8_MAX = 127
MATRIX = re.compile(r"model\.layers\.\d+\.(self_attn|linear_attn|mlp)\.\w*proj\w*\.weight")
UNQUANTIZED = ("in_proj_a", "in_proj_b")  # a row for each head of a DeltaNet

GPTQ_GROUP_SIZE = 128
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GPTQ_GROUP_SIZE,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
    "checkpoint_format": "gptq",
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def is_quantized(name: str) -> bool:
    """Return whether a tensor is quantized in both formats."""
    return MATRIX.fullmatch(name) is not None and name.split(".")[-2] not in UNQUANTIZED


def w8a8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a matrix in int8, [out, in], and scales beside it, [out, 1]."""
    scale = (tensor.float().abs().amax(dim=1, keepdim=True) / INT8_MAX).bfloat16()
    values = (tensor / scale.float()).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return {name: values, f"{name}_scale": scale}


def gptq(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a matrix [out, in] in 4 bits, symmetric and rounded to nearest.

    Layout: https://github.com/AutoGPTQ/AutoGPTQ. The matrix is transposed, eight inputs to a word; a zero of
    8 is stored as 7, eight outputs to a word.
    """
    rows, inputs = tensor.shape
    groups = tensor.float().view(rows, -1, GPTQ_GROUP_SIZE)
    scales = (groups.abs().amax(dim=2) / 7).half()
    steps = (groups / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
    stem = name.removesuffix("weight")
    return {
        f"{stem}qweight": _words(steps.view(rows, inputs // 8, 8)).t().contiguous(),
        f"{stem}qzeros": _words(torch.full((inputs // GPTQ_GROUP_SIZE, rows // 8, 8), 7)),
        f"{stem}scales": scales.t().contiguous(),
        f"{stem}g_idx": torch.arange(inputs, dtype=torch.int32) // GPTQ_GROUP_SIZE,
    }


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Return int32 [...] of numbers in 4 bits [..., 8], lowest first."""
    words = (numbers.long() << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


FORMATS = {"int8": (w8a8, W8A8), "int4": (gptq, GPTQ)}


def quantize_file(source: Path, target: Path, form: str) -> set[str]:
    """Write a safetensors file anew, and return the names of the modules that are left as they are.

    Raises:
        SystemExit: it has experts.
    """
    quantize, unquantized, tensors = FORMATS[form][0], set(), {}
    with safe_open(source, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            if ".experts." in name:
                raise SystemExit(f"{name} is an expert's; quantized experts are not written for vLLM")
            if is_quantized(name):
                tensors |= quantize(name, file.get_tensor(name))
            else:
                tensors[name] = file.get_tensor(name)
                unquantized.add(name.removesuffix(".weight"))
    save_file(tensors, target, metadata={"format": "pt"})
    return unquantized


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("form", choices=FORMATS)
    parser.add_argument("directory", type=Path, help="output directory; created if missing")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.checkpoint / name, options.directory / name)
    description: dict[str, Any] = dict(FORMATS[options.form][1])
    ignored = quantize_file(
        options.checkpoint / "model.safetensors", options.directory / "model.safetensors", options.form
    )
    if "ignore" in description:
        description["ignore"] = ["lm_head", *sorted(ignored)]
    config = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))
    (options.directory / "config.json").write_text(
        json.dumps(config | {"quantization_config": description}, indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
