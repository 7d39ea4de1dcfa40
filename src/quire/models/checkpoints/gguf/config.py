"""Converts a GGUF file's metadata to a Hugging Face config. Nothing here needs torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.models.checkpoints.gguf.architectures import Architecture, architecture_of
from quire.models.checkpoints.gguf.file import GGUFFile, Texts, read_gguf, type_name
from quire.models.checkpoints.gguf.tensor_names import fused_tensor
from quire.models.config_entries import ROPE_RULES, RULES, Entries, check_entry
from quire.models.ropes import ROTATED_FEATURES

_NEEDED = ("hidden_size", "num_attention_heads", "max_position_embeddings")
_ROPE_KEYS = {
    "dimension_count": RULES["head_dim"],
    "scaling.type": ROPE_RULES["rope_type"],
    "scaling.factor": ROPE_RULES["factor"],
    "scale_linear": ROPE_RULES["factor"],
    "scaling.original_context_length": ROPE_RULES["original_max_position_embeddings"],
    "scaling.attn_factor": ROPE_RULES["attention_factor"],
    "scaling.yarn_attn_factor": ROPE_RULES["attention_factor"],
    "scaling.yarn_beta_fast": ROPE_RULES["beta_fast"],
    "scaling.yarn_beta_slow": ROPE_RULES["beta_slow"],
}
_ONLY = {  # neutral values of parameters that llama.cpp supports and Quire does not
    "rope.scaling.yarn_ext_factor": (1, -1),  # -1: by the kind of scaling
    "rope.scaling.yarn_log_multiplier": (0,),
    "attention.causal": (True,),
}
_HARMLESS = ("rope.scaling.finetuned", "attention.layer_norm_epsilon")
_CHANGES_NUMBERS = re.compile(r"rope\..*|attention\..*|.*_scale|.*_softcapping|expert_.*")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the frequencies, as in Llama 3.1
_LONG_ROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
ROPE_TENSORS = (_ROPE_FACTORS, *_LONG_ROPE_FACTORS.values())
_MAX_ROPE_FACTORS = 1 << 12
_DTYPES = {0: "float32", 1: "float16"}  # by ggml's number; all others are computed in bfloat16
_EMBEDDING_DTYPES = _DTYPES | {30: "bfloat16"}
_FLOAT32 = 0
_PER_LAYER = "per_layer_token_embd.weight"
_STILL = 1e20  # divisors of frequencies by which nothing turns


def read_gguf_config(path: Path) -> tuple[dict[str, Any], Callable[[str], str]]:
    """Return the equivalent of config.json for a GGUF file, and a function that returns a weight's ggml type.

    The function takes a weight's name in a Hugging Face checkpoint; the type of a missing one is "".

    Raises:
        ModelError: see `read_gguf`; or the metadata say what Quire does not compute.
    """
    file = read_gguf(path)
    name = file.metadata["general.architecture"]
    architecture = architecture_of(file.metadata, path)
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{path} lacks token_embd.weight; is it a language model, and all of it?")
    prefix = f"{name}."
    metadata = Entries(
        {
            key.removeprefix(prefix): value.decoded if isinstance(value, Texts) else value
            for key, value in file.metadata.items()
            if key.startswith(prefix)
        }
    )
    values = _entries(file, architecture, metadata)
    values["architectures"] = [architecture.hf_name]
    values["vocab_size"] = next(iter(file.tensors["token_embd.weight"].shape), 0)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    kinds = {name.split(".", 2)[-1] for name in file.tensors if name.startswith("blk.")}
    values |= {entry: tensor in kinds for entry, tensor in architecture.present.items()}
    values["attention_k_eq_v"] = any(
        name.endswith(".attn_k.weight") and name.replace("attn_k", "attn_v") not in file.tensors
        for name in file.tensors
    )
    kind = _matrix_kind(file)
    values["dtype"] = _DTYPES.get(kind, "bfloat16")
    values["embedding_dtype"] = _EMBEDDING_DTYPES.get(file.tensors["token_embd.weight"].kind, "")
    if _PER_LAYER in file.tensors:
        values["per_layer_embedding_dtype"] = _EMBEDDING_DTYPES.get(file.tensors[_PER_LAYER].kind, "")
    for token in ("bos_token_id", "eos_token_id"):
        values[token] = file.metadata.get(f"tokenizer.ggml.{token}")
    # llama.cpp's defaults, which differ from transformers'
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    head_dim = values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"] or None)
    key_length = values.get("global_head_dim", head_dim)
    value_length = metadata.get("attention.value_length", key_length)
    if head_dim is not None:
        if value_length != key_length and not architecture.has_latents and "v_head_dim" not in values:
            raise _refusal(file, "attention.value_length", value_length, f"{key_length}, as of keys,")
        values |= architecture.finish(values, metadata)
    values |= (_ropes_by_type if architecture.has_ropes_by_type else _rope)(file, metadata, values)
    _refuse_others(file, architecture, metadata)

    def type_of(weight: str) -> str:
        stored = architecture.tensor(weight)[0]
        fused = None if stored in file.tensors else fused_tensor(stored)
        info = file.tensors.get(stored if fused is None else fused[0])
        return "" if info is None else type_name(info.kind)

    return values, type_of


def _entries(file: GGUFFile, architecture: Architecture, metadata: Entries) -> dict[str, Any]:
    """Return the entries of config.json that keys of the metadata stand for."""
    name = file.metadata["general.architecture"]
    values: dict[str, Any] = {}
    for entry, key in architecture.keys.items():
        value = metadata.get(key)
        if value is None:
            continue
        if entry == "sliding_window_pattern" and isinstance(value, list):
            if any(is_sliding not in (0, 1) for is_sliding in value):
                raise _refusal(file, key, value, "true and false, or 1 and 0,")
            values["layer_types"] = [_LAYER_TYPES[int(is_sliding)] for is_sliding in value]
            continue
        if isinstance(value, list):  # of each layer
            if entry == "num_key_value_heads" and architecture.without_kv:
                values["layer_types"] = [
                    _LAYER_TYPES[0] if count else architecture.without_kv for count in value
                ]
                value = [count for count in value if count]
            if value and value.count(value[0]) == len(value):
                value = value[0]
            elif entry in architecture.by_layer and len(value) == metadata.get("block_count"):
                values[entry] = value
                for one in value:
                    check_entry(f"{file.path}: {name}.{key} has", one, RULES[entry])
                continue
        values[entry] = value
        check_entry(f"{file.path}: {name}.{key} is", value, (RULES | ROPE_RULES)[entry])
    for entry in _NEEDED:
        if entry not in values:
            raise ModelError(
                f"{file.path} has no {name}.{architecture.keys[entry]}; it must be {RULES[entry].describe()}"
            )
    layers = {tensor.split(".")[1] for tensor in file.tensors if tensor.startswith("blk.")}
    if values.get("num_hidden_layers") != len(layers):
        raise ModelError(
            f"{file.path} says that it has {values.get('num_hidden_layers')} layers and holds tensors of "
            f"{len(layers)}"
        )
    values["num_hidden_layers"] -= num_draft_layers(file)
    return values


def num_draft_layers(file: GGUFFile) -> int:
    """Return how many layers at the end predict further tokens; they are passed over."""
    name = file.metadata["general.architecture"]
    return int(file.entry(f"{name}.nextn_predict_layers", int) or 0)


def _matrix_kind(file: GGUFFile) -> int:
    """Return ggml's number for the kind of a layer's first matrix."""
    layer = (f"blk.0.{name}.weight" for name in ("attn_q", "attn_qkv", "attn_kv_a_mqa"))
    names = (*layer, "token_embd.weight")
    return next(file.tensors[name].kind for name in names if name in file.tensors)


def _rope(file: GGUFFile, metadata: Entries, values: dict[str, Any]) -> dict[str, Any]:
    def entry(key: str) -> Any:
        value = metadata.get(f"rope.{key}")
        check_entry(
            f"{file.path}: {file.metadata['general.architecture']}.rope.{key} is", value, _ROPE_KEYS[key]
        )
        return value

    original = entry("scaling.original_context_length") or values["max_position_embeddings"]
    factor = entry("scaling.factor") or entry("scale_linear") or 1.0  # the latter in files of 2023
    kind = entry("scaling.type") or ("linear" if factor != 1 else "none")
    attention_factor = entry("scaling.attn_factor")
    factors = {key: _floats(file, name) for key, name in _LONG_ROPE_FACTORS.items() if name in file.tensors}
    if _ROPE_FACTORS in file.tensors:
        factors = dict.fromkeys(_LONG_ROPE_FACTORS, _floats(file, _ROPE_FACTORS))
        original = values["max_position_embeddings"]  # one set of factors for every length
    scaling: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    beyond, beta = values.pop("mscale_all_dim", 0.0), values.pop("llama_4_scaling_beta", None)
    truncate, mscale = values.pop("truncate", None), values.pop("mscale", None)
    if factors:
        if kind not in ("none", "longrope") and factor != 1:
            raise _refusal(file, "rope.scaling.type", kind, "with tensors of factors, none and longrope")
        scaling = {"rope_type": "longrope", "attention_factor": attention_factor} | factors
    elif kind == "yarn":
        scaling |= {name: entry(f"scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        # llama.cpp stores a factor to the paper's value; a config.json has the product.
        times = (attention_factor or 1) * (entry("scaling.yarn_attn_factor") or 1)
        turns = 0.1 * math.log(max(factor, 1))
        if mscale is not None:  # of scores, and none of cosines and sines
            beyond = 1.0
            scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
        scaling["attention_factor"] = times * (turns + 1) / (beyond * turns + 1)
        scaling |= {"original_max_position_embeddings": original, "truncate": truncate}
    elif attention_factor not in (None, 1):
        raise _refusal(file, "rope.scaling.attn_factor", attention_factor, f"with the type {kind}, 1")
    if kind != "none" and not factors:
        scaling["factor"] = factor
    if beta is not None:
        scaling["llama_4_scaling_beta"] = beta
    return {
        ROTATED_FEATURES: entry("dimension_count"),
        "original_max_position_embeddings": original if factors else None,
        "rope_scaling": scaling,
    }


def _ropes_by_type(file: GGUFFile, metadata: Entries, values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of rotary embeddings of layers without and with a window.

    If heads of these differ in size, all features are rotated. Of the first, frequencies may have divisors:
    1, and for the features that do not turn 1e30.
    """
    sizes = values.get("global_head_dim", values["head_dim"]), values["head_dim"]
    all_rotated = sizes
    if "global_head_dim" not in values:
        all_rotated = (metadata.get("rope.dimension_count", sizes[0]),) * 2
        check_entry(f"{file.path}: rope.dimension_count is", all_rotated[0], _ROPE_KEYS["dimension_count"])
    ropes: list[dict[str, Any]] = []
    for suffix, size in zip(("", "_swa"), all_rotated, strict=True):
        if (rotated := metadata.get(f"rope.dimension_count{suffix}", size)) != size:
            raise _refusal(file, f"rope.dimension_count{suffix}", rotated, f"{size}, as of heads,")
        theta = metadata.get(f"rope.freq_base{suffix}", 1e4)
        check_entry(f"{file.path}: rope.freq_base{suffix} is", theta, RULES["rope_theta"])
        ropes.append({"rope_theta": theta})
    if _ROPE_FACTORS in file.tensors:
        factors = _floats(file, _ROPE_FACTORS)
        turning = factors.count(1.0)
        still = [factor for factor in factors[turning:] if factor >= _STILL]
        if len(factors) != sizes[0] // 2 or turning + len(still) != len(factors):
            raise ModelError(
                f"{_ROPE_FACTORS} in {file.path} must have for each of {sizes[0] // 2} pairs 1, or behind "
                "those a number that lets it stay"
            )
        ropes[0] |= {"rope_type": "proportional", "partial_rotary_factor": 2 * turning / sizes[0]}
    by_type = {"full_attention": ropes[0], "sliding_attention": ropes[1]}
    part = None if all_rotated == sizes else all_rotated[0]
    return {ROTATED_FEATURES: part, "rope_parameters": by_type}


