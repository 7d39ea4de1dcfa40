"""Writes the comparison's model as GGUF files, for llama.cpp and for Quire.

    .peers/llamacpp/bin/python benchmarks/peers_gguf.py CHECKPOINT bf16|q8_0|q4_0|q4_k_m FILE

CHECKPOINT was written by `peers_model.py`. Matrices are copied; norms become float32, as llama.cpp requires.
The others are llama.cpp's own quantizations of the bf16 file, including the embedding.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray
from peers_workload import NUM_THREADS

FILE_TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}

TENSOR_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor: `blk.3.attn_q` for `model.layers.3.self_attn.q_proj`."""
    stem = name.removesuffix(".weight")
    if stem in TENSOR_NAMES:
        return f"{TENSOR_NAMES[stem]}.weight"
    number, rest = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{TENSOR_NAMES[rest]}.weight"


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the model's sizes."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Write the tokenizer, padded with unused tokens to the size of the vocabulary."""
    size = config["vocab_size"]
    tokens = [f"[UNUSED_{number}]" for number in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for text, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = text, gguf.TokenType.NORMAL
    for entry in tokenizer["added_tokens"]:
        tokens[entry["id"]], types[entry["id"]] = entry["content"], gguf.TokenType.CONTROL
    tokens[-1] = "ab"  # what the only merge makes; prompts are token ids
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])  # an empty list cannot be written
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def mapped_tensors(path: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Yield the tensors of a safetensors file in bf16, as their bits, which stay in the file."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8:start])).items():
        if name != "__metadata__":
            first, end = (start + offset for offset in entry["data_offsets"])
            yield name, data[first:end].view(np.uint16).reshape(entry["shape"])


def add_tensors(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    """Write all tensors of the checkpoint."""
    for name, bits in mapped_tensors(checkpoint / "model.safetensors"):
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def write_bf16(checkpoint: Path, path: Path) -> None:
    """Write the bf16 file."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "qwen3")
    add_config(writer, config)
    add_tokenizer(writer, tokenizer, config)
    add_tensors(writer, checkpoint)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_quantized(checkpoint: Path, path: Path, file_type: int) -> None:
    """Write a quantized file, from a temporary bf16 file."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = file_type
    parameters.nthread = NUM_THREADS
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        source = Path(directory, "bf16.gguf")
        write_bf16(checkpoint, source)
        status = llama_cpp.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(parameters))
    if status:
        raise SystemExit(f"llama.cpp could not quantize {source}: status {status}")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("form", choices=("bf16", *FILE_TYPES))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    if options.form == "bf16":
        write_bf16(options.checkpoint, options.file)
    else:
        write_quantized(options.checkpoint, options.file, FILE_TYPES[options.form])


if __name__ == "__main__":
    main()
