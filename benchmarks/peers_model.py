"""Writes the model of the comparison: random weights in the shape of a Qwen3, and a byte-level tokenizer.

    python benchmarks/peers_model.py [--precision bf16|int8|int4] [--shape 0.6b|4b] DIRECTORY

bf16 is an ordinary Hugging Face checkpoint, which Quire reads in all precisions and from which the files of
other engines are converted. int8 is the same model in compressed-tensors' W8A8 format: weights in int8 with a
scale per output channel, activations to be quantized dynamically per token. int4 is the
same in GPTQ's format, symmetric in groups of 128.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peers_workload import PRECISIONS, SHAPES, ModelShape
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

STANDARD_DEVIATION = 0.02
SEED = 0
INT8_MAX = 127
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256  # after the 256 byte tokens

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


def config_of(shape: ModelShape) -> dict[str, Any]:
    """Return what config.json says of a checkpoint in bf16."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "use_cache": True,
    }


def random_tensors(shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the checkpoint by its name, in bf16: norms are 1, all else is normal."""
    generator = torch.Generator().manual_seed(SEED)

    def matrix(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator) * STANDARD_DEVIATION).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    hidden, mlp, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * head, shape.num_kv_heads * head
    yield "model.embed_tokens.weight", matrix(shape.vocab_size, hidden)
    yield "model.norm.weight", ones(hidden)
    for number in range(shape.num_layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", ones(hidden)
        yield f"{layer}.post_attention_layernorm.weight", ones(hidden)
        yield f"{layer}.self_attn.q_norm.weight", ones(head)
        yield f"{layer}.self_attn.k_norm.weight", ones(head)
        yield f"{layer}.self_attn.q_proj.weight", matrix(queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", matrix(keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", matrix(keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", matrix(hidden, queries)
        yield f"{layer}.mlp.gate_proj.weight", matrix(mlp, hidden)
        yield f"{layer}.mlp.up_proj.weight", matrix(mlp, hidden)
        yield f"{layer}.mlp.down_proj.weight", matrix(hidden, mlp)


def w8a8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with each layer's matrices in int8, [out, in], and scales beside them, [out, 1]."""
    result = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            result[name] = tensor
            continue
        scale = (tensor.float().abs().amax(dim=1, keepdim=True) / INT8_MAX).bfloat16()
        result[name] = (tensor / scale.float()).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        result[f"{name}_scale"] = scale
    return result


def gptq(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with each layer's matrices in 4 bits, symmetric and rounded to nearest.

    Layout: https://github.com/AutoGPTQ/AutoGPTQ. The matrix is transposed, eight inputs to a word; a zero of
    8 is stored as 7, eight outputs to a word.
    """
    result = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            result[name] = tensor
            continue
        rows, inputs = tensor.shape
        groups = tensor.float().view(rows, -1, GPTQ_GROUP_SIZE)
        scales = (groups.abs().amax(dim=2) / 7).half()
        steps = (groups / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
        stem = name.removesuffix("weight")
        result[f"{stem}qweight"] = _words(steps.view(rows, inputs // 8, 8)).t().contiguous()
        result[f"{stem}qzeros"] = _words(torch.full((inputs // GPTQ_GROUP_SIZE, rows // 8, 8), 7))
        result[f"{stem}scales"] = scales.t().contiguous()
        result[f"{stem}g_idx"] = torch.arange(inputs, dtype=torch.int32) // GPTQ_GROUP_SIZE
    return result


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Return int32 [...] of numbers in 4 bits [..., 8], lowest first."""
    words = (numbers.long() << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer without merges. It is only needed for loading: prompts are token ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default: bf16")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b", help="default: 0.6b")
    parser.add_argument("directory", type=Path, help="output directory; created if missing")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[options.shape]
    tensors, config = dict(random_tensors(shape)), config_of(shape)
    if options.precision == "int8":
        tensors, config = w8a8(tensors), config | {"quantization_config": W8A8}
    elif options.precision == "int4":
        tensors, config = gptq(tensors), config | {"quantization_config": GPTQ}
    write_tokenizer(options.directory)
    (options.directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, options.directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