def _refuse_others(file: GGUFFile, architecture: Architecture, metadata: Entries) -> None:
    """Refuse or log metadata of the architecture that is not supported."""
    for key, allowed in _ONLY.items():
        value = None if key in architecture.keys.values() else metadata.get(key)
        if value is not None and value not in allowed:
            raise _refusal(file, key, value, " and ".join(map(str, allowed)))
    for key in architecture.ignored:
        metadata.get(key)
    for key in metadata.unread():
        if _CHANGES_NUMBERS.fullmatch(key) and key not in _HARMLESS:
            raise _refusal(file, key, metadata[key], "none")
    metadata.warn_of_unread(str(file.path))


def _refusal(file: GGUFFile, key: str, value: Any, known: str) -> ModelError:
    name = f"{file.metadata['general.architecture']}.{key}"
    return ModelError(f"{file.path}: {name} is {value!r:.100}; Quire computes {known} only")


def _floats(file: GGUFFile, name: str) -> list[float]:
    info = file.tensors[name]
    if info.kind != _FLOAT32:
        raise ModelError(f"{name} in {file.path} is of the ggml type {type_name(info.kind)}; F32 is needed")
    if len(info.shape) != 1 or info.shape[0] > _MAX_ROPE_FACTORS:
        raise ModelError(
            f"{name} in {file.path} has shape {list(info.shape)}; at most {_MAX_ROPE_FACTORS} numbers in one "
            "dimension are needed"
        )
    stop = info.start + 4 * info.shape[0]
    numbers = np.frombuffer(info.data[info.start : stop], dtype="<f4")
    return [float(number) for number in numbers]
