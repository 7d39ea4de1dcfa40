"""Writes the model of the comparison: random weights in Qwen3-0.6B's shape, and a byte-level tokenizer.

    python benchmarks/peers_model.py --precision bf16|int8 DIRECTORY

bf16 is an ordinary Hugging Face checkpoint, which Quire reads in both precisions and from which the files of
other engines are converted. int8 is the same model in compressed-tensors' W8A8 format: weights in int8 with a
scale per output channel, activations to be quantized dynamically per token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peers_workload import PRECISIONS, SHAPE
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

STANDARD_DEVIATION = 0.02
SEED = 0
INT8_MAX = 127
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256  # after the 256 byte tokens

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": SHAPE.vocab_size,
    "hidden_size": SHAPE.hidden_size,
    "intermediate_size": SHAPE.intermediate_size,
    "num_hidden_layers": SHAPE.num_layers,
    "num_attention_heads": SHAPE.num_heads,
    "num_key_value_heads": SHAPE.num_kv_heads,
    "head_dim": SHAPE.head_dim,
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


def random_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the checkpoint by its name, in bf16: norms are 1, all else is normal."""
    generator = torch.Generator().manual_seed(SEED)

    def matrix(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator) * STANDARD_DEVIATION).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    hidden, mlp, head = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.head_dim
    queries, keys = SHAPE.num_heads * head, SHAPE.num_kv_heads * head
    yield "model.embed_tokens.weight", matrix(SHAPE.vocab_size, hidden)
    yield "model.norm.weight", ones(hidden)
    for number in range(SHAPE.num_layers):
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


def quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
    parser.add_argument("directory", type=Path, help="output directory; created if missing")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    tensors, config = dict(random_tensors()), CONFIG
    if options.precision == "int8":
        tensors, config = quantized(tensors), CONFIG | {"quantization_config": W8A8}
    write_tokenizer(options.directory)
    (options.directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, options.directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
