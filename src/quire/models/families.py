"""The families: for each, how its Hugging Face config and weight names map to Quire's.

A family is an entry of `FAMILIES`. Most differ from Llama in a few fields; `_common` reads what all share.
Configs are read in the form that the hub's files have had since 2023 (`rope_theta`, `rope_scaling`) and in
the newer one (`rope_parameters`, nested by layer type where there are two).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.errors import ModelError, UnknownArchitectureError, nearest_name
from quire.models.config import DTYPE_BYTES, NO_ROPE, ModelConfig
from quire.models.config_entries import MAX_LAYERS_TIMES_EXPERTS, RULES, check_entries
from quire.models.ropes import HFConfig, read_rope

_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "output": "lm_head.weight",
    "layer": "model.layers.{}.",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_FOUR_NORM_NAMES = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_FUSED_NAMES = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
_QWEN_MOE_NAMES = {
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{}.gate_proj",
    "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
}
_MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
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


@dataclass(slots=True, frozen=True)
class Family:
    """How to read one family's checkpoints.

    `specialize` takes the config that `_common` reads and returns it with what the family does otherwise. A
    weight name belongs to the whole model ("embedding", "norm", "output", "layer") or, without its ".weight"
    or ".bias", to a layer.
    """

    specialize: Callable[[HFConfig, ModelConfig], ModelConfig]
    weight_names: dict[str, str]


def model_config(hf: HFConfig) -> ModelConfig:
    """Return what a parsed `config.json` describes, but for the quantization of stored weights.

    Raises:
        UnknownArchitectureError: lists the architectures that Quire knows.
        ModelError: a needed entry is missing or has a value that Quire does not compute.
    """
    check_entries(hf)
    hf = {key: value for key, value in hf.items() if value is not None}  # null counts as missing
    architecture = (hf.get("architectures") or ["(none)"])[0]
    family_name = ARCHITECTURES.get(architecture)
    if family_name is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitectureError(
            f"config.json names the architecture {architecture}; Quire knows {known}"
        )
    _refuse_what_is_not_computed(hf)
    try:
        config = FAMILIES[family_name].specialize(hf, _common(hf, architecture, family_name))
    except KeyError as error:
        raise ModelError(f"config.json of this {architecture} has no entry {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise ModelError(f"config.json of this {architecture} cannot be understood: {error}") from error
    _check(config)
    return config


def _refuse_what_is_not_computed(hf: HFConfig) -> None:
    if hf.get("use_bidirectional_attention"):
        raise ModelError("config.json asks for bidirectional attention; Quire serves causal decoders only")
    for layer_type in hf.get("layer_types") or ():
        if layer_type not in _LAYER_TYPES:
            raise ModelError(
                f"config.json names the layer type {layer_type!r}; known: {', '.join(_LAYER_TYPES)}"
            )
    for name in _COUNTS:
        if name not in hf:
            raise ModelError(f"config.json has no {name}; it must be {RULES[name].describe()}")


def _check(config: ModelConfig) -> None:
    if any(config.moe_layers):
        if config.num_layers * config.num_experts > MAX_LAYERS_TIMES_EXPERTS:
            raise ModelError(
                f"{config.num_layers} layers of {config.num_experts} experts are more than the "
                f"{MAX_LAYERS_TIMES_EXPERTS} in all that Quire loads"
            )
        if config.num_experts_per_token > config.num_experts:
            raise ModelError(
                f"each token goes to {config.num_experts_per_token} experts, of which there are "
                f"{config.num_experts}"
            )
    for scale in (config.attention_scale, config.embedding_scale, *(rope.factor for rope in config.ropes)):
        if not math.isfinite(scale):
            raise ModelError(f"config.json leads to a factor of {scale}; it must be finite")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly"
        )
    for name in ("sliding_windows", "layer_ropes", "moe_layers"):
        if len(getattr(config, name)) != config.num_layers:
            raise ModelError(
                f"{name} has {len(getattr(config, name))} entries for {config.num_layers} layers"
            )


def _common(hf: HFConfig, architecture: str, family: str) -> ModelConfig:
    layers, heads = hf["num_hidden_layers"], hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    if not head_dim:
        raise ModelError(
            f"config.json has num_attention_heads {heads} and hidden_size {hf['hidden_size']}, which leaves "
            "no feature for a head; head_dim must say how many they have"
        )
    dtype = _stored_dtype(hf)
    return ModelConfig(
        architecture=architecture,
        family=family,
        dtype=dtype,
        embedding_dtype=hf.get("embedding_dtype", dtype),
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate_size=hf["intermediate_size"],
        max_model_len=hf["max_position_embeddings"],
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        activation=_activation(hf.get("hidden_activation") or hf.get("hidden_act") or "silu"),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        sliding_windows=(0,) * layers,
        ropes=(read_rope(hf, head_dim),),
        layer_ropes=(0,) * layers,
        moe_layers=(False,) * layers,
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


def _layer_windows(hf: HFConfig, is_sliding: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the window of each layer: by `layer_types` where the config has them, else by `is_sliding`."""
    window = hf.get("sliding_window") or 0
    layers = range(hf["num_hidden_layers"])
    types = hf.get("layer_types")
    if types is not None:
        return tuple(window if types[i] == "sliding_attention" else 0 for i in layers)
    return tuple(window if is_sliding(i) else 0 for i in layers)


