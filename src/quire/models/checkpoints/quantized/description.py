"""What `quantization_config` in a config.json says, and which methods Quire supports. Needs no torch.

Only what applies to the whole checkpoint is read: which matrices are quantized, to how many bits and in which
groups is visible in the stored tensors themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.models.config_entries import check_quantization

METHODS = ("compressed-tensors", "gptq", "awq")
_PACKED_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_BITS = (4, 8)
MAX_GROUP = 128  # inputs that share a scale in memory; longer groups are cut


@dataclasses.dataclass(slots=True, frozen=True)
class StoredQuantization:
    """What most matrices become in memory: none (floating point), int8, or groups: int4, grouped_int8."""

    kind: str = "none"
    group_size: int = MAX_GROUP


def describe_quantization(values: Mapping[str, Any]) -> StoredQuantization:
    """Return what `quantization_config` means for the memory that weights take; {}: they are not quantized.

    Raises:
        ModelError: it describes weights that Quire does not read.
    """
    if not values:
        return StoredQuantization()
    method = values.get("quant_method")
    checks = {"compressed-tensors": _check_compressed_tensors, "gptq": _check_gptq, "awq": _check_awq}
    if not isinstance(method, str) or method not in checks:
        raise ModelError(
            f"quantization_config.quant_method in config.json is {method!r:.100}, which Quire does not "
            f"support; it supports {', '.join(METHODS)} and GGUF, and quantizes the original weights itself "
            "(EngineConfig.quantization)"
        )
    check_quantization(values)
    checks[method](values)
    bits, group_size = _main_group(values) if method == "compressed-tensors" else _bits_and_group(values)
    if bits == 8 and group_size <= 0:
        return StoredQuantization("int8")
    kind = "int4" if bits == 4 else "grouped_int8"
    return StoredQuantization(kind, min(group_size if group_size > 0 else MAX_GROUP, MAX_GROUP))


def _main_group(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return bits and group size (0: rows) of the first group of matrices."""
    weights = _groups(values)[0].get("weights") or {}
    is_grouped = weights.get("strategy") == "group"
    return weights.get("num_bits") or 8, (weights.get("group_size") or 0) if is_grouped else 0


def _groups(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [group or {} for group in values["config_groups"].values()]


def _bits_and_group(values: Mapping[str, Any]) -> tuple[int, int]:
    return _bits(values), values.get("group_size") or values.get("q_group_size") or 0


def _check_compressed_tensors(values: Mapping[str, Any]) -> None:
    for name, what in (
        ("kv_cache_scheme", "a quantized KV cache"),
        ("transform_config", "weights that need transforms of the hidden states"),
    ):
        if values.get(name):
            raise _refusal("compressed-tensors", f"describe {what} ({name})", "weights without")
    sparsity = (values.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise _refusal("compressed-tensors", f"are sparse ({sparsity})", "dense weights")
    if not values.get("config_groups"):
        raise _refusal("compressed-tensors", "do not say how (config_groups)", "config_groups with weights")
    for group in _groups(values):
        form = group.get("format") or values.get("format")
        if form not in _PACKED_FORMATS:
            raise _refusal("compressed-tensors", f"have the format {form}", ", ".join(_PACKED_FORMATS[:3]))
        weights = group.get("weights") or {}
        kind = (weights.get("type") or "int", weights.get("num_bits") or 8)
        if kind[0] != "int" or kind[1] not in _BITS:
            raise _refusal("compressed-tensors", f"are {kind[0]} of {kind[1]} bits", "int of 4 or 8 bits")
        if weights.get("strategy") == "block":
            raise _refusal("compressed-tensors", "have a scale for each block", "tensor, channel, group")


def _check_gptq(values: Mapping[str, Any]) -> None:
    form = values.get("checkpoint_format") or "gptq"
    if form not in _GPTQ_FORMATS or values.get("is_marlin_format"):
        raise _refusal("GPTQ", f"have the checkpoint_format {form}", ", ".join(_GPTQ_FORMATS))
    _check_bits("GPTQ", values, _BITS)


def _check_awq(values: Mapping[str, Any]) -> None:
    version = (values.get("version") or "gemm").lower()
    if version != "gemm":
        raise _refusal("AWQ", f"have the version {version}", "gemm")
    if values.get("zero_point") is False:
        raise _refusal("AWQ", "have no zero points", "zero_point true")
    _check_bits("AWQ", values, (4,))


def _check_bits(method: str, values: Mapping[str, Any], known: tuple[int, ...]) -> None:
    bits = _bits(values)
    if bits not in known:
        raise _refusal(method, f"have {bits} bits", " or ".join(map(str, known)))


def _bits(values: Mapping[str, Any]) -> int:
    return values.get("bits") or values.get("w_bit") or 0


def _refusal(method: str, what: str, known: str) -> ModelError:
    return ModelError(
        f"the weights are quantized by {method} and {what}, which Quire does not support; supported: {known}"
    )
