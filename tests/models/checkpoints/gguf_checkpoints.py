"""GGUF files of random models, written by the `gguf` package as llama.cpp's conversion writes them.

The numbers that a file stands for are those that the package dequantizes; a Hugging Face checkpoint with them
is written beside it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig

ARCHITECTURES = {
    **{name: name for name in ("qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "granite", "smollm3")},
    **dict.fromkeys(("llama", "llama-3.1", "mixtral"), "llama"),
    **dict.fromkeys(("olmo2", "olmo3"), "olmo2"),
    "qwen2_moe": "qwen2moe",
    **dict.fromkeys(("granitemoe", "granitemoeshared"), "granitemoe"),
    **dict.fromkeys(("granitemoehybrid", "granitemoehybrid-dense"), "granitehybrid"),
    "qwen3_moe": "qwen3moe",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "ministral3": "mistral3",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "gpt_oss": "gpt-oss",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
    "minicpm3": "minicpm3",
    **dict.fromkeys(("gemma4", "gemma4_unified", "gemma4-experts"), "gemma4"),
    "glm4_moe": "glm4moe",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h_moe",
    "nemotron_h-dense": "nemotron_h",
    **dict.fromkeys(("qwen3_next", "qwen3_next-fused"), "qwen3next"),
    "kimi_linear": "kimi-linear",
    "llama4": "llama4",
    "mimo_v2_flash": "mimo2",
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
WITH_MINIMA = ("Q2_K", "Q4_1", "Q5_1", "Q4_K", "Q5_K")
_NOT_QUANTIZED = (".bias", "ffn_gate_inp", "shortconv.conv.", "ssm_conv1d")
_WITH_OFFSET = ("gemma", "gemma2", "gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_next-fused")
_INTERLEAVED = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3")
_INTERLEAVED += ("nemotron_h", "nemotron_h_moe")  # although nothing is rotated
_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def write_gguf(
    checkpoint: Path,
    family: str,
    kind: str,
    *,
    has_tokenizer: bool = False,
    max_tensors: int = 0,
    other_kinds: Mapping[str, str] | None = None,
    rotated_features: int = 0,
    random_kind: str = "",
    has_halves: bool = True,
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
        random_kind: of the matrices, which are random blocks, but for the twin; empty: they are not.
        has_halves: what makes keys of latents is apart from what makes values.
        has_tokenizer: write the checkpoint's tokenizer into the file too.
        metadata: more of it, {architecture}. before each name and dots for double underscores.

    Returns:
        The GGUF file, and the directory of a checkpoint with the same numbers.
    """
    twin = checkpoint.with_name(checkpoint.name + "-floats")
    shutil.copytree(checkpoint, twin)
    file = checkpoint.with_name(checkpoint.name + ".gguf")
    has_halves = has_halves and family != "minicpm3"
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, ARCHITECTURES[family], split_max_tensors=max_tensors)
    _add_metadata(writer, _described(family, config), rotated_features, has_halves)
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
    num_layers = _described(family, config)["num_hidden_layers"]
    names = gguf.get_tensor_name_map(_ENUMS[ARCHITECTURES[family]], num_layers)
    floats = {}
    weights = load_file(checkpoint / "model.safetensors")
    for parts in _merged(_as_named_there(weights, family, config, has_halves=has_halves)):
        arrays = [_as_llama_cpp(family, name, weight.numpy(), config) for name, weight in parts.items()]
        shape = arrays[0].shape
        if len(shape) == 3 and shape[1] == 1:  # of a convolution
            arrays = [array.squeeze(1) for array in arrays]
        name = _known_name(next(iter(parts)), family)
        own_kind = next((own for part, own in (other_kinds or {}).items() if part in name), kind)
        is_bare = name.endswith(("layer_scalar", ".experts.gate_up_proj", ".experts.down_proj"))
        stored_name = names.get_name(f"{name}.weight" if is_bare else name, try_suffixes=(".weight", ".bias"))
        _, _, rest = name.partition("layers.")
        layer, _, rest = rest.partition(".")
        stored_name = f"blk.{layer}.{_SCALES[rest]}" if rest in _SCALES else stored_name
        assert stored_name is not None
        is_float = arrays[0].ndim == 1 or any(part in stored_name for part in _NOT_QUANTIZED)
        quantization = gguf.GGMLQuantizationType["F32" if is_float else own_kind]
        if len(shape) == 2 and len(arrays[0]) == 1:  # as llama-quantize leaves it
            arrays = [arrays[0][0]]
        stored = gguf.quants.quantize(arrays[0] if len(parts) == 1 else np.stack(arrays), quantization)
        if random_kind and not is_float:
            quantization = gguf.GGMLQuantizationType[random_kind]
            stored = _random_blocks(arrays[0].shape, quantization)
        writer.add_tensor(stored_name, stored, raw_dtype=quantization)
        if family in _SEPARATED:
            continue
        exact = gguf.quants.dequantize(stored, quantization)
        for part, array in zip(parts, exact if len(parts) > 1 else [exact], strict=True):
            floats[part] = torch.from_numpy(_back(family, part, array, config).reshape(shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if "kv_lora_rank" in config:
        _join_halves(floats)
    if family not in _SEPARATED:  # whose twin is the checkpoint itself
        save_file(floats, twin / "model.safetensors")
    return file, twin


def _described(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what metadata say of a config; the conversion of some architectures leaves entries out."""
    if family == "falcon_h1":
        return {name: value for name, value in config.items() if not name.endswith("_multiplier")}
    if family == "kimi_linear":
        usual = KimiLinearConfig.attribute_map.items()
        return config | {name: config[saved] for name, saved in usual if saved in config}
    if not family.startswith("nemotron_h"):
        return config
    count = {"num_hidden_layers": len(config["layers_block_type"])}
    of_experts = re.compile(r"moe_.*|n_routed_.*|n_shared_.*|n_group|topk_group|num_experts.*|routed_.*")
    is_dense = family.endswith("dense")
    return count | {
        name: value for name, value in config.items() if not (is_dense and of_experts.fullmatch(name))
    }


def _as_named_there(
    weights: dict[str, torch.Tensor], family: str, config: dict[str, Any], *, has_halves: bool
) -> dict[str, torch.Tensor]:
    """Return weights with one for each part of a tensor that llama.cpp keeps apart."""
    if "kv_lora_rank" in config and has_halves:
        return _halved(weights, config)
    return _SEPARATED[family](weights, config) if family in _SEPARATED else weights


def _known_name(name: str, family: str) -> str:
    """Return a name of which the `gguf` package knows llama.cpp's, as the conversion renames it."""
    name = _EXPERT.sub(r"\1.\3", name).replace(".dt_bias", ".dt_proj.bias")
    if family == "lfm2_moe":
        name = name.replace(".expert_bias", ".expert_bias.bias")
        name = name.removeprefix("model." if ".experts." in name else "")
    if ".mixer.experts." in name:
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    name = name.replace("attention_sink_bias", "attention_sink_bias.weight")
    name = re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name)  # of dense layers
    return name.replace("e_score_correction_bias", "e_score_correction.bias")


_ENUMS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def _separated(weights: Mapping[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return weights of gpt-oss as llama.cpp names them: rows of gates and of inner features alternate."""
    separated = {}
    for name, weight in weights.items():
        last = "bias" if name.endswith("_bias") else "weight"
        stem = name.removesuffix("_bias").removesuffix("_proj")
        if ".experts." not in name:
            separated[f"{name}.weight" if name.endswith("sinks") else name] = weight
            continue
        rows = weight if last == "bias" else weight.transpose(1, 2)
        parts = {stem: rows}
        if stem.endswith("gate_up"):
            both = stem.removesuffix("gate_up")
            parts = {f"{both}gate": rows[:, ::2], f"{both}up": rows[:, 1::2]}
        separated |= {f"{part}_proj.{last}": part_rows.contiguous() for part, part_rows in parts.items()}
    return separated


def _with_experts_apart(
    weights: Mapping[str, torch.Tensor], config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return weights of Llama 4 with gates of all experts in one tensor, what they multiply in another."""
    apart = {}
    for name, weight in weights.items():
        parts = {name: weight}
        if name.endswith("experts.gate_up_proj"):
            stem, halves = name.removesuffix("gate_up_proj"), weight.transpose(1, 2).chunk(2, dim=1)
            parts = {
                f"{stem}{part}_proj.weight": half for part, half in zip(("gate", "up"), halves, strict=True)
            }
        elif name.endswith("experts.down_proj"):
            parts = {f"{name}.weight": weight.transpose(1, 2)}
        apart |= {part: tensor.contiguous() for part, tensor in parts.items()}
    return apart


def _halved(weights: Mapping[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return weights with what makes keys of latents, transposed for each head, apart from values."""
    halved = {}
    for name, weight in weights.items():
        if ".kv_b_proj." not in name:
            halved[name] = weight
            continue
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        heads = weight.view(config["num_attention_heads"], sum(sizes), -1)
        keys, values = torch.split(heads, sizes, dim=1)
        halved[name.replace("kv_b", "k_b")] = keys.transpose(1, 2).contiguous()
        halved[name.replace("kv_b", "v_b")] = values.contiguous()
    return halved


def _join_halves(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if ".k_b_proj." in name]:
        keys, values = weights.pop(name), weights.pop(name.replace("k_b", "v_b"))
        joined = torch.cat((keys.transpose(1, 2), values), dim=1)
        weights[name.replace("k_b", "kv_b")] = joined.flatten(0, 1).contiguous()


def _separated_granite(
    weights: Mapping[str, torch.Tensor], config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return weights of Granite by names that the `gguf` package knows, gates in tensors of their own."""
    has_experts = any("block_sparse_moe" in name for name in weights)
    shared = "mlp.shared_expert." if has_experts else "mlp."
    separated = {}
    for name, weight in weights.items():
        layer, found, last = name.partition("block_sparse_moe.")
        to = "mlp.experts."
        if not found:
            layer, found, last = name.partition("shared_mlp.")
            to = shared
        if not found or last.startswith("router"):
            separated[name] = weight
        elif last.startswith("output"):
            separated[f"{layer}{to}down_proj.weight"] = weight
        else:
            for part, rows in zip(("gate", "up"), weight.chunk(2, dim=-2), strict=True):
                separated[f"{layer}{to}{part}_proj.weight"] = rows.contiguous()
    return separated


def _split_heads(weights: Mapping[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return weights of Qwen3-Next with queries, keys and values of all heads in turn, apart from gates."""
    keys, of_key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    of_values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    split = {}
    for name, weight in weights.items():
        if "in_proj_qkvz" not in name:
            split[name] = weight
            continue
        heads = weight.view(keys, -1, weight.shape[1])
        *qkv, gates = heads.split([of_key, of_key, of_values, of_values], dim=1)
        joined = torch.cat([part.flatten(0, 1) for part in qkv])
        split |= {name.replace("qkvz", "qkv"): joined, name.replace("qkvz", "z"): gates.flatten(0, 1)}
    return split


def _multiplied(weights: Mapping[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return weights of Falcon-H1 times what its config says."""
    of_gates, of_results = config["mlp_multipliers"]
    of_attention = config["attention_in_multiplier"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "gate_proj": of_gates,
        "down_proj": of_results,
        "q_proj": of_attention,
        "k_proj": of_attention * config["key_multiplier"],
        "v_proj": of_attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
    }
    values, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = values, values, keys, keys, config["mamba_n_heads"]
    of_rows = torch.cat([torch.full((n,), x) for n, x in zip(sizes, config["ssm_multipliers"], strict=True)])
    multiplied = {}
    for name, weight in weights.items():
        part = name.split(".")[-2]
        factor = of_rows[:, None] * config["ssm_in_multiplier"] if part == "in_proj" else factors.get(part, 1)
        multiplied[name] = weight * factor
    return multiplied


# Those whose tensors are others than the checkpoint's, and what makes these.
_SEPARATED: dict[str, Callable[[Mapping[str, torch.Tensor], dict[str, Any]], dict[str, torch.Tensor]]] = {
    "gpt_oss": _separated,
    "llama4": _with_experts_apart,
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _separated_granite),
    **dict.fromkeys(("granitemoehybrid", "granitemoehybrid-dense"), _separated_granite),
    "qwen3_next": _split_heads,
    "falcon_h1": _multiplied,
    **dict.fromkeys(
        ("gemma4-experts", "qwen3_next-fused", "nemotron_h", "nemotron_h-dense"),
        lambda weights, config: dict(weights),
    ),
}


def _merged(weights: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the weights of each tensor of a GGUF file, which has those of all experts in one, in order."""
    tensors: dict[str, dict[int, tuple[str, torch.Tensor]]] = {}
    for name, weight in weights.items():
        expert = _EXPERT.fullmatch(name)
        key, number = (name, 0) if expert is None else (f"{expert[1]}.{expert[3]}", int(expert[2]))
        tensors.setdefault(key, {})[number] = (name, weight)
    return [dict(parts[number] for number in sorted(parts)) for parts in tensors.values()]


def places_of_halves(kind: str) -> list[int]:
    """Return where a block of this kind has numbers in float16, in bytes."""
    if kind in ("F32", "F16", "BF16", "MXFP4"):
        return []
    elsewhere = {"Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]}
    return elsewhere.get(kind, [0, 2] if kind in WITH_MINIMA else [0])


def _random_blocks(shape: tuple[int, int], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Return rows of blocks whose scales are all near one."""
    rows, width = gguf.quants.quant_shape_to_byte_shape(shape, kind)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, width // block_bytes, block_bytes), np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = 127
    for place in places_of_halves(kind.name):
        blocks[..., place : place + 2] = np.array([0.75], np.float16).view(np.uint8)
    return blocks.reshape(rows, width)


def _add_metadata(
    writer: gguf.GGUFWriter, config: dict[str, Any], rotated_features: int, has_halves: bool
) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    if "intermediate_size" in config and "layers_block_type" not in config:
        writer.add_feed_forward_length(_inner_sizes(config))
    writer.add_head_count(heads)
    kv_heads = 1 if "kv_lora_rank" in config and has_halves else config["num_key_value_heads"]
    types = config.get("layer_types") or ()
    if config["model_type"].startswith("gemma4"):
        kv_heads, head_dim = _add_gemma4(writer, config)
    if "layers_block_type" in config:
        types = config["layers_block_type"]
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in types]
        inner = {"mlp": config["intermediate_size"], "moe": config.get("moe_intermediate_size", 0)}
        writer.add_feed_forward_length([inner.get(kind, 0) for kind in types])
    if config["model_type"] == "mimo_v2_flash":
        kv_heads = [kv_heads * (2 if kind == "sliding_attention" else 1) for kind in types]
    is_recurrent = config["model_type"] in ("granitemoehybrid", "kimi_linear")
    without_kv = "linear_attention" if is_recurrent else "conv"
    writer.add_head_count_kv(
        [0 if kind == without_kv else kv_heads for kind in types] if without_kv in types else kv_heads
    )
    if "kv_lora_rank" in config:
        rotated_features = config["qk_rope_head_dim"]
        sizes = config["qk_nope_head_dim"] + rotated_features, config["v_head_dim"]
        if has_halves:
            writer.add_key_length_mla(sizes[0])
            writer.add_value_length_mla(sizes[1])
            sizes = config["kv_lora_rank"] + rotated_features, config["kv_lora_rank"]
        writer.add_key_length(sizes[0])
        writer.add_value_length(sizes[1])
        writer.add_kv_lora_rank(config["kv_lora_rank"])
        if config.get("q_lora_rank"):
            writer.add_q_lora_rank(config["q_lora_rank"])
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(config.get("v_head_dim", head_dim))
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    is_proportional = rope.get("rope_type") == "proportional"
    rotated = rotated_features or int(
        head_dim * (1 if is_proportional else rope.get("partial_rotary_factor", 1.0))
    )
    if is_proportional:
        turning = int(head_dim * rope["partial_rotary_factor"]) // 2
        factors = [1.0] * turning + [1e30] * (head_dim // 2 - turning)
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    writer.add_rope_dimension_count(rotated)
    names_of_eps = "rms_norm_eps", "norm_eps", "layer_norm_epsilon"
    writer.add_layer_norm_rms_eps(next(config[name] for name in names_of_eps if config.get(name)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    _add_rest(writer, config, rope)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> tuple[list[int], int]:
    """Add what differs between layers; return their KV heads, and the features of heads of full layers."""
    own = config["per_layer_config"]
    layers = [own.get(f"{layer:02}", own.get(str(layer), {})) for layer in range(config["num_hidden_layers"])]
    kv_heads = [one.get("num_key_value_heads", config["num_key_value_heads"]) for one in layers]
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input", 0))
    return kv_heads, max(one.get("head_dim", 0) for one in layers)


def _inner_sizes(config: dict[str, Any]) -> int | list[int]:
    size, num_shared = _inner_size(config), config.get("num_kv_shared_layers", 0)
    if not config.get("use_double_wide_mlp") or not num_shared:
        return size
    return [size] * (config["num_hidden_layers"] - num_shared) + [2 * size] * num_shared


def _inner_size(config: dict[str, Any]) -> int:
    """Return the features within a feed-forward layer; LFM2's config has another number."""
    size = int(config.get("intermediate_size_mlp") or config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim"):
        return size
    size = int(config["block_ffn_dim_multiplier"] * int(2 * size / 3))
    multiple = int(config["block_multiple_of"])
    return multiple * -(-size // multiple)


def _add_rest(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """Add what only some architectures have."""
    _add_scaling(writer, config, rope)
    _add_states(writer, config)
    if "kv_lora_rank" in config and config.keys() & {"n_routed_experts", "num_local_experts"}:
        is_softmax = config["model_type"] == "deepseek_v2"
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType["SOFTMAX" if is_softmax else "SIGMOID"])
        writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 1))
        if not is_softmax:
            writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["model_type"] in ("glm4_moe", "nemotron_h", "mimo_v2_flash") and "n_routed_experts" in config:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["model_type"] == "glm4_moe":
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] == "mimo_v2_flash":  # as integers, unlike the others
        writer.add_sliding_window_pattern(
            [int(kind == "sliding_attention") for kind in config["layer_types"]]
        )
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
        if config.get("attention_value_scale"):
            writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    if config["model_type"] == "llama4_text":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    adders: dict[str, Callable[[Any], None]] = {
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "n_routed_experts": writer.add_expert_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "num_experts_per_tok": writer.add_expert_used_count,
        "top_k_experts": writer.add_expert_used_count,
        "moe_latent_size": writer.add_moe_latent_size,
        "moe_shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "shared_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
    }
    given = {adder: config[name] for name, adder in adders.items() if config.get(name) is not None}
    for adder, value in given.items():  # transformers writes the number of experts by two names
        adder(value)


def _add_scaling(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """Add how frequencies of rotary embedding are scaled, and scores with them."""
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if "kv_lora_rank" in config and rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_states(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the sizes of layers that keep a state."""
    if config["model_type"].startswith("lfm2"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if config["model_type"] == "nemotron_h":
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_state_size(config["ssm_state_size"])
        writer.add_ssm_group_count(config["n_groups"])
        writer.add_ssm_time_step_rank(config["mamba_num_heads"])
        writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    if config["model_type"] in ("granitemoehybrid", "falcon_h1"):
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    if config["model_type"] == "kimi_linear":
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_kda_head_dim(config["linear_head_dim"])
    if config["model_type"] == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if config["model_type"].startswith(("qwen3_5", "qwen3_next")):
        heads = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
        writer.add_full_attention_interval(4)
    if config["model_type"].startswith("qwen3_5"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])


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


def _as_llama_cpp(
    family: str, name: str, array: np.ndarray[Any, Any], config: dict[str, Any]
) -> np.ndarray[Any, Any]:
    if family in _WITH_OFFSET and name.endswith("norm.weight") and "linear_attn" not in name:
        return array + np.float32(1)
    if name.endswith("A_log"):
        array = -np.exp(array)
    if re.search(r"\.(mamba|mixer)\.(A_log|D)$", name):
        return array[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return array.reshape(config["mamba_n_groups" if "mamba." in name else "n_groups"], -1)
    if "linear_attn" in name and not family.startswith("qwen3_next"):
        return _swap_heads(name, array, config, is_back=False)
    heads = _rotated_heads(family, name, config)
    if heads:
        return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def _back(
    family: str, name: str, array: np.ndarray[Any, Any], config: dict[str, Any]
) -> np.ndarray[Any, Any]:
    if family in _WITH_OFFSET and name.endswith("norm.weight") and "linear_attn" not in name:
        return array - np.float32(1)
    if name.endswith("A_log"):
        array = np.log(-array)
    if "linear_attn" in name and not family.startswith("qwen3_next"):
        return _swap_heads(name, array, config, is_back=True)
    heads = _rotated_heads(family, name, config)
    if heads:
        return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def _swap_heads(
    name: str, array: np.ndarray[Any, Any], config: dict[str, Any], *, is_back: bool
) -> np.ndarray[Any, Any]:
    """Put the value heads of key heads side by side (`is_back`), or those in the same place of each."""
    if name.endswith("norm.weight"):
        return array
    keys = config["linear_num_key_heads"]
    shape = (keys, config["linear_num_value_heads"] // keys)
    if "out_proj" in name:
        array = array.T
    start = 2 * keys * config["linear_key_head_dim"] if "qkv" in name or "conv1d" in name else 0
    heads = array[start:].reshape(*(shape[::-1] if is_back else shape), -1, *array.shape[1:])
    swapped = np.concatenate([array[:start], heads.swapaxes(0, 1).reshape(-1, *array.shape[1:])])
    return np.ascontiguousarray(swapped.T) if "out_proj" in name else swapped


def _rotated_heads(family: str, name: str, config: dict[str, Any]) -> int:
    """Return the heads whose rows llama.cpp interleaves, or 0."""
    if ARCHITECTURES[family] not in _INTERLEAVED or not any(part in name for part in ("q_proj", "k_proj")):
        return 0
    return int(config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