def _llama(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(_with_attention_biases(hf, base), mlp_bias=bool(hf.get("mlp_bias", False)))


def _with_attention_biases(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return replace(base, attention_bias=bias, output_bias=bias)


def _all_sliding(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Mistral and Phi-3: every layer has the window, if there is one."""
    return replace(base, sliding_windows=_layer_windows(hf, lambda layer: True))


def _qwen2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(base, attention_bias=True, sliding_windows=_qwen_windows(hf))


def _qwen_windows(hf: HFConfig) -> tuple[int, ...]:
    """Qwen2 and Qwen3: layers from `max_window_layers` on have the window, if `layer_types` is not there."""
    if not hf.get("use_sliding_window", False):
        return (0,) * int(hf["num_hidden_layers"])
    first_sliding = hf.get("max_window_layers", 0)
    return _layer_windows(hf, lambda layer: bool(layer >= first_sliding))


def _qwen3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(_with_attention_biases(hf, base), qk_norm="head", sliding_windows=_qwen_windows(hf))


def _qwen3_moe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    dense = set(hf.get("mlp_only_layers") or ())
    step = hf.get("decoder_sparse_step", 1)
    window = hf.get("sliding_window") or 0 if hf.get("use_sliding_window", False) else 0
    return replace(
        _qwen3(hf, base),
        sliding_windows=(window,) * base.num_layers,  # max_window_layers is for dense models only
        moe_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(base.num_layers)),
        num_experts=hf.get("num_experts") or hf["num_local_experts"],
        num_experts_per_token=hf["num_experts_per_tok"],
        moe_intermediate_size=hf["moe_intermediate_size"],
        normalize_expert_weights=bool(hf.get("norm_topk_prob", False)),
    )


def _mixtral(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(
        _all_sliding(hf, base),
        moe_layers=(True,) * base.num_layers,
        num_experts=hf["num_local_experts"],
        num_experts_per_token=hf["num_experts_per_tok"],
        moe_intermediate_size=hf["intermediate_size"],
        normalize_expert_weights=True,
    )


def _gemma(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    named = hf.get("hidden_act") or "gelu"  # in old files, it means the approximation
    activation = _activation("gelu_pytorch_tanh" if named == "gelu" else named)
    return replace(_like_gemma(hf, base), activation=activation)


def _like_gemma(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(
        _with_attention_biases(hf, base),
        norm_offset=1.0,
        embedding_scale=math.sqrt(base.hidden_size),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )


def _gemma2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(
        _like_gemma(hf, base),
        activation=_activation(hf.get("hidden_activation") or "gelu_pytorch_tanh"),
        post_norm=True,
        attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=hf.get("attn_logit_softcapping") or 0.0,
        logits_softcap=hf.get("final_logit_softcapping") or 0.0,
        sliding_windows=_layer_windows(hf, lambda layer: layer % 2 == 0),
    )


def _gemma3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    windowed = replace(
        _gemma2(hf, base),
        qk_norm="head",
        sliding_windows=_layer_windows(hf, lambda layer: (layer + 1) % pattern != 0),
    )
    sliding_theta = hf.get("rope_local_base_freq", 1e4)
    return _with_two_ropes(hf, windowed, full_theta=1e6, sliding_theta=sliding_theta)


def _with_two_ropes(
    hf: HFConfig, base: ModelConfig, *, full_theta: float, sliding_theta: float
) -> ModelConfig:
    """Give `base` two sets of frequencies: 0 for full attention, 1 for its layers with a window."""
    full = read_rope(hf, base.head_dim, layer_type="full_attention", default_theta=full_theta)
    sliding = read_rope(hf, base.head_dim, layer_type="sliding_attention", default_theta=sliding_theta)
    layer_ropes = tuple(int(window > 0) for window in base.sliding_windows)
    return replace(base, ropes=(full, sliding), layer_ropes=layer_ropes)


def _smollm3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    interval = hf.get("no_rope_layer_interval", 4)
    has_rope = hf.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(base.num_layers)]
    is_windowed = bool(hf.get("use_sliding_window", False))
    return replace(
        _llama(hf, base),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
        layer_ropes=tuple(0 if has_rope[layer] else NO_ROPE for layer in range(base.num_layers)),
        sliding_windows=_layer_windows(hf, lambda layer: is_windowed and not has_rope[layer]),
    )


def _olmo2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(_with_attention_biases(hf, base), pre_norm=False, post_norm=True, qk_norm="full")


def _olmo3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    windows = _layer_windows(hf, lambda layer: (layer + 1) % 4 != 0)
    windowed = replace(_olmo2(hf, base), sliding_windows=windows)
    return _with_two_ropes(hf, windowed, full_theta=5e5, sliding_theta=hf.get("rope_theta", 5e5))


def _granite(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return replace(
        _llama(hf, base),
        embedding_scale=hf["embedding_multiplier"],
        attention_scale=hf["attention_multiplier"],
        residual_scale=hf["residual_multiplier"],
        logits_divisor=hf["logits_scaling"],
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, _NAMES),
    "mistral": Family(_all_sliding, _NAMES),
    "mixtral": Family(_mixtral, _NAMES | _MIXTRAL_NAMES),
    "qwen2": Family(_qwen2, _NAMES),
    "qwen3": Family(_qwen3, _NAMES),
    "qwen3_moe": Family(_qwen3_moe, _NAMES | _QWEN_MOE_NAMES),
    "gemma": Family(_gemma, _NAMES),
    "gemma2": Family(_gemma2, _NAMES | _FOUR_NORM_NAMES),
    "gemma3": Family(_gemma3, _NAMES | _FOUR_NORM_NAMES),
    "phi3": Family(_all_sliding, _NAMES | _FUSED_NAMES),
    "smollm3": Family(_smollm3, _NAMES),
    "olmo2": Family(_olmo2, _NAMES | _FOUR_NORM_NAMES),
    "olmo3": Family(_olmo3, _NAMES | _FOUR_NORM_NAMES),
    "granite": Family(_granite, _NAMES),
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
