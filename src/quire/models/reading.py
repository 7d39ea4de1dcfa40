"""Reading a parsed config.json by its family, and checking what it leads to."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from typing import Any

from quire.errors import ModelError, UnknownArchitectureError
from quire.models.classification import ENDINGS, with_labels
from quire.models.config import ModelConfig
from quire.models.config_entries import (
    MAX_LAYERS_TIMES_EXPERTS,
    RULES,
    Entries,
    check_entry,
    check_objects,
    warn_once,
)
from quire.models.families import ARCHITECTURES, FAMILIES
from quire.models.families.family import MEAN_POOLING, Family, check_fixed, common
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.experts import ExpertsConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.ropes import HFConfig
from quire.models.wrappers import WRAPPERS, architecture_of, decoder_entries

_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
_DIGITS = 8  # that the number of a layer has at most
_DEFAULTS: dict[str, Any] = {
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_WHERE_NULL_IS_NONE = frozenset(
    {
        "num_key_value_heads",
        "sliding_window",
        "attention_value_scale",
        "attention_chunk_size",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_size_per_layer_input",
        "q_lora_rank",
        "scale_depth",
        "mamba_d_ssm",
        "dim_model_base",
    }
)


def model_config(values: HFConfig) -> ModelConfig:
    """Return what a parsed `config.json` describes, but for the quantization of stored weights.

    Entries that Quire neither reads nor knows to be harmless are logged.

    Raises:
        UnknownArchitectureError: Quire does not know the architecture; the message has the nearest names.
        ModelError: a needed entry is missing or has a value that Quire does not compute.
    """
    architecture = architecture_of(values)
    values = decoder_entries(values)
    family_name = ARCHITECTURES.get(architecture_of(values))
    if family_name is None:
        inside = (
            f" with a decoder of the type {values['model_type']!r:.100}" if architecture in WRAPPERS else ""
        )
        raise UnknownArchitectureError(
            f"config.json names the architecture {architecture}{inside}, which Quire does not know; "
            f"nearest by name: {_nearest(architecture)} (docs/models.md and docs/embeddings.md list all)"
        )
    check_objects(values)
    family = FAMILIES[family_name]
    values = family.usual_entries(values) if family.aliases else values
    defaults = {**_DEFAULTS, **family.defaults, **family.derived(values)}
    hf = Entries(values, defaults, _WHERE_NULL_IS_NONE, RULES)
    _refuse_what_is_not_computed(hf, family)
    try:
        config = family.specialize(hf, common(hf, architecture, family_name, family))
        is_body = architecture.endswith("Model") and not architecture.endswith("HeadModel")
        if architecture.endswith(ENDINGS):
            config = with_labels(hf, config, family.head)
        elif config.pooling is None and is_body:
            config = dataclasses.replace(config, pooling=MEAN_POOLING)
        if config.pooling is not None or hf.get("is_matryoshka"):
            config = dataclasses.replace(config, row_sizes=_row_sizes(hf))
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


def _nearest(architecture: str) -> str:
    """Return up to three known architectures, the nearest by name first."""
    known = (*ARCHITECTURES, *WRAPPERS)
    return ", ".join(difflib.get_close_matches(architecture[:100], known, n=3, cutoff=0.0))


def _row_sizes(hf: HFConfig) -> tuple[int, ...] | None:
    sizes = hf.get("matryoshka_dimensions")
    return tuple(sorted(sizes)) if sizes else () if hf.get("is_matryoshka") else None


def _refuse_what_is_not_computed(hf: HFConfig, family: Family) -> None:
    # Between tokens of one image ("vision") it does not concern text.
    looks_ahead = (hf.get("use_bidirectional_attention") or "vision") != "vision"
    if (looks_ahead and not family.may_look_ahead) or not hf.get("is_causal", True):
        raise ModelError("config.json asks for bidirectional attention; Quire serves causal decoders only")
    for name in _COUNTS:
        if hf.get(name) is None:
            raise ModelError(f"config.json has no {name}; it must be {RULES[name].describe()}")
    check_fixed(hf, family.fixed)
    _check_layer_entries(hf, family.layer_entries)
    types = hf.get("layer_types")
    for layer_type in types or ():
        if layer_type not in family.layer_types:
            raise ModelError(
                f"config.json names the layer type {layer_type!r}; known: {', '.join(family.layer_types)}"
            )
    if types is not None and len(types) != hf["num_hidden_layers"]:
        raise ModelError(f"config.json has {len(types)} layer_types for {hf['num_hidden_layers']} layers")


def _check_layer_entries(hf: HFConfig, known: Sequence[str]) -> None:
    for layer, entries in (hf.get("per_layer_config") or {}).items():
        name = f"per_layer_config.{layer:.20}"
        check_entry(f"config.json has {name}", entries, RULES["per_layer_config"])
        is_layer = layer.isascii() and layer.isdigit() and int(layer[:_DIGITS]) < hf["num_hidden_layers"]
        if not is_layer or len(layer) > _DIGITS or not set(entries or {}) <= set(known):
            raise ModelError(
                f"config.json has {name} {entries!r:.100}; layers of this architecture may differ in "
                f"{', '.join(known) or 'no entry'} here, by their numbers"
            )
        for entry, value in (entries or {}).items():
            check_entry(f"config.json has {name}.{entry}", value, RULES[entry])


def _check_layer_types(hf: HFConfig, config: ModelConfig) -> None:
    for layer, layer_type in enumerate(hf.get("layer_types") or ()):
        attention = [part for part in config.layers[layer].parts if isinstance(part, AttentionConfig)]
        window = max((part.window for part in attention), default=0)
        if (layer_type in ("sliding_attention", "chunked_attention")) != (window > 0):
            raise ModelError(
                f"config.json says that layer {layer} is of type {layer_type}; by the architecture and the "
                f"other entries, it has {f'a window of {window} tokens' if window else 'no window'}"
            )


def _check(config: ModelConfig) -> None:
    if config.pooling is not None and config.pooling.pooling_type is None:
        raise ModelError(f"the pooling of the family {config.family} has no pooling_type; it must have one")
    factors = [config.embedding_scale, config.logits_divisor, *(rope.factor for rope in config.ropes)]
    for part in dict.fromkeys(each for whole in config.parts for each in (whole, *whole.inner)):
        factors.append(part.output_scale)
        if isinstance(part, ExpertsConfig):
            _check_experts(part, config.num_layers)
        if isinstance(part, ExpertsConfig) or (isinstance(part, FeedForwardConfig) and part.gated):
            _check_gated(part.activation)
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


def _check_gated(activation: str) -> None:
    if activation == "xielu":
        raise ModelError("config.json says activation 'xielu', which is not supported with gates")


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
    if experts.num_experts % experts.num_groups or experts.groups_per_token > experts.num_groups:
        raise ModelError(
            f"config.json has {experts.num_experts} experts in {experts.num_groups} groups, of which each "
            f"token goes to {experts.groups_per_token}; groups must be equal, and as many as that"
        )
    if experts.experts_per_token * experts.num_groups > experts.num_experts * experts.groups_per_token:
        raise ModelError(
            f"each token goes to {experts.experts_per_token} experts of {experts.groups_per_token} groups, "
            f"which have only {experts.num_experts // experts.num_groups} each"
        )
