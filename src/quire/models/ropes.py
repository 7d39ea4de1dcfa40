"""Reading rotary position settings out of a Hugging Face config, in its old and new forms.

Where two places say something, that counts which does in `transformers`: of `rope_scaling` and
`rope_parameters` the first; of an entry inside and beside them the one inside, but for the original context.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ModelError, nearest_name
from quire.models.config import RopeConfig
from quire.models.config_entries import Entries

HFConfig = Mapping[str, Any]  # the JSON object in a config.json

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_BY_TYPE_KINDS = (*KINDS, "proportional")
ROTATED_FEATURES = "gguf.rope.dimension_count"
"""Entry that no config.json has: how many features of each head are rotated."""
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(hf: HFConfig, head_dim: int) -> RopeConfig:
    """Return the frequencies' settings of a model that rotates the features of all heads alike.

    Raises:
        ModelError: an unknown kind of scaling, an entry that it needs is missing, factors that do not fit the
            head, settings by layer type, or a part of each head that is rotated.
    """
    _refuse_partial(_one_set(hf))
    return partial_ropes(hf, head_dim)[0]


def partial_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig]:
    """Return those of a model that may rotate a part of each head, as its only set.

    Raises:
        ModelError: see `read_rope`.
    """
    values = _one_set(hf)
    return (_rope(hf, values, head_dim, original=hf.get("original_max_position_embeddings")),)


def read_rope_of_scaled_queries(hf: HFConfig, head_dim: int) -> RopeConfig:
    """Return those of a model whose queries grow with their position, if `llama_4_scaling_beta` says so.

    Raises:
        ModelError: see `read_rope`.
    """
    values = _one_set(hf)
    _refuse_partial(values)
    beta = values.pop("llama_4_scaling_beta", 0.0)
    values.pop("max_position_embeddings", None)  # published there, and has no effect
    rope = _rope(hf, values, head_dim, original=hf.get("original_max_position_embeddings"))
    return dataclasses.replace(rope, query_beta=float(beta))


def read_longrope(hf: HFConfig, head_dim: int) -> RopeConfig:
    """Return those of a model that may rotate a part of each head, and has longrope only, by old names, too.

    Raises:
        ModelError: see `read_rope`; or another kind of scaling.
    """
    values = _one_set(hf)
    kind = _kind(values)
    if kind in ("su", "yarn"):
        values = {**values, "rope_type": "longrope"}
    elif kind not in ("default", "longrope"):
        raise ModelError(f"config.json says rope type {kind!r}; this architecture has longrope only")
    return _rope(hf, values, head_dim, original=hf.get("original_max_position_embeddings"))


def read_score_factor(hf: HFConfig) -> float:
    """Return what DeepSeek's yarn multiplies scores by, besides the head size's own scale."""
    values = _one_set(hf)
    mscale_all_dim, factor = values.get("mscale_all_dim"), values.get("factor") or 1.0
    if _kind(values) == "default" or not mscale_all_dim or factor <= 1:
        return 1.0
    return float((0.1 * mscale_all_dim * math.log(factor) + 1) ** 2)


def read_two_ropes(hf: HFConfig, head_dim: int, *, sliding_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Return those of layers with full attention and those of layers with a window.

    In the old form, `rope_scaling` and `rope_theta` are for full attention only.

    Raises:
        ModelError: see `read_rope`; or settings for all layers in the new form.
    """
    by_type = _by_layer_type(hf)
    full = {"rope_theta": hf["rope_theta"]} | by_type["full_attention"] | (hf.get("rope_scaling") or {})
    sliding = {"rope_theta": sliding_theta} | by_type["sliding_attention"]
    for values in (hf, full, sliding):
        _refuse_partial(values)
        if values.get("truncate") is False:
            raise ModelError("config.json has truncate false for a layer type; transformers reads it as true")
    return _rope(hf, full, head_dim), _rope(hf, sliding, head_dim)


def read_proportional_ropes(
    hf: HFConfig, full_head_dim: int, sliding_head_dim: int
) -> tuple[RopeConfig, RopeConfig]:
    """Return the same for heads whose sizes differ, in the new form; frequencies may be proportional.

    Raises:
        ModelError: see `read_rope`; or settings for all layers.
    """
    if hf.get("rope_scaling"):
        raise ModelError("config.json has rope_scaling; this architecture has rope_parameters by layer type")
    ropes = []
    for of_type, head_dim in zip(_by_layer_type(hf).values(), (full_head_dim, sliding_head_dim), strict=True):
        values = _beside(hf) | of_type
        if _kind(values) != "proportional":
            _refuse_partial(values)
        ropes.append(_rope(hf, values, head_dim, kinds=_BY_TYPE_KINDS))
    return ropes[0], ropes[1]


def read_partial_ropes(
    hf: HFConfig, head_dim: int, part: float, usual: dict[str, dict[str, Any]]
) -> tuple[RopeConfig, RopeConfig]:
    """Return the same where a part of each head is rotated, without scaling.

    Args:
        hf: the config; what it has beside `rope_parameters` does not count.
        head_dim: features of a head.
        part: of a head, where the config does not say it.
        usual: what each layer type has if the config says nothing.

    Raises:
        ModelError: see `read_rope`; or settings for all layers.
    """
    if hf.get("rope_scaling"):
        raise ModelError("config.json has rope_scaling; this architecture has rope_parameters by layer type")
    by_type = _by_layer_type(hf) if hf.get("rope_parameters") else usual
    full, sliding = ({"partial_rotary_factor": part} | by_type[name] for name in _LAYER_TYPES)
    kinds = ("default",)
    return _rope(hf, full, head_dim, kinds=kinds), _rope(hf, sliding, head_dim, kinds=kinds)


