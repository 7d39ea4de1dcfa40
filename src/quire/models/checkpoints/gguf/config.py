"""From a GGUF file's metadata to a config as Hugging Face's format has it. Nothing here needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.models.checkpoints.gguf.file import GGUFFile, read_gguf
from quire.models.config_entries import ROPE_RULES, RULES, check_entry

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}
_NEEDED = ("hidden_size", "num_attention_heads", "max_position_embeddings")
_ROPE_KEYS = {
    "dimension_count": RULES["head_dim"],
    "scaling.type": ROPE_RULES["rope_type"],
    "scaling.factor": ROPE_RULES["factor"],
    "scale_linear": ROPE_RULES["factor"],
    "scaling.original_context_length": ROPE_RULES["original_max_position_embeddings"],
    "scaling.attn_factor": ROPE_RULES["attention_factor"],
}
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the frequencies, as Llama 3.1 has them
_LONG_ROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
ROPE_TENSORS = (_ROPE_FACTORS, *_LONG_ROPE_FACTORS.values())
_MAX_ROPE_FACTORS = 1 << 12
_DTYPES = {0: "float32", 1: "float16"}  # by ggml's number; all others are computed in bfloat16
_EMBEDDING_DTYPES = _DTYPES | {30: "bfloat16"}
_FLOAT32 = 0


def read_gguf_config(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what config.json would say of the model in a GGUF file, and ggml's kind of each of its tensors.

    Raises:
        ModelError: the file cannot be read, or the architecture is not one that Quire reads from GGUF.
    """
    file = read_gguf(path)
    architecture = str(file.entry("general.architecture", str))
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{path} holds the architecture {architecture:.100}; Quire reads {', '.join(_ARCHITECTURES)} "
            "from GGUF files"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{path} lacks token_embd.weight; is it a language model, and all of it?")
    values = {}
    for name, key in _KEYS.items():
        if f"{architecture}.{key}" in file.metadata:
            value = values[name] = file.metadata[f"{architecture}.{key}"]
            check_entry(f"{path}: {architecture}.{key} is", value, RULES[name])
    for name in _NEEDED:
        if name not in values:
            raise ModelError(
                f"{path} has no {architecture}.{_KEYS[name]}; it must be {RULES[name].describe()}"
            )
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if values.get("num_hidden_layers") != len(layers):
        raise ModelError(
            f"{path} says that it has {values.get('num_hidden_layers')} layers and holds tensors of "
            f"{len(layers)}"
        )
    values["architectures"] = [_ARCHITECTURES[architecture]]
    values["vocab_size"] = next(iter(file.tensors["token_embd.weight"].shape), 0)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    values["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    kind = _matrix_kind(file)
    values["dtype"] = _DTYPES.get(kind, "bfloat16")
    values["embedding_dtype"] = _EMBEDDING_DTYPES.get(file.tensors["token_embd.weight"].kind, "")
    for name in ("bos_token_id", "eos_token_id"):
        values[name] = file.metadata.get(f"tokenizer.ggml.{name}")
    values |= _rope(file, architecture, values)
    return values, {name: tensor.kind for name, tensor in file.tensors.items()}


def _matrix_kind(file: GGUFFile) -> int:
    """Return ggml's number for the kind of a layer's first matrix."""
    names = ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight", "token_embd.weight")
    return next(file.tensors[name].kind for name in names if name in file.tensors)


def _rope(file: GGUFFile, architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    def entry(key: str) -> Any:
        value = file.metadata.get(f"{architecture}.rope.{key}")
        check_entry(f"{file.path}: {architecture}.rope.{key} is", value, _ROPE_KEYS[key])
        return value

    found: dict[str, Any] = {}
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    rotated = entry("dimension_count")
    if rotated and head_dim:  # heads of no features are an error of the config
        # A config.json has the share of features that are rotated, rounded down: 30 / 88 of 88 are 29.
        found["partial_rotary_factor"] = 1.0 if rotated == head_dim else (rotated + 0.5) / head_dim
    original = entry("scaling.original_context_length")
    factor = entry("scaling.factor") or entry("scale_linear")  # the latter in files of 2023
    kind = entry("scaling.type") or ("linear" if factor else None)
    if _ROPE_FACTORS in file.tensors:
        factors = _floats(file, _ROPE_FACTORS)
        original = values["max_position_embeddings"]  # one set of factors for every length
        scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    elif all(name in file.tensors for name in _LONG_ROPE_FACTORS.values()):
        scaling = {key: _floats(file, name) for key, name in _LONG_ROPE_FACTORS.items()} | {
            "rope_type": "longrope"
        }
        scaling["attention_factor"] = entry("scaling.attn_factor")
    elif kind in (None, "none"):
        return found
    else:
        scaling = {"rope_type": kind, "factor": factor}
    found["rope_scaling"] = scaling | {"original_max_position_embeddings": original}
    return found


def _floats(file: GGUFFile, name: str) -> list[float]:
    info = file.tensors[name]
    if info.kind != _FLOAT32:
        raise ModelError(f"{name} in {file.path} is of ggml type {info.kind}; float32 is needed")
    if len(info.shape) != 1 or info.shape[0] > _MAX_ROPE_FACTORS:
        raise ModelError(
            f"{name} in {file.path} has shape {list(info.shape)}; at most {_MAX_ROPE_FACTORS} numbers in one "
            "dimension are needed"
        )
    stop = info.start + 4 * info.shape[0]
    numbers = np.frombuffer(info.data[info.start : stop], dtype="<f4")
    return [float(number) for number in numbers]
