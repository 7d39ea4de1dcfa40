"""Hybrids of Mamba-2 and attention."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import (
    NAMES,
    Family,
    check_fixed,
    four_times_as_wide,
    with_experts,
    with_mixers,
)
from quire.models.families.llama import llama
from quire.models.layer import LayerConfig, SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.mamba import MambaConfig
from quire.models.layers.shared_block import SharedBlockConfig
from quire.models.ropes import HFConfig, partial_ropes

_NAMES = NAMES | {
    "norm": "model.final_layernorm.weight",
    "mlp_norm": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}
_NEMOTRON_NAMES = {
    "embedding": "backbone.embeddings.weight",
    "norm": "backbone.norm_f.weight",
    "output": "lm_head.weight",
    "layer": "backbone.layers.{}.",
    "attention_norm": "norm",
    "mlp_norm": "norm",
    **{name: f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")},
    "router": "mixer.gate",
    "router_correction": "mixer.gate.e_score_correction_bias",
    "expert_up": "mixer.experts.{}.up_proj",
    "expert_down": "mixer.experts.{}.down_proj",
    "latent_in": "mixer.fc1_latent_proj",
    "latent_out": "mixer.fc2_latent_proj",
    "shared_up": "mixer.shared_experts.up_proj",
    "shared_down": "mixer.shared_experts.down_proj",
    **{name: of_mamba.replace("mamba", "mixer") for name, of_mamba in MambaConfig.weight_names.items()},
}
_BLOCK_TYPES = {
    "M": "linear_attention",
    "mamba": "linear_attention",
    "*": "full_attention",
    "attention": "full_attention",
    "-": "mlp",
    "E": "moe",
}
"""Those of Nemotron-H by their names in older files."""
_FALCON_FACTORS = (
    "embedding_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier",
    "ssm_in_multiplier", "ssm_out_multiplier", "lm_head_multiplier",
)  # fmt: skip
MAMBA_TYPES = ("linear_attention", "mamba")  # as files name the layers with one, and as older ones do
DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_INFINITY = {"__float__": "Infinity"}  # as transformers writes it


def mamba_layers(hf: HFConfig, base: ModelConfig, is_mamba: list[bool]) -> ModelConfig:
    """Give layers a Mamba-2 in place of attention.

    Args:
        hf: the entries, which begin with `mamba_`.
        base: all layers are attention and a feed-forward layer.
        is_mamba: which layers have a Mamba-2.

    Raises:
        ModelError: its numbers do not fit each other.
    """
    size = hf["mamba_expand"] * base.hidden_size
    mamba = read_mamba(hf, size)
    _check_activation(base)
    return with_mixers(base, mamba, is_mamba)


def read_mamba(hf: HFConfig, size: int) -> MambaConfig:
    """Return the Mamba-2 of a model, whose values have `size` features.

    Raises:
        ModelError: see `mamba_layers`.
    """
    heads, head_dim = hf["mamba_n_heads"], hf["mamba_d_head"]
    mamba = MambaConfig(
        num_heads=heads,
        head_dim=size // heads if head_dim == "auto" else head_dim,
        num_groups=hf["mamba_n_groups"],
        state_size=hf["mamba_d_state"],
        num_taps=hf["mamba_d_conv"],
        conv_bias=hf["mamba_conv_bias"],
        bias=hf["mamba_proj_bias"],
        output_bias=hf["mamba_proj_bias"],
        time_limits=_time_limits(hf),
    )
    if mamba.value_size != size:
        raise ModelError(
            f"config.json has mamba_n_heads {heads} and mamba_d_head {head_dim!r:.100}, which do not make up "
            f"the {size} features of a Mamba"
        )
    _check(mamba)
    return mamba


def _check_activation(base: ModelConfig) -> None:
    for part in base.parts:
        if isinstance(part, FeedForwardConfig) and part.activation != "silu":
            raise ModelError(f"config.json has the activation {part.activation}; a Mamba has only silu")


def _check(mamba: MambaConfig) -> None:
    if mamba.num_heads % mamba.num_groups:
        raise ModelError(
            f"config.json has {mamba.num_heads} heads of a Mamba, which {mamba.num_groups} groups cannot "
            "serve evenly"
        )


def _time_limits(hf: HFConfig) -> tuple[float, float]:
    limits = [
        math.inf if limit == _INFINITY else limit for limit in hf.get("time_step_limit", (0.0, math.inf))
    ]
    are_numbers = len(limits) == 2 and all(type(limit) in (int, float) for limit in limits)
    if not are_numbers or not 0 <= limits[0] <= limits[1]:
        raise ModelError(
            f"config.json has time_step_limit {limits!r:.100}; it must be two numbers from 0 on, in order"
        )
    return float(limits[0]), float(limits[1])


def _bamba(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    attending = set(hf.get("attn_layer_indices") or ())
    is_mamba = [layer not in attending for layer in range(base.num_layers)]
    return mamba_layers(hf, llama(hf, base), is_mamba)


def _bamba_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, ...]:
    """Half of each head is rotated, whatever a config says beside `rope_parameters`, as in transformers."""
    return partial_ropes(ChainMap({"partial_rotary_factor": 0.5}, hf), head_dim)  # type: ignore[arg-type]


def _falcon_h1(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Attention and a Mamba-2 read the same input, each times a number of its own."""
    for name, bias in (
        ("attention_in_multiplier", "attention_bias"),
        ("ssm_in_multiplier", "mamba_proj_bias"),
    ):
        if hf[name] != 1.0 and hf.get(bias):
            raise ModelError(f"config.json has {name} {hf[name]} and {bias}; both together are not supported")
    of_gates, of_results = hf["mlp_multipliers"]
    config = replace(
        llama(hf, base),
        embedding_scale=hf["embedding_multiplier"],
        logits_divisor=1 / hf["lm_head_multiplier"],
    ).changed(FeedForwardConfig, gate_scale=of_gates, output_scale=of_results)
    attention, feed_forward = config.layers[0].parts
    assert isinstance(attention, AttentionConfig)
    of_input = hf["attention_in_multiplier"]  # of queries, keys and values
    attention = replace(
        attention,
        scale=attention.scale * hf["key_multiplier"] * of_input**2,
        output_scale=hf["attention_out_multiplier"] * of_input,
    )
    _check_activation(base)
    norm = "ungated" if hf["mamba_norm_before_gate"] else "gated"
    usual_size = hf["mamba_expand"] * base.hidden_size
    mamba = replace(
        read_mamba(hf, hf.get("mamba_d_ssm") or usual_size),
        is_parallel=True,
        pre_norm=False,
        output_bias=hf["projectors_bias"],
        norm=norm if hf["mamba_rms_norm"] else "",
        input_scales=_input_scales(hf),
        output_scale=hf["ssm_out_multiplier"],
    )
    return replace(config, layers=(LayerConfig((attention, mamba, feed_forward)),) * base.num_layers)