def _by_layer_type(hf: HFConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of layers with full attention and of those with a window, in this order."""
    parameters = hf.get("rope_parameters") or {}
    by_type = {name: parameters.get(name) or {} for name in _LAYER_TYPES}
    others = sorted(parameters.keys() - by_type.keys())
    if others or not all(isinstance(values, dict) for values in by_type.values()):
        raise ModelError(
            f"config.json has rope_parameters.{', '.join(others)[:100] or 'full_attention'}; this "
            "architecture has an object for full_attention and one for sliding_attention, and nothing else"
        )
    return by_type


def _one_set(hf: HFConfig) -> dict[str, Any]:
    values = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    nested = [key for key, value in values.items() if isinstance(value, dict) or key in _LAYER_TYPES]
    if nested:
        raise ModelError(
            f"config.json has settings of the rotary embedding for {nested[0]!r:.100}; this architecture has "
            "the same for all layers"
        )
    return _beside(hf) | {key: value for key, value in values.items() if value is not None}


def _beside(hf: HFConfig) -> dict[str, Any]:
    """Return what a config may have beside its sets, for those that do not say it themselves."""
    return {name: hf[name] for name in ("rope_theta", "partial_rotary_factor") if name in hf}


def _refuse_partial(values: Mapping[str, Any]) -> None:
    factor = values.get("partial_rotary_factor")
    if factor not in (None, 1):
        raise ModelError(
            f"config.json has partial_rotary_factor {factor}; this architecture rotates the whole of a head"
        )


def _kind(values: Mapping[str, Any]) -> str:
    return str(values.get("rope_type") or values.get("type") or "default")


def _rope(
    hf: HFConfig,
    given: Mapping[str, Any],
    head_dim: int,
    *,
    original: int | None = None,
    kinds: Sequence[str] = KINDS,
) -> RopeConfig:
    """Return one set of frequencies.

    Args:
        hf: the whole config.
        given: the set's own entries.
        head_dim: features of a head.
        original: the context of the original training if the config says it beside the set.
        kinds: those that the architecture has.
    """
    values = Entries(given)
    kind = _kind(values)
    if kind not in kinds:
        raise ModelError(f"config.json says rope type {kind!r}; {nearest_name(kind, kinds)}")
    # The one type that does not count, too; and text has one position in time, height and width.
    for name in ("rope_type", "type", "mrope_section", "mrope_interleaved"):
        values.get(name)
    for name in _NEEDED.get(kind, ()):
        if name not in values:
            raise ModelError(f"config.json has rope type {kind} without {name}, which it needs")
    max_len = hf["max_position_embeddings"]
    if kind in ("llama3", "yarn", "longrope"):
        inside = values.get("original_max_position_embeddings")
        original = original or inside or max_len
    else:
        original = max_len
    partial = values.get("partial_rotary_factor", 1.0)
    rotary_dim = hf.get(ROTATED_FEATURES) or int(head_dim * (1.0 if kind == "proportional" else partial))
    if rotary_dim < 2 or rotary_dim % 2 or (kind == "dynamic" and rotary_dim == 2):
        raise ModelError(
            f"config.json has heads of {head_dim} features, of which {rotary_dim} are rotated; these must be "
            "pairs, and more than one for the rope type dynamic"
        )
    rope = RopeConfig(
        kind=kind,
        theta=float(values["rope_theta"]),
        rotary_dim=rotary_dim,
        original_max_len=original,
        turning_pairs=int(head_dim * partial // 2) if kind == "proportional" else 0,
        **_scaling(kind, values, max_len, original),
    )
    _check(rope)
    values.warn_of_unread(f"settings of the rotary embedding of type {kind}")
    return rope


def _scaling(kind: str, values: Mapping[str, Any], max_len: int, original: int) -> dict[str, Any]:
    """Return the settings that only some kinds have."""
    if kind in ("linear", "dynamic", "llama3"):
        return {name: float(values[name]) for name in _NEEDED[kind]}
    if kind == "proportional":
        return {"factor": float(values.get("factor") or 1.0)}
    if kind not in ("yarn", "longrope"):
        return {}
    factor = float(values.get("factor") or max_len / original)
    given = values.get("attention_factor")
    if kind == "longrope":
        derived = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        of_kind = {
            "short_factors": tuple(values.get("short_factor") or ()),
            "long_factors": tuple(values.get("long_factor") or ()),
        }
    else:
        derived = _yarn_attention_factor(factor, values.get("mscale"), values.get("mscale_all_dim"))
        of_kind = {
            "beta_fast": values.get("beta_fast", 32.0),
            "beta_slow": values.get("beta_slow", 1.0),
            "truncate": values.get("truncate", True),
        }
    return {"factor": factor, "attention_factor": derived if given is None else float(given), **of_kind}


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the factor on cosines and sines, as in the paper or as DeepSeek has it."""
    if factor <= 1:
        return 1.0
    if mscale and mscale_all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def _check(rope: RopeConfig) -> None:
    if rope.kind == "longrope":
        for name in ("short_factors", "long_factors"):
            count = len(getattr(rope, name))
            if count != rope.rotary_dim // 2:
                raise ModelError(
                    f"longrope has {count} {name}; it needs {rope.rotary_dim // 2}, one per frequency"
                )
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ModelError(
            f"config.json has low_freq_factor {rope.low_freq_factor} and high_freq_factor "
            f"{rope.high_freq_factor}; the first must be the lower one"
        )
    if rope.kind == "yarn" and rope.theta <= 1:
        raise ModelError(f"config.json has rope_theta {rope.theta}; rope type yarn needs one above 1")
