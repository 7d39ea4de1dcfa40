"""The families: for each, how its Hugging Face config and weight names map to Quire's.

A family is an entry of `FAMILIES`. Most differ from Llama in a few fields; `_common` reads what all share.
Configs are read in the form that the hub's files have had since 2023 (`rope_theta`, `rope_scaling`) and in
the newer one (`rope_parameters`, nested by layer type where there are two).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import ModelError, UnknownArchitectureError, nearest_name
from quire.models.config import DTYPE_BYTES, ModelConfig, RopeConfig
from quire.models.config_entries import MAX_LAYERS_TIMES_EXPERTS, RULES, Entries, check_entries, warn_once
from quire.models.layer import LayerConfig, SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.experts import ExpertsConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig, read_partial_rope, read_rope, read_two_ropes

_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "output": "lm_head.weight",
    "layer": "model.layers.{}.",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_FOUR_NORM_NAMES = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_FUSED_NAMES = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
_MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}
_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


# Where an entry is missing, the one in transformers' class of the family's configs counts.
_DEFAULTS: dict[str, Any] = {
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_WHERE_NULL_IS_NONE = frozenset(
    {"num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
)
_QWEN_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}


@dataclass(slots=True, frozen=True)
class Family:
    """How to read one family's checkpoints.

    `specialize` takes the config that `_common` reads and returns it with what the family does otherwise. A
    weight name belongs to the whole model ("embedding", "norm", "output", "layer"), to a layer's norms or,
    where that differs from its own `weight_names`, to a sub-layer; these end before ".weight" or ".bias".
    `defaults` count where config.json lacks an entry, `activation` is the entry that names the activation,
    `model_type` stands in config.json if it is not the family's name, `layer_types` are those that it may
    name, and `ropes` reads the sets of rotary frequencies for a head size.
    """

    specialize: Callable[[HFConfig, ModelConfig], ModelConfig]
    weight_names: dict[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "hidden_act"
    model_type: str = ""
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")
    ropes: Callable[[HFConfig, int], tuple[RopeConfig, ...]] = lambda hf, head_dim: (read_rope(hf, head_dim),)


def model_config(values: HFConfig) -> ModelConfig:
    """Return what a parsed `config.json` describes, but for the quantization of stored weights.

    Entries that Quire neither reads nor knows to be harmless are logged.

    Raises:
        UnknownArchitectureError: lists the architectures that Quire knows.
        ModelError: a needed entry is missing or has a value that Quire does not compute.
    """
    check_entries(values)
    architecture = (values.get("architectures") or ["(none)"])[0]
    family_name = ARCHITECTURES.get(architecture)
    if family_name is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitectureError(
            f"config.json names the architecture {architecture}; Quire knows {known}"
        )
    family = FAMILIES[family_name]
    hf = Entries(values, {**_DEFAULTS, **family.defaults}, _WHERE_NULL_IS_NONE)
    _refuse_what_is_not_computed(values, family.layer_types)
    try:
        config = family.specialize(hf, _common(hf, architecture, family_name))
        _check_layer_types(hf, config)
    except KeyError as error:
        raise ModelError(f"config.json of this {architecture} has no entry {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise ModelError(f"config.json of this {architecture} cannot be understood: {error}") from error
    _check(config)
    model_type = hf.get("model_type", family.model_type or family_name)
    if model_type != (family.model_type or family_name):
        warn_once(f"config.json has model_type {model_type!r:.100}, and is read as that of a {architecture}")
    hf.warn_of_unread(f"config.json of this {architecture}")
    return config


def _refuse_what_is_not_computed(hf: HFConfig, layer_types: Sequence[str]) -> None:
    if hf.get("use_bidirectional_attention") or not hf.get("is_causal", True):
        raise ModelError("config.json asks for bidirectional attention; Quire serves causal decoders only")
    if hf.get("per_layer_config"):
        raise ModelError(
            "config.json has a per_layer_config; layers that differ in other entries are not supported"
        )
    for name in _COUNTS:
        if hf.get(name) is None:
            raise ModelError(f"config.json has no {name}; it must be {RULES[name].describe()}")
    types = hf.get("layer_types")
    for layer_type in types or ():
        if layer_type not in layer_types:
            raise ModelError(
                f"config.json names the layer type {layer_type!r}; known: {', '.join(layer_types)}"
            )
    if types is not None and len(types) != hf["num_hidden_layers"]:
        raise ModelError(f"config.json has {len(types)} layer_types for {hf['num_hidden_layers']} layers")


def _check_layer_types(hf: HFConfig, config: ModelConfig) -> None:
    for layer, layer_type in enumerate(hf.get("layer_types") or ()):
        attention = [part for part in config.layers[layer].parts if isinstance(part, AttentionConfig)]
        window = max((part.window for part in attention), default=0)
        if (layer_type == "sliding_attention") != (window > 0):
            raise ModelError(
                f"config.json says that layer {layer} is of type {layer_type}; by the architecture and the "
                f"other entries, it has {f'a window of {window} tokens' if window else 'no window'}"
            )


def _check(config: ModelConfig) -> None:
    if config.pooling is not None and config.pooling.pooling_type is None:
        raise ModelError(f"the pooling of the family {config.family} has no pooling_type; it must have one")
    factors = [config.embedding_scale, *(rope.factor for rope in config.ropes)]
    for part in dict.fromkeys(config.parts):
        if isinstance(part, ExpertsConfig):
            _check_experts(part, config.num_layers)
        if isinstance(part, AttentionConfig):
            factors.append(part.scale)
            if part.num_heads % part.num_kv_heads:
                raise ModelError(
                    f"{part.num_heads} attention heads cannot share {part.num_kv_heads} key-value heads "
                    "evenly"
                )
    for factor in factors:
        if not math.isfinite(factor):
            raise ModelError(f"config.json leads to a factor of {factor}; it must be finite")


def _check_experts(experts: ExpertsConfig, num_layers: int) -> None:
    if num_layers * experts.num_experts > MAX_LAYERS_TIMES_EXPERTS:
        raise ModelError(
            f"{num_layers} layers of {experts.num_experts} experts exceed the limit of "
            f"{MAX_LAYERS_TIMES_EXPERTS} in total"
        )
    if experts.experts_per_token > experts.num_experts:
        raise ModelError(
            f"each token goes to {experts.experts_per_token} experts, but there are only "
            f"{experts.num_experts}"
        )


def _common(hf: HFConfig, architecture: str, family: str) -> ModelConfig:
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim", 0) or hf["hidden_size"] // heads
    if not head_dim:
        raise ModelError(
            f"config.json has num_attention_heads {heads} and hidden_size {hf['hidden_size']}, which leaves "
            "no feature for a head; head_dim must say how many they have"
        )
    dtype = _stored_dtype(hf)
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=FAMILIES[family].ropes(hf, head_dim)[0],
        scale=head_dim**-0.5,
    )
    feed_forward = FeedForwardConfig(
        inner_size=hf["intermediate_size"], activation=_activation(hf[FAMILIES[family].activation])
    )
    return ModelConfig(
        architecture=architecture,
        family=family,
        dtype=dtype,
        embedding_dtype=hf.get("embedding_dtype", dtype),
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        layers=(LayerConfig((attention, feed_forward)),) * hf["num_hidden_layers"],
        max_model_len=hf["max_position_embeddings"],
        tie_word_embeddings=hf["tie_word_embeddings"],
        norm_eps=hf["rms_norm_eps"],
    )


def _stored_dtype(hf: HFConfig) -> str:
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"config.json says dtype {dtype!r}; {nearest_name(str(dtype), DTYPE_BYTES)}")
    return str(dtype)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ModelError(f"config.json says activation {name!r}; {nearest_name(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layer_windows(hf: HFConfig, is_sliding: Callable[[int], bool]) -> list[int]:
    """Return the window of each layer: by `layer_types` where the config has them, else by `is_sliding`."""
    window = hf.get("sliding_window", 0)
    layers = range(hf["num_hidden_layers"])
    types = hf.get("layer_types")
    if types is not None:
        return [window if types[i] == "sliding_attention" else 0 for i in layers]
    return [window if is_sliding(i) else 0 for i in layers]


def _llama(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _with_attention_biases(hf, base).changed(FeedForwardConfig, bias=bool(hf.get("mlp_bias", False)))


def _with_attention_biases(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return base.changed(AttentionConfig, qkv_bias=bias, output_bias=bias)


def _all_sliding(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Mistral, Mixtral and Phi-3: every layer has the window, if there is one."""
    return base.changed(AttentionConfig, window=hf.get("sliding_window", 0))


