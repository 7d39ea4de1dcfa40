"""llama.cpp's architectures: how their files say what a Hugging Face checkpoint says.

Keys: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.models.checkpoints.gguf import derived_entries
from quire.models.checkpoints.gguf.derived_entries import SIGMOID
from quire.models.checkpoints.gguf.tensor_names import (
    DEEPSEEK_NAMES,
    FALCON_H1_NAMES,
    FOUR_NORM_NAMES,
    GEMMA4_EXPERT_NAMES,
    GEMMA4_NAMES,
    GLM4_NAMES,
    GPT_OSS_NAMES,
    GRANITE_HYBRID_NAMES,
    GRANITE_MOE_NAMES,
    KIMI_LINEAR_NAMES,
    LAYER_NAMES,
    LFM2_MOE_NAMES,
    LFM2_NAMES,
    LLAMA4_NAMES,
    MIMO2_NAMES,
    MIXTRAL_NAMES,
    NEMOTRON_H_NAMES,
    QWEN2_MOE_NAMES,
    QWEN3_NEXT_NAMES,
    QWEN35_NAMES,
    stored_tensor,
)
from quire.models.config_entries import SPLIT_PROJECTIONS

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
_BY_LAYER_IN_NEMOTRON = ("intermediate_size", "num_key_value_heads", "rms_norm_eps", "rope_theta")
_PRESENT = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
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
    metadata's keys by the entries of config.json, `ignored` keys that say nothing about text, `present` what
    tensors are in layers by the entries that say whether they are there, and `finish` returns entries that
    follow from others and from the metadata.
    """

    hf_name: str
    names: dict[str, str] = field(default_factory=lambda: LAYER_NAMES)
    keys: dict[str, str] = field(default_factory=lambda: _KEYS)
    finish: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda values, metadata: {}
    ignored: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=lambda: _PRESENT)
    norms_include_offset: bool = False  # norm weights are 1 more than in the checkpoint
    has_adjacent_pairs: bool = False  # the features that are rotated together are neighbours
    tiles_value_heads: bool = False  # of a DeltaNet: the first of each key head, then the second of each
    has_latents: bool = False  # heads of keys and values are those of the latents, or of what is made of them
    by_layer: tuple[str, ...] = ()  # entries that may be lists, which `finish` takes apart
    has_ropes_by_type: bool = False  # layers with a window have frequencies of their own
    without_kv: str = ""  # type of the layers that have no heads of keys and values; empty: all have some

    def tensor(self, name: str) -> tuple[str, int | None]:
        """See `stored_tensor`."""
        return stored_tensor(name, self.names)


