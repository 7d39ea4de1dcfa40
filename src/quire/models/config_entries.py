"""The entries of a config.json that Quire reads: of which type each is, and how large a number may be.

Everything that follows from these numbers takes memory and time in proportion to them, so they are checked
before anything is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any

from quire.errors import ModelError

MAX_LAYERS_TIMES_EXPERTS = 1 << 18  # each is an object while a model is loaded
_MAX_POSITION = 2**31 - 1  # kernels count positions in 32 bits
_SHOWN = 80  # characters of a wrong value


@dataclasses.dataclass(frozen=True, slots=True)
class _Integer:
    least: int
    most: int

    def describe(self) -> str:
        return f"an integer from {self.least} to {self.most}"

    def accepts(self, value: object) -> bool:
        return type(value) is int and self.least <= value <= self.most


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    least: float
    most: float
    has_least: bool = True  # `least` itself is accepted

    def describe(self) -> str:
        return f"a number {'from' if self.has_least else 'above'} {self.least:g} to {self.most:g}"

    def accepts(self, value: object) -> bool:
        if type(value) not in (int, float):
            return False
        assert isinstance(value, int | float)
        return self.least <= value <= self.most and (self.has_least or value != self.least)


@dataclasses.dataclass(frozen=True, slots=True)
class _Is:
    kind: type | UnionType
    description: str

    def describe(self) -> str:
        return self.description

    def accepts(self, value: object) -> bool:
        return isinstance(value, self.kind)


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
    most: int  # characters

    def describe(self) -> str:
        return f"a text of at most {self.most} characters"

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and len(value) <= self.most


@dataclasses.dataclass(frozen=True, slots=True)
class _ListOf:
    entries: _Integer | _Number | _Text
    most: int

    def describe(self) -> str:
        return f"a list of at most {self.most}, each {self.entries.describe()}"

    def accepts(self, value: object) -> bool:
        return isinstance(value, list) and len(value) <= self.most and all(map(self.entries.accepts, value))


_Rule = _Integer | _Number | _Is | _Text | _ListOf
_POSITIVE = _Number(0, 1e30, has_least=False)
_FACTOR = _Number(-1e30, 1e30)
_BOOLEAN, _OBJECT, _TEXT = _Is(bool, "true or false"), _Is(dict, "an object"), _Text(256)
_LENGTH = _Integer(1, _MAX_POSITION)
_LAYERS = 1 << 12
_BITS = _Integer(1, 64)
_GROUP_SIZE = _Integer(-1, 1 << 20)  # -1 and 0: a group is a row
_BLOCK = _ListOf(_Integer(1, 1 << 20), 2)

RULES: dict[str, _Rule] = {
    "architectures": _ListOf(_TEXT, 16),
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "quantization_config": _OBJECT,
    "vocab_size": _Integer(1, 1 << 24),
    "hidden_size": _Integer(1, 1 << 17),
    "intermediate_size": _Integer(1, 1 << 20),
    "num_hidden_layers": _Integer(1, _LAYERS),
    "num_attention_heads": _Integer(1, 1 << 12),
    "num_key_value_heads": _Integer(1, 1 << 12),
    "head_dim": _Integer(1, 1 << 12),
    "max_position_embeddings": _LENGTH,
    "tie_word_embeddings": _BOOLEAN,
    "attention_bias": _BOOLEAN,
    "mlp_bias": _BOOLEAN,
    "rms_norm_eps": _Number(0, 1),
    "sliding_window": _Integer(0, _MAX_POSITION),
    "use_sliding_window": _BOOLEAN,
    "max_window_layers": _Integer(0, _MAX_POSITION),
    "sliding_window_pattern": _Integer(1, _LAYERS),
    "_sliding_window_pattern": _Integer(1, _LAYERS),
    "layer_types": _ListOf(_TEXT, _LAYERS),
    "no_rope_layer_interval": _Integer(1, _LAYERS),
    "no_rope_layers": _ListOf(_Integer(0, 1), _LAYERS),
    "mlp_only_layers": _ListOf(_Integer(0, _LAYERS), _LAYERS),
    "decoder_sparse_step": _Integer(1, _LAYERS),
    "num_experts": _Integer(1, 1 << 16),
    "num_local_experts": _Integer(1, 1 << 16),
    "num_experts_per_tok": _Integer(1, 1 << 10),
    "moe_intermediate_size": _Integer(1, 1 << 20),
    "norm_topk_prob": _BOOLEAN,
    "query_pre_attn_scalar": _POSITIVE,
    "attn_logit_softcapping": _Number(0, 1e30),
    "final_logit_softcapping": _Number(0, 1e30),
    "embedding_multiplier": _FACTOR,
    "attention_multiplier": _FACTOR,
    "residual_multiplier": _FACTOR,
    "logits_scaling": _POSITIVE,
    "rope_theta": _POSITIVE,
    "rope_local_base_freq": _POSITIVE,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "partial_rotary_factor": _Number(0, 1, has_least=False),
    "original_max_position_embeddings": _LENGTH,
}

ROPE_RULES: dict[str, _Rule] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": _Number(0, 1, has_least=False),
    "factor": _POSITIVE,
    "original_max_position_embeddings": _LENGTH,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "truncate": _BOOLEAN,
    "attention_factor": _POSITIVE,
    "mscale": _FACTOR,
    "mscale_all_dim": _FACTOR,
    "short_factor": _ListOf(_POSITIVE, 1 << 12),
    "long_factor": _ListOf(_POSITIVE, 1 << 12),
}

QUANTIZATION_RULES: dict[str, _Rule] = {
    "bits": _BITS,
    "w_bit": _BITS,
    "group_size": _GROUP_SIZE,
    "q_group_size": _GROUP_SIZE,
    "sym": _BOOLEAN,
    "desc_act": _BOOLEAN,
    "static_groups": _BOOLEAN,
    "checkpoint_format": _TEXT,
    "is_marlin_format": _BOOLEAN,
    "version": _TEXT,
    "zero_point": _BOOLEAN,
    "fmt": _TEXT,
    "weight_block_size": _BLOCK,
    "format": _TEXT,
    "config_groups": _OBJECT,
    "kv_cache_scheme": _OBJECT,
    "transform_config": _OBJECT,
    "sparsity_config": _OBJECT,
}
SPARSITY_RULES: dict[str, _Rule] = {"format": _TEXT}
CONFIG_GROUP_RULES: dict[str, _Rule] = {"format": _TEXT, "weights": _OBJECT}
GROUP_WEIGHTS_RULES: dict[str, _Rule] = {
    "num_bits": _BITS,
    "type": _TEXT,
    "strategy": _TEXT,
    "group_size": _GROUP_SIZE,
    "block_structure": _BLOCK,
    "symmetric": _BOOLEAN,
    "actorder": _Is(str | bool, "a text, true or false"),
}


def check_entries(values: Mapping[str, Any]) -> None:
    """Check every entry of a config.json that Quire reads; null counts as missing.

    Raises:
        ModelError: an entry is of a wrong type or out of range.
    """
    _check_all("", values, RULES)
    for name in ("rope_scaling", "rope_parameters"):
        _check_rope(name, values.get(name) or {})


def check_quantization(values: Mapping[str, Any]) -> None:
    """Check every entry of a config.json's `quantization_config` that Quire reads; null counts as missing.

    Raises:
        ModelError: an entry is of a wrong type or out of range.
    """
    name = "quantization_config."
    _check_all(name, values, QUANTIZATION_RULES)
    _check_all(f"{name}sparsity_config.", values.get("sparsity_config") or {}, SPARSITY_RULES)
    for key, group in (values.get("config_groups") or {}).items():
        place = f"{name}config_groups.{key:.{_SHOWN}}"
        check_entry(f"config.json has {place}", group, _OBJECT)
        _check_all(f"{place}.", group or {}, CONFIG_GROUP_RULES)
        _check_all(f"{place}.weights.", (group or {}).get("weights") or {}, GROUP_WEIGHTS_RULES)


def check_entry(what: str, value: object, rule: _Rule) -> None:
    """Raise `ModelError` unless `value` is None or as `rule` says.

    Args:
        what: file and key, for the error.
        value: the entry.
        rule: one of `RULES`.
    """
    if value is not None and not rule.accepts(value):
        raise ModelError(f"{what} {_shown(value)}; it must be {rule.describe()}")


def _check_all(prefix: str, values: Mapping[str, Any], rules: Mapping[str, _Rule]) -> None:
    for key, rule in rules.items():
        check_entry(f"config.json has {prefix}{key}", values.get(key), rule)


def _check_rope(name: str, values: Mapping[str, Any]) -> None:
    nested = {key: value for key, value in values.items() if isinstance(value, dict)}
    for key, inner in nested.items():  # by layer type
        if any(isinstance(value, dict) for value in inner.values()):
            raise ModelError(f"config.json has {name}.{key} {_shown(inner)}; it must not be nested further")
        _check_rope(f"{name}.{key}", inner)
    _check_all(f"{name}.", values, ROPE_RULES)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, int | float | bool) and abs(value) < 1e99 else _repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _repr(value: object) -> str:
    if isinstance(value, int):
        return f"of {value.bit_length()} bits"
    if isinstance(value, str | list | dict) and len(value) > _SHOWN:
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)