def _qwen2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    hf.get("attention_bias")  # these layers have biases if it is there in any form
    return base.changed(AttentionConfig, qkv_bias=True, window=_qwen_windows(hf))


def _qwen_windows(hf: HFConfig) -> list[int]:
    """Qwen2 and Qwen3: layers from `max_window_layers` on have the window, if `layer_types` is not there."""
    first_sliding = hf["max_window_layers"]
    windows = _layer_windows(hf, lambda layer: bool(layer >= first_sliding))
    return windows if hf.get("use_sliding_window", False) else [0] * len(windows)


def _qwen3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    biased = _with_attention_biases(hf, base)
    return biased.changed(AttentionConfig, qk_norm="head", window=_qwen_windows(hf))


def _qwen3_moe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    dense = set(hf.get("mlp_only_layers") or ())
    step = hf.get("decoder_sparse_step", 1)
    window = hf.get("sliding_window", 0) * hf.get("use_sliding_window", False)
    normed = _with_attention_biases(hf, base).changed(AttentionConfig, qk_norm="head", window=window)
    return _with_experts(
        normed,
        [layer not in dense and (layer + 1) % step == 0 for layer in range(base.num_layers)],
        num_experts=hf.get("num_experts") or hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["moe_intermediate_size"],
        normalize=bool(hf.get("norm_topk_prob", False)),
    )


