"""GGUF files of random models, written by the `gguf` package as llama.cpp's conversion writes them.

The numbers that a file stands for are those that the package dequantizes; a Hugging Face checkpoint with them
is written beside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

ARCHITECTURES = {
    "llama": "llama",
    "llama-3.1": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "phi3": "phi3",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    checkpoint: Path,
    family: str,
    kind: str,
    *,
    has_tokenizer: bool = False,
    max_tensors: int = 0,
    other_kinds: Mapping[str, str] | None = None,
    rotated_features: int = 0,
    **metadata: Any,
) -> tuple[Path, Path]:
    """Convert the float32 checkpoint in directory `checkpoint`.

    Args:
        checkpoint: the directory.
        family: one of `ARCHITECTURES`.
        kind: of the matrices, as ggml calls it: F32, BF16, Q8_0 and so on.
        max_tensors: in one file; 0: all.
        other_kinds: of the matrices in whose names in the checkpoint a key occurs.
        rotated_features: of each head; 0: as many as the checkpoint's config says.
        has_tokenizer: write the checkpoint's tokenizer into the file too.
        metadata: more of it, {architecture}. before each name and dots for double underscores.

    Returns:
        The GGUF file, and the directory of a checkpoint with the same numbers.
    """
    twin = checkpoint.with_name(checkpoint.name + "-floats")
    shutil.copytree(checkpoint, twin)
    file = checkpoint.with_name(checkpoint.name + ".gguf")
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, ARCHITECTURES[family], split_max_tensors=max_tensors)
    _add_metadata(writer, config, rotated_features)
    for name, value in metadata.items():
        writer.add_key_value(
            f"{ARCHITECTURES[family]}.{name.replace('__', '.')}",
            value,
            gguf.GGUFValueType.get_type(value),
        )
    if has_tokenizer:
        _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    if family == "llama-3.1":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config["rope_parameters"], config))
    floats = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        array = _as_llama_cpp(family, name, weight.numpy(), config)
        own_kind = next((own for part, own in (other_kinds or {}).items() if part in name), kind)
        quantization = gguf.GGMLQuantizationType[own_kind if weight.ndim == 2 else "F32"]
        stored = gguf.quants.quantize(array, quantization)
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=quantization)
        exact = gguf.quants.dequantize(stored, quantization)
        floats[name] = torch.from_numpy(_back(family, name, exact, config).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(floats, twin / "model.safetensors")
    return file, twin


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], rotated_features: int) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    rotated = rotated_features or int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _add_tokenizer(writer: gguf.GGUFWriter, published: dict[str, Any]) -> None:
    vocabulary, merges = published["model"]["vocab"], published["model"]["merges"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {entry["content"] for entry in published["added_tokens"]}
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([types.CONTROL if token in special else types.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


def _llama3_factors(rope: dict[str, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return by what each frequency is divided, in the terms of Llama 3.1's own code."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = (length / wave - low) / (high - low)
        if wave < length / high:
            factors.append(1.0)
        elif wave > length / low:
            factors.append(rope["factor"])
        else:
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _gguf_name(name: str) -> str:
    stem, _, last = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_NAMES[rest]}.{last}"
    return f"{_NAMES[stem]}.{last}"


def _as_llama_cpp(
    family: str, name: str, array: np.ndarray[Any, Any], config: dict[str, Any]
) -> np.ndarray[Any, Any]:
    if family == "gemma" and name.endswith("norm.weight"):
        return array + np.float32(1)
    heads = _rotated_heads(family, name, config)
    if heads:
        return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def _back(
    family: str, name: str, array: np.ndarray[Any, Any], config: dict[str, Any]
) -> np.ndarray[Any, Any]:
    if family == "gemma" and name.endswith("norm.weight"):
        return array - np.float32(1)
    heads = _rotated_heads(family, name, config)
    if heads:
        return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def _rotated_heads(family: str, name: str, config: dict[str, Any]) -> int:
    """Return the heads whose rows llama.cpp interleaves, or 0."""
    if ARCHITECTURES[family] != "llama" or not any(part in name for part in ("q_proj", "k_proj")):
        return 0
    return int(config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
