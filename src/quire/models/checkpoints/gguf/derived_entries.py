"""Entries of config.json that a GGUF file says in another way, of each architecture.

Each function gets the entries that keys of the metadata stand for, and the metadata, whose keys do not begin
with the architecture. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import ModelError
from quire.models.config_entries import SPLIT_GATES

SOFTMAX, SIGMOID = 1, 2  # numbers of llama.cpp's functions
_CHUNK, _OF_MAVERICK = 8192, 128  # tokens that Llama 4 attends to, and experts of one of the two models


def _head_dim(metadata: Mapping[str, Any], heads: int | None) -> int:
    """Return the features of a head with a state."""
    size = metadata.get("ssm.inner_size")
    if type(size) is not int or not heads or size % heads:
        raise ModelError(
            f"ssm.inner_size is {size!r:.100}; it must be a multiple of ssm.time_step_rank, {heads}"
        )
    return size // heads


def gemma_scale(layers_of_27b: int) -> Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]:
    """Files do not say how Gemma scales its scores: by the head's size, and in the 27B models otherwise."""

    def finish(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
        is_27b = values["num_hidden_layers"] == layers_of_27b
        size = values["hidden_size"] / values["num_attention_heads"] if is_27b else values["head_dim"]
        return {"query_pre_attn_scalar": size}

    return finish


def granite(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """0 means that there is no factor."""
    factors = {name: values.get(name) or 1.0 for name in ("embedding_multiplier", "residual_multiplier")}
    return factors | {
        "attention_multiplier": values.get("attention_multiplier") or values["head_dim"] ** -0.5
    }


def granitemoe(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A size of 0 means that no expert is shared; files hold its gates and inputs apart."""
    shared_size = values.get("shared_intermediate_size") or 0
    return granite(values, metadata) | {"shared_intermediate_size": shared_size, SPLIT_GATES: True}


def granitehybrid(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Whether anything is rotated stands where other files say that a scaling was trained with."""
    entries = granitemoe(values, metadata)
    head_dim = _head_dim(metadata, values.get("mamba_n_heads"))
    expand = metadata["ssm.inner_size"] // values["hidden_size"]
    entries |= {"mamba_expand": expand, "mamba_d_head": head_dim}
    if not values.get("num_local_experts"):
        entries |= {"num_local_experts": 0, "shared_intermediate_size": values.get("intermediate_size")}
    is_rotated = metadata.get("rope.scaling.finetuned", False)
    return entries | {"position_embedding_type": "rope" if is_rotated else "nope"}


def gemma4(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Heads by layer, and feed-forward layers of which those that share KV may have twice the features."""
    num_layers, types = values["num_hidden_layers"], values.get("layer_types")
    if num_layers < 1 or types is None or len(types) != num_layers:
        raise ModelError(f"attention.sliding_window_pattern must say which of {num_layers} layers have one")
    counts, sizes = (
        value if isinstance(value, list) else [value] * num_layers
        for value in (values["num_key_value_heads"], values.get("intermediate_size", 0))
    )
    first = num_layers - values.get("num_kv_shared_layers", 0)
    is_wide = sizes[-1] != sizes[0]
    if sizes != [sizes[0]] * first + [sizes[0] * (1 + is_wide)] * (num_layers - first):
        raise ModelError(
            f"feed_forward_length is {sizes!r:.100}; it must be one number, or twice that in the layers that "
            "share KV"
        )
    size = values.get("global_head_dim", values["head_dim"])
    size_in_window = size if metadata.get("attention.key_length_swa") is None else values["head_dim"]
    if metadata.get("attention.value_length_swa", size_in_window) != size_in_window:
        raise ModelError(f"attention.value_length_swa must be {size_in_window}, as of keys")
    sizes_of_heads = [size_in_window if kind == "sliding_attention" else size for kind in types]
    layers = enumerate(zip(sizes_of_heads, counts, strict=True))
    return {
        "head_dim": size_in_window,
        "num_key_value_heads": counts[0],
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": is_wide,
        "enable_moe_block": "num_experts" in values,
        "vocab_size_per_layer_input": values["vocab_size"],
        "per_layer_config": {
            str(layer): {"head_dim": head_dim, "num_key_value_heads": count}
            for layer, (head_dim, count) in layers
        },
    }


def falcon_h1(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Norms of a Mamba's results, if there are some, are behind their gates."""
    head_dim = _head_dim(metadata, values.get("mamba_n_heads"))
    return {"mamba_d_head": head_dim, "mamba_norm_before_gate": False}


def nemotron_h(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with KV heads are attention, with inner features feed-forward or experts, all others a Mamba."""
    count = values["num_hidden_layers"]
    kv_heads, sizes = (
        _numbers(metadata, key, count) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    inner = "moe" if values.get("n_routed_experts") else "mlp"
    return {
        "layers_block_type": [
            "full_attention" if kv else inner if size else "linear_attention"
            for kv, size in zip(kv_heads, sizes, strict=True)
        ],
        "num_key_value_heads": max(kv_heads, default=0) or None,
        "intermediate_size": max(sizes, default=0) or values["hidden_size"],
        "mamba_head_dim": _head_dim(metadata, values.get("mamba_num_heads")),
    }


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> list[int]:
    """Return numbers of the layers, without those that predict further tokens."""
    numbers = metadata.get(key)
    if (
        not isinstance(numbers, list)
        or len(numbers) < count
        or not all(type(number) is int and number >= 0 for number in numbers)
    ):
        raise ModelError(
            f"{key} is {numbers!r:.100}; it must be a number from 0 on for each of {count} layers"
        )
    return numbers[:count]


def olmo3(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window have the same base of frequencies, and no scaling."""
    return {"rope_parameters": {"sliding_attention": {"rope_theta": values.get("rope_theta", 1e4)}}}


def lfm2(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes are those of the tensors, and have been adjusted."""
    return {"norm_eps": values.get("rms_norm_eps"), "block_auto_adjust_ff_dim": False}


def qwen35(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers are recurrent may stand by itself."""
    entries: dict[str, Any] = {
        "linear_value_head_dim": _head_dim(metadata, values.get("linear_num_value_heads"))
    }
    key = "attention.recurrent_layers"  # of each layer, those that predict further tokens included
    recurrent, count = metadata.get(key), values["num_hidden_layers"]
    if recurrent is None:
        return entries
    if not isinstance(recurrent, list) or len(recurrent) < count or {*map(type, recurrent)} != {bool}:
        raise ModelError(f"{key} is {recurrent!r:.100}; it must say true or false for each of {count} layers")
    types = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent]
    return entries | {"layer_types": types[:count]}


def only_sigmoids(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Experts are chosen by sigmoids."""
    gating = metadata.get("expert_gating_func", SIGMOID)
    if gating != SIGMOID:
        raise ModelError(
            f"expert_gating_func is {gating!r:.100}; Quire computes {SIGMOID} in this architecture only"
        )
    return {}


def kimi_linear(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys and values are recurrent, with as many heads as the others."""
    if "layer_types" not in values:
        raise ModelError(
            f"attention.head_count_kv is {values['num_key_value_heads']!r:.100}; it must be a list, with 0 "
            "for layers that are recurrent"
        )
    return {
        **only_sigmoids(values, metadata),
        **latent_sizes(values, metadata),
        "num_key_value_heads": None,
        "linear_num_heads": values["num_attention_heads"],
        "routed_scaling_factor": values.get("routed_scaling_factor") or 1.0,
    }


def llama4(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Files do not say whether queries and keys are normalized: they are, but in models of 128 experts."""
    chunk = metadata.get("attention.sliding_window", _CHUNK)
    if chunk != _CHUNK:
        raise ModelError(
            f"attention.sliding_window is {chunk!r:.100}; Quire computes {_CHUNK} in this architecture only"
        )
    return only_sigmoids(values, metadata) | {"use_qk_norm": values.get("num_local_experts") != _OF_MAVERICK}


def mimo2(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """KV heads and windows are those of each layer, and of layers that predict further tokens."""
    count, heads = values["num_hidden_layers"], values["num_key_value_heads"]
    types = values.get("layer_types", [])[:count]
    heads = heads[:count] if isinstance(heads, list) else [heads] * count
    of_type = dict(zip(types, heads, strict=False))
    if [of_type[kind] for kind in types] != heads:
        raise ModelError(
            f"attention.head_count_kv is {heads!r:.100}; it must be one number for each layer, the same for "
            "all with a window and for all without"
        )
    return only_sigmoids(values, metadata) | {
        "layer_types": types,
        "num_key_value_heads": of_type.get("full_attention"),
        "swa_num_key_value_heads": of_type.get("sliding_attention"),
        "attention_value_scale": values.get("attention_value_scale"),
        "routed_scaling_factor": values.get("routed_scaling_factor") or 1.0,
    }


def latent_sizes(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of heads are of those made of latents, or, if these have keys of their own, of what attends."""
    is_absorbed = metadata.get("attention.key_length_mla") is not None
    of_latents = metadata.get("attention.key_length"), metadata.get("attention.value_length")
    of_heads = metadata.get("attention.key_length_mla"), metadata.get("attention.value_length_mla")
    keys, value_size = of_heads if is_absorbed else of_latents
    rotated = metadata.get("rope.dimension_count")
    return {
        "head_dim": None,
        "q_lora_rank": values.get("q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated if type(keys) is type(rotated) is int else None,
        "v_head_dim": value_size,
    }


def deepseek(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Groups that are not there are one, and a factor of 0 is none."""
    gating = metadata.get("expert_gating_func", SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise ModelError(f"deepseek2.expert_gating_func is {gating!r:.100}; Quire computes 1 and 2 only")
    groups, log_multiplier = values.get("n_group") or 1, values.get("mscale_all_dim")
    return {
        **latent_sizes(values, metadata),
        "norm_topk_prob": values.get("norm_topk_prob", False),
        "routed_scaling_factor": values.get("routed_scaling_factor") or 1.0,
        "n_group": groups,
        "topk_group": values.get("topk_group") or groups,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "mscale": 10 * log_multiplier if log_multiplier else None,  # a tenth is stored
    }
