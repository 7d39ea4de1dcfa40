"""Multimodal architectures: the decoder of text in each, as if it were a model by itself.

Such a config.json describes the decoder in `text_config`. Its weights have a prefix
(`quire.models.checkpoints.names`); those of vision and audio are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.models.config_entries import RULES, check_entry
from quire.models.families import ARCHITECTURES, FAMILIES
from quire.models.ropes import HFConfig

_OF_OTHER_PARTS = ("_config", "_token_id", "_token_index")  # the ends of their names
_OF_TEXT = ("per_layer_config",)
_OF_BOTH = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
_MROPE_ENTRIES = ("mrope_section", "mrope_interleaved")
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_GEMMA4 = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {  # by type of decoder: text_configs leave out what is usual
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4 | {"max_position_embeddings": 262144},
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "max_position_embeddings": 131072},
    "qwen2": _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
}
_AS_QWEN2 = {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80}


@dataclass(slots=True, frozen=True)
class _Wrapper:
    """A multimodal architecture.

    Args:
        text_type: model type of a decoder that names none.
        is_tied: whether its output layer is the embedding where the config does not say; the files decide.
        is_flat: whether old configs have the decoder's entries beside `vision_config`.
    """

    text_type: str
    is_tied: bool = False
    is_flat: bool = False


WRAPPERS: dict[str, _Wrapper] = {
    "Gemma3ForConditionalGeneration": _Wrapper("gemma3_text", is_tied=True),
    "Gemma4ForConditionalGeneration": _Wrapper("gemma4_text", is_tied=True),
    "Gemma4UnifiedForConditionalGeneration": _Wrapper("gemma4_unified_text", is_tied=True),
    "Idefics3ForConditionalGeneration": _Wrapper("llama"),
    "InternVLForConditionalGeneration": _Wrapper("qwen2", is_tied=True),
    "Llama4ForConditionalGeneration": _Wrapper("llama4_text"),
    "LlavaForConditionalGeneration": _Wrapper("llama"),
    "LlavaNextForConditionalGeneration": _Wrapper("llama"),
    "LlavaOnevisionForConditionalGeneration": _Wrapper("qwen2"),
    "Mistral3ForConditionalGeneration": _Wrapper("mistral", is_tied=True),
    "Qwen2VLForConditionalGeneration": _Wrapper("qwen2_vl_text", is_flat=True),
    "Qwen2_5_VLForConditionalGeneration": _Wrapper("qwen2_5_vl_text", is_flat=True),
    "Qwen3VLForConditionalGeneration": _Wrapper("qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": _Wrapper("qwen3_vl_moe_text"),
    "Qwen3_5ForConditionalGeneration": _Wrapper("qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": _Wrapper("qwen3_5_moe_text"),
    "SmolVLMForConditionalGeneration": _Wrapper("llama"),
    "VoxtralForConditionalGeneration": _Wrapper("llama"),
}
_TEXT_TYPES: dict[str, tuple[str, dict[str, Any]]] = {  # architecture by itself, and what differs in defaults
    "qwen2_vl_text": ("Qwen2ForCausalLM", _AS_QWEN2),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _AS_QWEN2),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {"rope_theta": 5e5}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {"rope_theta": 5e5, "norm_topk_prob": True}),
    **{
        FAMILIES[name].model_type or name: (
            architecture,
            _TEXT_DEFAULTS.get(FAMILIES[name].model_type or name, {}),
        )
        for architecture, name in reversed(ARCHITECTURES.items())  # the first of a family counts
    },
}


def is_wrapper(values: HFConfig) -> bool:
    """Return whether a parsed config.json is that of a multimodal model."""
    return architecture_of(values) in WRAPPERS


def architecture_of(values: HFConfig) -> str:
    """Return the architecture that a parsed config.json names first.

    Raises:
        ModelError: the entry is no list of texts.
    """
    check_entry("config.json has architectures", values.get("architectures"), RULES["architectures"])
    return str((values.get("architectures") or ["(none)"])[0])


def decoder_entries(values: HFConfig) -> HFConfig:
    """Return the entries of a model's decoder; those of a model without other parts are returned unchanged.

    A decoder of a type that Quire does not have keeps the architecture of the whole.

    Raises:
        ModelError: `text_config` is no object.
    """
    wrapper = WRAPPERS.get(architecture_of(values))
    if wrapper is None:
        return values
    check_entry("config.json has text_config", values.get("text_config"), RULES["text_config"])
    text = values.get("text_config") or (values if wrapper.is_flat else {})
    text_type = wrapper.text_type if text is values else text.get("model_type") or wrapper.text_type
    architecture, defaults = _TEXT_TYPES.get(str(text_type), (architecture_of(values), {}))
    family = FAMILIES.get(ARCHITECTURES.get(architecture, ""))
    own = {
        name: value
        for name, value in text.items()
        if name in (*_OF_TEXT, *_OF_BOTH) or not name.endswith(_OF_OTHER_PARTS)
    }
    own = defaults | {name: value for name, value in own.items() if value is not None or name not in defaults}
    own |= {name: values[name] for name in _OF_BOTH if values.get(name) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(own.get(name), dict):
            own[name] = _with_one_position(own[name])
    is_tied = values.get("tie_word_embeddings")
    is_tied = wrapper.is_tied if is_tied is None else is_tied
    return own | {
        "architectures": [architecture],
        "model_type": text_type if family is None else family.model_type or ARCHITECTURES[architecture],
        "tie_word_embeddings": is_tied or own.get("tie_word_embeddings", False),
    }


def _with_one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of text, whose tokens have one position in time, height and width."""
    kept = {key: value for key, value in rope.items() if key not in _MROPE_ENTRIES}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value
        for key, value in kept.items()
    }
