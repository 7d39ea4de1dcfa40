"""llama.cpp's architectures: how their files say what a Hugging Face checkpoint says.

Names and keys: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py. Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.models.config_entries import SPLIT_GATES

_MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_MIXTRAL_NAMES = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_FOUR_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA4_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_LFM2_NAMES = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_LFM2_MOE_NAMES = {
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
}
_QWEN35_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_GRANITE_MOE_NAMES = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.experts.up_proj": "ffn_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.gate_proj": "ffn_gate_shexp",
    "shared_mlp.up_proj": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_GRANITE_HYBRID_NAMES = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "shared_mlp.gate_proj": "ffn_gate",
    "shared_mlp.up_proj": "ffn_up",
    "shared_mlp.output_linear": "ffn_down",
}
_GPT_OSS_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}
_QWEN2_MOE_NAMES = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_GLM4_NAMES = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
_DEEPSEEK_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_LAYER_PREFIX = "model.layers."
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<rest>.*)")

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
_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}


@dataclass(slots=True, frozen=True)
class Architecture:
    """An architecture of GGUF files, and the Hugging Face architecture that computes the same.

    `names` are the layers' tensors by their names in a Hugging Face checkpoint, without the layer; `keys` the
    metadata's keys by the entries of config.json, `ignored` keys that say nothing about text, and `finish`
    returns entries that follow from others and from the metadata.
    """

    hf_name: str
    names: dict[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    keys: dict[str, str] = field(default_factory=lambda: _KEYS)
    finish: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda values, metadata: {}
    ignored: tuple[str, ...] = ()
    norms_include_offset: bool = False  # norm weights are 1 more than in the checkpoint
    has_adjacent_pairs: bool = False  # the features that are rotated together are neighbours
    tiles_value_heads: bool = False  # of a DeltaNet: the first of each key head, then the second of each
    has_latents: bool = False  # heads of keys and values are those of the latents, or of what is made of them
    by_layer: tuple[str, ...] = ()  # entries that may be lists, which `finish` takes apart
    has_ropes_by_type: bool = False  # layers with a window have frequencies of their own
    without_kv: str = ""  # type of the layers that have no heads of keys and values; empty: all have some

    def tensor(self, name: str) -> tuple[str, int | None]:
        """Return the tensor that holds a weight, and which expert's part of it; None: the whole.

        For `model.layers.3.mlp.experts.7.up_proj.weight` that is `blk.3.ffn_up_exps.weight` and 7.

        Raises:
            KeyError: the architecture has no such tensor.
        """
        if name in _MODEL_NAMES:
            return _MODEL_NAMES[name], None
        layer, _, rest = name.removeprefix(_LAYER_PREFIX).partition(".")
        if rest in self.names:
            return f"blk.{layer}.{self.names[rest]}", None
        stem, _, kind = rest.rpartition(".")
        expert = _EXPERT.fullmatch(stem)
        if expert is not None:
            stem = f"{expert['experts']}.{expert['rest']}"
        return f"blk.{layer}.{self.names[stem]}.{kind}", None if expert is None else int(expert["number"])


def _gemma_scale(layers_of_27b: int) -> Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]:
    """Files do not say how Gemma scales its scores: by the head's size, and in the 27B models otherwise."""

    def finish(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
        is_27b = values["num_hidden_layers"] == layers_of_27b
        size = values["hidden_size"] / values["num_attention_heads"] if is_27b else values["head_dim"]
        return {"query_pre_attn_scalar": size}

    return finish


def _granite(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """0 means that there is no factor."""
    factors = {name: values.get(name) or 1.0 for name in ("embedding_multiplier", "residual_multiplier")}
    return factors | {
        "attention_multiplier": values.get("attention_multiplier") or values["head_dim"] ** -0.5
    }


def _granitemoe(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    shared_size = values.get("shared_intermediate_size") or 0
    return _granite(values, metadata) | {"shared_intermediate_size": shared_size, SPLIT_GATES: True}


def _granitehybrid(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Whether anything is rotated stands where other files say that a scaling was trained with."""
    entries = _granitemoe(values, metadata)
    size, heads = metadata.get("ssm.inner_size"), values.get("mamba_n_heads")
    if type(size) is int and heads:
        entries |= {"mamba_expand": size // values["hidden_size"], "mamba_d_head": size // heads}
    if not values.get("num_local_experts"):
        entries |= {"num_local_experts": 0, "shared_intermediate_size": values.get("intermediate_size")}
    is_rotated = metadata.get("rope.scaling.finetuned", False)
    return entries | {"position_embedding_type": "rope" if is_rotated else "nope"}


def _gemma4(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
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
        "vocab_size_per_layer_input": values["vocab_size"],
        "per_layer_config": {
            str(layer): {"head_dim": head_dim, "num_key_value_heads": count}
            for layer, (head_dim, count) in layers
        },
    }


def _olmo3(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"sliding_attention": {"rope_theta": values.get("rope_theta", 1e4)}}}


def _lfm2(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"norm_eps": values.get("rms_norm_eps"), "block_auto_adjust_ff_dim": False}


def _qwen35(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    size, heads = metadata.get("ssm.inner_size"), values.get("linear_num_value_heads")
    entries: dict[str, Any] = {
        "linear_value_head_dim": size // heads if type(size) is int and heads else None
    }
    key = "attention.recurrent_layers"  # of each layer, those that predict further tokens included
    recurrent, count = metadata.get(key), values["num_hidden_layers"]
    if recurrent is None:
        return entries
    if not isinstance(recurrent, list) or len(recurrent) < count or {*map(type, recurrent)} != {bool}:
        raise ModelError(f"{key} is {recurrent!r:.100}; it must say true or false for each of {count} layers")
    types = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent]
    return entries | {"layer_types": types[:count]}


def _latent_sizes(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
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


def _deepseek(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    gating = metadata.get("expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ModelError(f"deepseek2.expert_gating_func is {gating!r:.100}; Quire computes 1 and 2 only")
    groups, log_multiplier = values.get("n_group") or 1, values.get("mscale_all_dim")
    return {
        **_latent_sizes(values, metadata),
        "norm_topk_prob": values.get("norm_topk_prob", False),
        "routed_scaling_factor": values.get("routed_scaling_factor") or 1.0,
        "n_group": groups,
        "topk_group": values.get("topk_group") or groups,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "mscale": 10 * log_multiplier if log_multiplier else None,  # a tenth is stored
    }


_SOFTMAX, _SIGMOID = 1, 2  # numbers of llama.cpp's functions
_LLAMA = Architecture("LlamaForCausalLM", has_adjacent_pairs=True)
_OLMO2 = Architecture("Olmo2ForCausalLM", names=_LAYER_NAMES | _FOUR_NORM_NAMES)
_GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    names=_LAYER_NAMES | _FOUR_NORM_NAMES,
    keys=_KEYS
    | {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    finish=_gemma_scale(46),
    norms_include_offset=True,
)
_LFM2 = Architecture(
    "Lfm2ForCausalLM",
    names=_LAYER_NAMES | _LFM2_NAMES,
    keys=_KEYS | {"conv_L_cache": "shortconv.l_cache"},
    finish=_lfm2,
    without_kv="conv",
)
_QWEN2_MOE_KEYS = _EXPERT_KEYS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_QWEN35 = Architecture(
    "Qwen3_5ForCausalLM",
    names=_LAYER_NAMES | _QWEN35_NAMES,
    keys=_KEYS
    | {
        "full_attention_interval": "full_attention_interval",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_key_head_dim": "ssm.state_size",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
    },
    finish=_qwen35,
    ignored=("rope.dimension_sections",),  # positions in images
    norms_include_offset=True,
    tiles_value_heads=True,
)
_LATENT_KEYS = {
    **{name: key for name, key in _KEYS.items() if name not in ("num_key_value_heads", "head_dim")},
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
_DEEPSEEK2 = Architecture(
    "DeepseekV2ForCausalLM",
    names=_LAYER_NAMES | _DEEPSEEK_NAMES,
    keys=_LATENT_KEYS
    | {
        "first_k_dense_replace": "leading_dense_block_count",
        "n_routed_experts": "expert_count",
        "n_shared_experts": "expert_shared_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    },
    finish=_deepseek,
    ignored=("attention.head_count_kv", "expert_gating_func"),
    has_latents=True,
)
_GRANITE = Architecture(
    "GraniteForCausalLM",
    keys=_KEYS
    | {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    },
    finish=_granite,
    has_adjacent_pairs=True,
)
_GRANITE_MOE = replace(
    _GRANITE,
    hf_name="GraniteMoeSharedForCausalLM",
    names=_LAYER_NAMES | _GRANITE_MOE_NAMES,
    keys=_GRANITE.keys
    | {
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    },
    finish=_granitemoe,
)
_GRANITE_HYBRID = replace(
    _GRANITE_MOE,
    hf_name="GraniteMoeHybridForCausalLM",
    names=_LAYER_NAMES | _GRANITE_HYBRID_NAMES,
    keys=_GRANITE_MOE.keys
    | {
        "mamba_n_heads": "ssm.time_step_rank",
        "mamba_n_groups": "ssm.group_count",
        "mamba_d_state": "ssm.state_size",
        "mamba_d_conv": "ssm.conv_kernel",
    },
    finish=_granitehybrid,
    without_kv="mamba",
)
_WINDOW_PATTERN = {"sliding_window_pattern": "attention.sliding_window_pattern"}
ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        names=_LAYER_NAMES | _QWEN2_MOE_NAMES,
        keys=_KEYS | _QWEN2_MOE_KEYS,
    ),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        keys=_KEYS | _EXPERT_KEYS,
        finish=lambda values, metadata: {"norm_topk_prob": values.get("norm_topk_prob", True)},
    ),
    "gemma": Architecture("GemmaForCausalLM", norms_include_offset=True),
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        hf_name="Gemma3ForCausalLM",
        keys=_GEMMA2.keys | _WINDOW_PATTERN | {"rope_local_base_freq": "rope.freq_base_swa"},
        finish=_gemma_scale(62),
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        names=_LAYER_NAMES | _FOUR_NORM_NAMES | _GEMMA4_NAMES,
        keys=_KEYS
        | _WINDOW_PATTERN
        | {
            "head_dim": "attention.key_length_swa",
            "global_head_dim": "attention.key_length",
            "final_logit_softcapping": "final_logit_softcapping",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_kv_shared_layers": "attention.shared_kv_layers",
        },
        finish=_gemma4,
        by_layer=("num_key_value_heads", "intermediate_size"),
        has_ropes_by_type=True,
    ),
    "phi3": Architecture("Phi3ForCausalLM"),
    "glm4": Architecture("Glm4ForCausalLM", names=_LAYER_NAMES | _GLM4_NAMES),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "smollm3": replace(_LLAMA, hf_name="SmolLM3ForCausalLM"),
    "mistral3": replace(
        _LLAMA,
        hf_name="Ministral3ForCausalLM",
        keys=_KEYS
        | {
            "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "llama_4_scaling_beta": "attention.temperature_scale",
        },
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        hf_name="Lfm2MoeForCausalLM",
        names=_LFM2.names | _LFM2_MOE_NAMES,
        keys=_LFM2.keys | _EXPERT_KEYS | {"num_dense_layers": "leading_dense_block_count"},
        finish=lambda values, metadata: {"norm_eps": values.get("rms_norm_eps")},
        ignored=("expert_gating_func",),  # sigmoid
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        names=_LAYER_NAMES | _GPT_OSS_NAMES,
        keys=_KEYS
        | {
            "intermediate_size": "expert_feed_forward_length",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
        finish=lambda values, metadata: {"truncate": False},
        ignored=("feed_forward_length",),
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        hf_name="Qwen3_5MoeForCausalLM",
        names=_QWEN35.names | _QWEN2_MOE_NAMES,
        keys=_QWEN35.keys | _QWEN2_MOE_KEYS,
    ),
    "deepseek2": _DEEPSEEK2,
    "minicpm3": Architecture(  # files do not say its multipliers, which are those of its one model
        "MiniCPM3ForCausalLM",
        names=_LAYER_NAMES | _DEEPSEEK_NAMES,
        keys=_LATENT_KEYS,
        finish=_latent_sizes,
        ignored=("attention.head_count_kv",),
        has_latents=True,
    ),
    "olmo2": _OLMO2,
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitehybrid": _GRANITE_HYBRID,
}
_WITH = {  # where the metadata have a key that says this; None: something
    ("llama", "expert_count", None): replace(
        _LLAMA,
        hf_name="MixtralForCausalLM",
        names=_LAYER_NAMES | _MIXTRAL_NAMES,
        keys=_KEYS | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    ),
    ("deepseek2", "expert_gating_func", _SIGMOID): replace(_DEEPSEEK2, hf_name="DeepseekV3ForCausalLM"),
    ("granitehybrid", "expert_count", None): replace(
        _GRANITE_HYBRID, names=_LAYER_NAMES | _GRANITE_HYBRID_NAMES | _GRANITE_MOE_NAMES
    ),
    ("olmo2", "attention.sliding_window", None): replace(
        _OLMO2, hf_name="Olmo3ForCausalLM", keys=_KEYS | _WINDOW_PATTERN, finish=_olmo3
    ),
}


def architecture_of(metadata: Mapping[str, Any], path: Path) -> Architecture:
    """Return the architecture that the metadata of the file at `path` name.

    Raises:
        ModelError: Quire does not read it; the message lists those that it reads.
    """
    name = str(metadata.get("general.architecture"))
    for (with_key, key, value), architecture in _WITH.items():
        found = metadata.get(f"{name}.{key}")
        if with_key == name and found and value in (None, found):
            return architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{path} holds the architecture {name:.100}; Quire reads {known} from GGUF files")
    return ARCHITECTURES[name]