def _mixtral(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _with_experts(
        _all_sliding(hf, base),
        [True] * base.num_layers,
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["intermediate_size"],
        normalize=True,
    )


def _with_experts(base: ModelConfig, has_experts: list[bool], **fields: Any) -> ModelConfig:
    """Give some layers a mixture of experts in place of the feed-forward layer."""

    def changed(layer: LayerConfig) -> LayerConfig:
        attention, dense = layer.parts
        assert isinstance(dense, FeedForwardConfig)
        return LayerConfig((attention, ExpertsConfig(activation=dense.activation, **fields)))

    layers = zip(base.layers, has_experts, strict=True)
    return replace(base, layers=tuple(changed(layer) if has else layer for layer, has in layers))


def _gemma(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    hf.get("hidden_activation")  # published beside the other, and has no effect
    config = _like_gemma(hf, base)
    if hf[FAMILIES["gemma"].activation] == "gelu":  # in old files, that means the tanh form
        return config.changed(FeedForwardConfig, activation="gelu_tanh")
    return config


def _like_gemma(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(
        _with_attention_biases(hf, base), norm_offset=1.0, embedding_scale=math.sqrt(base.hidden_size)
    )


def _gemma2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    hf.get("hidden_act")  # published beside the other, and has no effect
    config = replace(_like_gemma(hf, base), logits_softcap=hf.get("final_logit_softcapping", 0.0))
    return config.changed(SubLayerConfig, post_norm=True).changed(
        AttentionConfig,
        scale=hf["query_pre_attn_scalar"] ** -0.5,
        softcap=hf.get("attn_logit_softcapping", 0.0),
        window=_layer_windows(hf, lambda layer: layer % 2 == 0),
    )


def _gemma3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    if hf.get("attn_logit_softcapping"):
        raise ModelError("config.json has attn_logit_softcapping, which Gemma 3 in transformers ignores")
    pattern = hf.get("sliding_window_pattern", 6)
    normed = _gemma2(hf, base).changed(AttentionConfig, qk_norm="head")
    return _with_two_ropes(hf, normed, _layer_windows(hf, lambda layer: (layer + 1) % pattern != 0))


def _with_two_ropes(hf: HFConfig, base: ModelConfig, windows: list[int]) -> ModelConfig:
    """Give layers their windows, and those with a window the second set of frequencies."""
    full, sliding = FAMILIES[base.family].ropes(hf, base.kv_specs[0].key_head_dim)
    ropes = [sliding if window else full for window in windows]
    return base.changed(AttentionConfig, window=windows, rope=ropes)


def _smollm3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    interval = hf.get("no_rope_layer_interval", 4)
    has_rope = hf.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(base.num_layers)]
    is_windowed = bool(hf.get("use_sliding_window", False))
    [rope] = base.ropes
    return _llama(hf, base).changed(
        AttentionConfig,
        rope=[rope if has_rope[layer] else None for layer in range(base.num_layers)],
        window=_layer_windows(hf, lambda layer: is_windowed and not has_rope[layer]),
    )


def _olmo2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = _with_attention_biases(hf, base).changed(SubLayerConfig, pre_norm=False, post_norm=True)
    return config.changed(AttentionConfig, qk_norm="full")


def _olmo3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    windows = _layer_windows(hf, lambda layer: (layer + 1) % 4 != 0)
    return _with_two_ropes(hf, _olmo2(hf, base), windows)


def _granite(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = replace(
        _llama(hf, base),
        embedding_scale=hf["embedding_multiplier"],
        residual_scale=hf["residual_multiplier"],
        logits_divisor=hf["logits_scaling"],
    )
    return config.changed(AttentionConfig, scale=hf["attention_multiplier"])


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, _NAMES),
    "mistral": Family(_all_sliding, _NAMES, {"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": Family(
        _mixtral,
        _NAMES | _MIXTRAL_NAMES,
        {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "qwen2": Family(_qwen2, _NAMES, _QWEN_DEFAULTS),
    "qwen3": Family(_qwen3, _NAMES, _QWEN_DEFAULTS | {"head_dim": 128}),
    "qwen3_moe": Family(_qwen3_moe, _NAMES, {"num_key_value_heads": 4, "sliding_window": 4096}),
    "gemma": Family(
        _gemma, _NAMES, _GEMMA_DEFAULTS | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"}
    ),
    "gemma2": Family(
        _gemma2,
        _NAMES | _FOUR_NORM_NAMES,
        _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        activation="hidden_activation",
    ),
    "gemma3": Family(
        _gemma3,
        _NAMES | _FOUR_NORM_NAMES,
        _GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        activation="hidden_activation",
        model_type="gemma3_text",
        ropes=lambda hf, head_dim: read_two_ropes(hf, head_dim, sliding_theta=hf["rope_local_base_freq"]),
    ),
    "phi3": Family(
        _all_sliding,
        _NAMES | _FUSED_NAMES,
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        ropes=lambda hf, head_dim: (read_partial_rope(hf, head_dim),),
    ),
    "smollm3": Family(
        _smollm3, _NAMES, {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}
    ),
    "olmo2": Family(_olmo2, _NAMES | _FOUR_NORM_NAMES, {"rms_norm_eps": 1e-5}),
    "olmo3": Family(
        _olmo3,
        _NAMES | _FOUR_NORM_NAMES,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        ropes=lambda hf, head_dim: read_two_ropes(hf, head_dim, sliding_theta=5e5),
    ),
    "granite": Family(
        _granite,
        _NAMES,
        dict.fromkeys(
            ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0
        ),
    ),
}

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GraniteForCausalLM": "granite",
}