_LLAMA = Architecture("LlamaForCausalLM", has_adjacent_pairs=True)
_OLMO2 = Architecture("Olmo2ForCausalLM", names=LAYER_NAMES | FOUR_NORM_NAMES)
_GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    names=LAYER_NAMES | FOUR_NORM_NAMES,
    keys=_KEYS
    | {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    finish=derived_entries.gemma_scale(46),
    norms_include_offset=True,
)
_LFM2 = Architecture(
    "Lfm2ForCausalLM",
    names=LAYER_NAMES | LFM2_NAMES,
    keys=_KEYS | {"conv_L_cache": "shortconv.l_cache"},
    finish=derived_entries.lfm2,
    without_kv="conv",
)
_QWEN2_MOE_KEYS = _EXPERT_KEYS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_QWEN35 = Architecture(
    "Qwen3_5ForCausalLM",
    names=LAYER_NAMES | QWEN35_NAMES,
    keys=_KEYS
    | {
        "full_attention_interval": "full_attention_interval",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_key_head_dim": "ssm.state_size",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
    },
    finish=derived_entries.qwen35,
    ignored=("rope.dimension_sections",),  # positions in images
    norms_include_offset=True,
    tiles_value_heads=True,
)
_QWEN35_MOE = replace(
    _QWEN35,
    hf_name="Qwen3_5MoeForCausalLM",
    names=_QWEN35.names | QWEN2_MOE_NAMES,
    keys=_QWEN35.keys | _QWEN2_MOE_KEYS,
)
_LATENT_KEYS = {
    **{name: key for name, key in _KEYS.items() if name not in ("num_key_value_heads", "head_dim")},
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
_ROUTED_KEYS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_DEEPSEEK2 = Architecture(
    "DeepseekV2ForCausalLM",
    names=LAYER_NAMES | DEEPSEEK_NAMES,
    keys=_LATENT_KEYS
    | _ROUTED_KEYS
    | {
        "first_k_dense_replace": "leading_dense_block_count",
        "n_shared_experts": "expert_shared_count",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    },
    finish=derived_entries.deepseek,
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
    finish=derived_entries.granite,
    has_adjacent_pairs=True,
)
_GRANITE_MOE = replace(
    _GRANITE,
    hf_name="GraniteMoeSharedForCausalLM",
    names=LAYER_NAMES | GRANITE_MOE_NAMES,
    keys=_GRANITE.keys
    | {
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    },
    finish=derived_entries.granitemoe,
)
_MAMBA_KEYS = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}
_GRANITE_HYBRID = replace(
    _GRANITE_MOE,
    hf_name="GraniteMoeHybridForCausalLM",
    names=LAYER_NAMES | GRANITE_HYBRID_NAMES,
    keys=_GRANITE_MOE.keys | _MAMBA_KEYS,
    finish=derived_entries.granitehybrid,
    without_kv="mamba",
)
_NEMOTRON_H = Architecture(
    "NemotronHForCausalLM",
    names=NEMOTRON_H_NAMES,
    keys={
        **{name: key for name, key in _KEYS.items() if name not in _BY_LAYER_IN_NEMOTRON},
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        "mamba_num_heads": "ssm.time_step_rank",
        "n_groups": "ssm.group_count",
        "ssm_state_size": "ssm.state_size",
        "conv_kernel": "ssm.conv_kernel",
    },
    finish=derived_entries.nemotron_h,
    ignored=("rope.dimension_count", "rope.freq_base"),  # nothing is rotated
    present=_PRESENT | {"use_bias": "ssm_in.bias", "use_conv_bias": "ssm_conv1d.bias"},
)
_WINDOW_PATTERN = {"sliding_window_pattern": "attention.sliding_window_pattern"}
_GEMMA4 = Architecture(
    "Gemma4ForCausalLM",
    names=LAYER_NAMES | FOUR_NORM_NAMES | GEMMA4_NAMES,
    keys=_KEYS
    | _WINDOW_PATTERN
    | {
        "head_dim": "attention.key_length_swa",
        "global_head_dim": "attention.key_length",
        "final_logit_softcapping": "final_logit_softcapping",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "num_kv_shared_layers": "attention.shared_kv_layers",
    },
    finish=derived_entries.gemma4,
    by_layer=("num_key_value_heads", "intermediate_size"),
    has_ropes_by_type=True,
)
ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        names=LAYER_NAMES | QWEN2_MOE_NAMES,
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
        finish=derived_entries.gemma_scale(62),
    ),
    "gemma4": _GEMMA4,
    "phi3": Architecture("Phi3ForCausalLM"),
    "glm4": Architecture("Glm4ForCausalLM", names=LAYER_NAMES | GLM4_NAMES),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        names=LAYER_NAMES | DEEPSEEK_NAMES | {"post_attention_layernorm": "post_attention_norm"},
        keys=_KEYS
        | _ROUTED_KEYS
        | {
            "first_k_dense_replace": "leading_dense_block_count",
            "n_shared_experts": "expert_shared_count",
        },
        finish=derived_entries.only_sigmoids,
        present=_PRESENT | {"use_qk_norm": "attn_q_norm.weight"},
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        names=LAYER_NAMES | LLAMA4_NAMES,
        keys={name: key for name, key in _KEYS.items() if name != "sliding_window"}
        | {
            "intermediate_size_mlp": "feed_forward_length",
            "intermediate_size": "expert_feed_forward_length",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        finish=derived_entries.llama4,
    ),
    "mimo2": Architecture(
        "MiMoV2FlashForCausalLM",
        names=LAYER_NAMES | MIMO2_NAMES,
        keys={name: key for name, key in _KEYS.items() if name != "rope_theta"}
        | _ROUTED_KEYS
        | _WINDOW_PATTERN
        | {
            "v_head_dim": "attention.value_length",
            "attention_value_scale": "attention.value_scale",
        },
        finish=derived_entries.mimo2,
        by_layer=("num_key_value_heads",),
        has_ropes_by_type=True,
    ),
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
        names=_LFM2.names | LFM2_MOE_NAMES,
        keys=_LFM2.keys | _EXPERT_KEYS | {"num_dense_layers": "leading_dense_block_count"},
        finish=lambda values, metadata: {"norm_eps": values.get("rms_norm_eps")},
        ignored=("expert_gating_func",),  # sigmoid
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        names=LAYER_NAMES | GPT_OSS_NAMES,
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
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": replace(
        _QWEN35_MOE,
        hf_name="Qwen3NextForCausalLM",
        names=_QWEN35_MOE.names | QWEN3_NEXT_NAMES,
        ignored=(),
        present=_PRESENT | {SPLIT_PROJECTIONS: "attn_gate.weight"},
        tiles_value_heads=False,
    ),
    "deepseek2": _DEEPSEEK2,
    "kimi-linear": Architecture(
        "KimiLinearForCausalLM",
        names=LAYER_NAMES | DEEPSEEK_NAMES | MIXTRAL_NAMES | KIMI_LINEAR_NAMES,
        keys=_LATENT_KEYS
        | _ROUTED_KEYS
        | {
            "num_key_value_heads": "attention.head_count_kv",
            "first_k_dense_replace": "leading_dense_block_count",
            "n_shared_experts": "expert_shared_count",
            "linear_head_dim": "kda.head_dim",
            "linear_conv_kernel_dim": "ssm.conv_kernel",
        },
        finish=derived_entries.kimi_linear,
        has_latents=True,
        without_kv="linear_attention",
    ),
    "minicpm3": Architecture(  # files do not say its multipliers, which are those of its one model
        "MiniCPM3ForCausalLM",
        names=LAYER_NAMES | DEEPSEEK_NAMES,
        keys=_LATENT_KEYS,
        finish=derived_entries.latent_sizes,
        ignored=("attention.head_count_kv",),
        has_latents=True,
    ),
    "olmo2": _OLMO2,
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitehybrid": _GRANITE_HYBRID,
    "falcon-h1": Architecture(  # multipliers are in the weights
        "FalconH1ForCausalLM",
        names=LAYER_NAMES | FALCON_H1_NAMES,
        keys=_KEYS | _MAMBA_KEYS | {"mamba_d_ssm": "ssm.inner_size"},
        finish=derived_entries.falcon_h1,
        present=_PRESENT
        | {
            "mamba_rms_norm": "ssm_norm.weight",
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_proj_bias": "ssm_in.bias",
            "projectors_bias": "ssm_out.bias",
        },
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H,
        keys=_NEMOTRON_H.keys
        | _ROUTED_KEYS
        | {
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "moe_latent_size": "moe_latent_size",
        },
        ignored=(*_NEMOTRON_H.ignored, "expert_shared_count", "expert_gating_func"),
    ),
}
_WITH = {  # where the metadata have a key that says this; None: something
    ("llama", "expert_count", None): replace(
        _LLAMA,
        hf_name="MixtralForCausalLM",
        names=LAYER_NAMES | MIXTRAL_NAMES,
        keys=_KEYS | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    ),
    ("gemma4", "expert_count", None): replace(
        _GEMMA4,
        names=_GEMMA4.names | GEMMA4_EXPERT_NAMES,
        keys=_GEMMA4.keys
        | {
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
    ),
    ("deepseek2", "expert_gating_func", SIGMOID): replace(_DEEPSEEK2, hf_name="DeepseekV3ForCausalLM"),
    ("granitehybrid", "expert_count", None): replace(
        _GRANITE_HYBRID, names=LAYER_NAMES | GRANITE_HYBRID_NAMES | GRANITE_MOE_NAMES
    ),
    ("olmo2", "attention.sliding_window", None): replace(
        _OLMO2, hf_name="Olmo3ForCausalLM", keys=_KEYS | _WINDOW_PATTERN, finish=derived_entries.olmo3
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
