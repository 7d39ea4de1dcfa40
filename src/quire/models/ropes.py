"""Reading rotary position settings out of a Hugging Face config, in its old and new forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError, nearest_name
from quire.models.config import RopeConfig

HFConfig = Mapping[str, Any]  # the JSON object in a config.json

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope"}


def read_rope(
    hf: HFConfig, head_dim: int, *, layer_type: str = "", default_theta: float = 10000.0
) -> RopeConfig:
    """Return the frequencies' settings, those of `layer_type` where a config has several.

    Raises:
        ModelError: an unknown kind of scaling, or factors that do not fit the head.
    """
    values = _rope_values(hf, layer_type, default_theta)
    kind = values.get("rope_type") or values.get("type") or "default"
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in KINDS:
        raise ModelError(f"config.json says rope type {kind!r}; {nearest_name(str(kind), KINDS)}")
    rotary_dim = int(head_dim * values.get("partial_rotary_factor", 1.0))
    if rotary_dim < 2 or rotary_dim % 2 or (kind == "dynamic" and rotary_dim == 2):
        raise ModelError(
            f"config.json has heads of {head_dim} features, of which {rotary_dim} are rotated; these must be "
            "pairs, and more than one for the rope type dynamic"
        )
    max_len = hf["max_position_embeddings"]
    original = _original_max_len(hf, values, kind, max_len)
    factor = values.get("factor") or (max_len / original if kind in ("yarn", "longrope") else 1.0)
    rope = RopeConfig(
        kind=kind,
        theta=float(values["rope_theta"]),
        rotary_dim=rotary_dim,
        factor=float(factor),
        original_max_len=original,
        low_freq_factor=values.get("low_freq_factor", 1.0),
        high_freq_factor=values.get("high_freq_factor", 4.0),
        beta_fast=values.get("beta_fast") or 32.0,
        beta_slow=values.get("beta_slow") or 1.0,
        truncate=values.get("truncate", True),
        attention_factor=_attention_factor(values, kind, factor, original),
        short_factors=tuple(values.get("short_factor") or ()),
        long_factors=tuple(values.get("long_factor") or ()),
    )
    _check_longrope(rope)
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ModelError(
            f"config.json has low_freq_factor {rope.low_freq_factor} and high_freq_factor "
            f"{rope.high_freq_factor}; the first must be the lower one"
        )
    if kind == "yarn" and rope.theta <= 1:
        raise ModelError(f"config.json has rope_theta {rope.theta}; rope type yarn needs one above 1")
    return rope


def _rope_values(hf: HFConfig, layer_type: str, default_theta: float) -> dict[str, Any]:
    parameters = hf.get("rope_parameters") or {}
    if layer_type in parameters:
        parameters = parameters[layer_type]
    elif layer_type == "sliding_attention":
        return {"rope_theta": default_theta}  # the old form's scaling is for full attention only
    values = {"rope_theta": hf.get("rope_theta", default_theta)}
    if "partial_rotary_factor" in hf:
        values["partial_rotary_factor"] = hf["partial_rotary_factor"]
    given = parameters or hf.get("rope_scaling") or {}
    return values | {key: value for key, value in given.items() if value is not None}


def _original_max_len(hf: HFConfig, values: dict[str, Any], kind: str, max_len: int) -> int:
    original = values.get("original_max_position_embeddings")
    if kind == "longrope":
        original = original or hf.get("original_max_position_embeddings")
    return int(original or max_len)


def _attention_factor(values: dict[str, Any], kind: str, factor: float, original: int) -> float:
    """Return the factor on cosines and sines, derived as in the YaRN and LongRoPE papers unless given."""
    given = values.get("attention_factor")
    if given is not None or kind not in ("yarn", "longrope") or factor <= 1:
        return float(given or 1.0)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, mscale_all_dim = float(values.get("mscale") or 0), float(values.get("mscale_all_dim") or 0)
    if mscale and mscale_all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def _check_longrope(rope: RopeConfig) -> None:
    if rope.kind != "longrope":
        return
    for name in ("short_factors", "long_factors"):
        count = len(getattr(rope, name))
        if count != rope.rotary_dim // 2:
            raise ModelError(
                f"longrope has {count} {name}; it needs {rope.rotary_dim // 2}, one per frequency"
            )