def _nemotron_h(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Each layer is a Mamba-2, attention without rotation, a feed-forward layer without gates, or experts."""
    base = base.changed(FeedForwardConfig, gated=False, bias=bool(hf.get("mlp_bias", False)))
    base = base.changed(AttentionConfig, rope=None)
    attention, feed_forward = base.layers[0].parts
    layer_of: dict[str, tuple[SubLayerConfig, ...]] = {
        "linear_attention": (_nemotron_mamba(hf),),
        "full_attention": (attention,),
        "mlp": (feed_forward,),
        "moe": _nemotron_experts(hf, base),
    }
    blocks = hf.get("layers_block_type") or hf["hybrid_override_pattern"]
    types = [_BLOCK_TYPES.get(kind, kind) for kind in blocks]
    if len(types) != base.num_layers:
        raise ModelError(f"config.json has {len(types)} layers_block_type for {base.num_layers} layers")
    for kind in types:
        if kind not in layer_of:
            raise ModelError(f"config.json has layers_block_type {kind!r:.100}; known: {', '.join(layer_of)}")
    layers = tuple(LayerConfig(layer_of[kind]) for kind in types)
    further = ("mtp.",) if hf.get("num_nextn_predict_layers", 0) else ()
    return replace(base, layers=layers, ignored_prefixes=further)


def _nemotron_mamba(hf: HFConfig) -> MambaConfig:
    if hf.get("mamba_hidden_act", "silu") != "silu":
        raise ModelError(
            f"config.json has mamba_hidden_act {hf['mamba_hidden_act']!r}; a Mamba has only silu"
        )
    _time_limits(hf)  # without effect, as in transformers
    bias = bool(hf.get("use_bias", False))
    mamba = MambaConfig(
        num_heads=hf["mamba_num_heads"],
        head_dim=hf["mamba_head_dim"],
        num_groups=hf["n_groups"],
        state_size=hf["ssm_state_size"],
        num_taps=hf["conv_kernel"],
        conv_bias=hf["use_conv_bias"],
        bias=bias,
        output_bias=bias,
        time_limits=(float(hf["time_step_min"]), math.inf),
    )
    _check(mamba)
    return mamba


def _nemotron_experts(hf: HFConfig, base: ModelConfig) -> tuple[SubLayerConfig, ...]:
    config = with_experts(
        base,
        [True] * base.num_layers,
        shared_inner_size=hf["moe_shared_expert_intermediate_size"],
        num_experts=hf["n_routed_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["moe_intermediate_size"],
        gated=False,
        latent_size=hf.get("moe_latent_size", 0),
        latent_bias=bool(hf.get("mlp_bias", False)),
        scoring="sigmoid",
        normalize=bool(hf.get("norm_topk_prob", True)),
        num_groups=hf["n_group"],
        groups_per_token=hf["topk_group"],
        correction=(hf["n_routed_experts"],),
        scale=float(hf["routed_scaling_factor"]),
    )
    return config.layers[0].parts[1:]


def _num_blocks(values: Mapping[str, Any]) -> dict[str, int]:
    """Return how many layers a Nemotron-H has, which newer files say only by their types."""
    types = values.get("layers_block_type") or values.get("hybrid_override_pattern")
    if not isinstance(types, str | list):
        return {}
    return {"num_hidden_layers": len(types)}


def _zamba2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Each layer is a Mamba-2; before some, blocks are called that take turns."""
    with_block = [layer for layer, kind in enumerate(hf["layer_types"]) if kind == "hybrid"]
    derived = {
        "num_key_value_heads": hf["num_attention_heads"],
        "attention_hidden_size": 2 * base.hidden_size,
        "hybrid_layer_ids": with_block,
    }
    check_fixed(hf, derived)
    mamba = replace(
        read_mamba(hf, hf["mamba_expand"] * base.hidden_size),
        norm_eps=1e-5,
        time_limits=(float(hf["time_step_min"]), math.inf),
    )
    block = _zamba2_block(hf, base, mamba)
    layers = [LayerConfig((mamba,))] * base.num_layers
    for use, layer in enumerate(with_block):
        first = with_block[use % hf["num_mem_blocks"]]
        layers[layer] = LayerConfig((replace(block, first_layer=first, use=use),))
    return replace(base, layers=tuple(layers))


def _zamba2_block(hf: HFConfig, base: ModelConfig, mamba: MambaConfig) -> SharedBlockConfig:
    attention, feed_forward = base.layers[0].parts
    assert isinstance(attention, AttentionConfig)
    assert isinstance(feed_forward, FeedForwardConfig)
    scale = (attention.head_dim / 2) ** -0.5
    rope = attention.rope if hf.get("use_mem_rope") else None
    size = 2 * base.hidden_size
    return SharedBlockConfig(
        mamba=replace(mamba, pre_norm=False),
        attention=replace(attention, rope=rope, input_size=size, scale=scale, pre_norm=False),
        feed_forward=replace(feed_forward, bias=mamba.bias, pre_norm=False),
        adapter_rank=hf["adapter_rank"],
        adapts_attention=bool(hf.get("use_shared_attention_adapter", False)),
    )


def _zamba2_sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Return sizes that follow from others: heads are those of twice as many features as a model has."""
    hidden_size, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if not isinstance(hidden_size, int) or not isinstance(heads, int) or heads < 1:
        return {}
    return {"head_dim": 2 * hidden_size // heads} | four_times_as_wide(values)


def _input_scales(hf: HFConfig) -> tuple[float, ...]:
    scales = hf["ssm_multipliers"]
    if len(scales) != 5:
        raise ModelError(f"config.json has {len(scales)} ssm_multipliers; there must be 5")
    return tuple(float(hf["ssm_in_multiplier"] * scale) for scale in scales)


FAMILIES: dict[str, Family] = {
    "bamba": Family(
        _bamba,
        _NAMES,
        DEFAULTS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        architectures=("BambaForCausalLM",),
        ropes=_bamba_ropes,
    ),
    "falcon_h1": Family(
        _falcon_h1,
        _NAMES,
        DEFAULTS
        | dict.fromkeys(_FALCON_FACTORS, 1.0)
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
            "mlp_multipliers": [1.0, 1.0],
            "ssm_multipliers": [1.0] * 5,
        },
        architectures=("FalconH1ForCausalLM",),
    ),
    "nemotron_h": Family(
        _nemotron_h,
        _NEMOTRON_NAMES,
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "time_step_min": 0.001,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        architectures=("NemotronHForCausalLM",),
        activation="mlp_hidden_act",
        norm_eps="layer_norm_epsilon",
        derived=_num_blocks,
    ),
    "zamba2": Family(
        _zamba2,
        NAMES | {"norm": _NAMES["norm"]},
        DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "mamba_n_heads": 8,
            "mamba_d_state": 64,
            "time_step_min": 0.001,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
        },
        architectures=("Zamba2ForCausalLM",),
        fixed={"tie_word_embeddings": True, "use_conv_bias": True, "use_long_context": False},
        derived=_zamba2_sizes,
        layer_types=("hybrid", *MAMBA_TYPES),
        aliases={
            "layers_block_type": "layer_types",
            "attention_head_dim": "head_dim",
            "n_mamba_heads": "mamba_n_heads",
            "mamba_headdim": "mamba_d_head",
            "mamba_ngroups": "mamba_n_groups",
            "add_bias_linear": "mamba_proj_bias",
        },
    ),
}
