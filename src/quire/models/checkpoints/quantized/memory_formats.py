"""Memory formats of a checkpoint's matrices, by its tensors. Nothing here needs torch."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.models.checkpoints.quantized.description import (
    IN_MXFP4,
    StoredQuantization,
    block_of,
    float8_blocks,
    in_float4,
    in_float8,
    in_groups,
)
from quire.models.config import ModelConfig
from quire.models.weights import WeightSource, WeightSpec, part_name, weight_specs


class TensorHeader(NamedTuple):
    """A tensor in a file: its name there, its type as safetensors calls it, and its shape."""

    file: Path
    stored_name: str
    dtype: str
    shape: Sequence[int]


Headers = Mapping[str, TensorHeader]
"""By the tensors' names, see `published_name`."""

FLOATS = StoredQuantization()
_IN_GROUPS = ("int4", "int6", "grouped_int8", "mxfp4")
_FLOAT8 = ("fp8", "fp8_blocks")
_PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    *("qweight", "scales", "blocks"),
)


def with_stored_tensors(config: ModelConfig, values: Mapping[str, Any], headers: Headers) -> ModelConfig:
    """Return `config` with the memory formats of its matrices.

    Args:
        config: the model's, with the format that its `quantization_config` describes.
        values: the `quantization_config`, which `describe_quantization` accepts.
        headers: of the checkpoint's files. What is missing there, or does not have the shape that it should,
            becomes what most matrices do; loading tells what is wrong.
    """
    most = StoredQuantization(config.stored_quantization, config.stored_group_size)
    return with_kinds(
        config,
        lambda source: _of_matrix(source, values, headers, most),
    )


def stored_names(config: ModelConfig) -> set[str]:
    """Return the names that tensors have in which the matrices are stored, however they are."""
    sources = (source for spec in matrix_specs(config) for source in spec.sources)
    return set().union(*(tensor_names(source.name) for source in sources))


def tensor_names(name: str) -> set[str]:
    """Return the names that tensors have in which the matrix `name` is stored, however it is."""
    stem = name.removesuffix(".weight")
    return {f"{stem}.{last}" for last in _PARTS}


def matrix_specs(config: ModelConfig) -> list[WeightSpec]:
    """Return the tensors of a decoder that may be quantized in a checkpoint."""
    return [
        spec for spec in weight_specs(config) if spec.is_quantized or spec.field in ("embedding", "output")
    ]


def with_kinds(config: ModelConfig, kind_of: Callable[[WeightSource], StoredQuantization]) -> ModelConfig:
    """Return `config` with the memory formats of its matrices, and of their parts where these differ."""
    found: dict[tuple[int, str], StoredQuantization] = {}
    of_parts: dict[tuple[int, str], StoredQuantization] = {}
    for spec in matrix_specs(config):
        parts = [kind_of(source) for source in spec.sources]
        found[spec.layer, spec.field] = joined = _joined(parts)
        if joined.kind in _IN_GROUPS and len(set(parts)) > 1:
            of_parts |= {
                (spec.layer, part_name(spec.field, number)): part for number, part in enumerate(parts)
            }
    quantized = collections.Counter(
        kind for (layer, _), kind in found.items() if layer >= 0 and kind != FLOATS
    )
    # A model is called quantized also if the smaller part of it is.
    main = quantized.most_common(1)[0][0] if quantized else FLOATS
    otherwise = of_parts | {
        (layer, field): stored
        for (layer, field), stored in found.items()
        if stored != (main if layer >= 0 else FLOATS)
    }
    return dataclasses.replace(
        config,
        stored_quantization=main.kind,
        stored_group_size=main.group_size,
        stored_otherwise=tuple(
            (layer, field, stored.kind, stored.group_size) for (layer, field), stored in otherwise.items()
        ),
    )


def _joined(parts: Sequence[StoredQuantization]) -> StoredQuantization:
    """Return the memory format of a matrix joined from parts, which may differ in kind."""
    if len(set(parts)) == 1:
        return parts[0]
    kinds = {part.kind for part in parts}
    if kinds.issubset(_IN_GROUPS):
        kind = kinds.pop() if kinds in ({"int4"}, {"int6"}) else "grouped_int8"
        return StoredQuantization(kind, min(part.group_size for part in parts))
    if kinds.issubset(_FLOAT8):
        return StoredQuantization("fp8_blocks", math.gcd(*(part.group_size for part in parts)))
    return FLOATS


def _of_matrix(
    source: WeightSource, values: Mapping[str, Any], headers: Headers, otherwise: StoredQuantization
) -> StoredQuantization:
    stem = _stem(source)
    parts = {last: headers[f"{stem}.{last}"] for last in _PARTS if f"{stem}.{last}" in headers}
    dtype = parts["weight"].dtype if "weight" in parts else ""
    try:
        if "qweight" in parts or "blocks" in parts:
            return IN_MXFP4 if "blocks" in parts else _transposed(parts, values, source)
        if "weight_packed" in parts:
            return _packed(parts, source)
        if dtype == "I8":
            return _in_equal_groups(8, parts, source)
        if dtype == "F8_E4M3":
            return _in_blocks(parts, float8_blocks(values), source)
    except (LookupError, ArithmeticError):
        dtype = ""
    return FLOATS if dtype else otherwise


def _transposed(parts: Headers, values: Mapping[str, Any], source: WeightSource) -> StoredQuantization:
    """Return the memory format of a matrix of GPTQ or AWQ, which always has zero points."""
    bits = 4 if values.get("quant_method") == "awq" else _packed_bits(parts["qweight"].shape[0], source)
    group_size = _group_size(parts["scales"].shape[0], source)
    return in_groups(bits, group_size, has_zeros=values.get("sym") is False)


def _packed(parts: Headers, source: WeightSource) -> StoredQuantization:
    packed = parts["weight_packed"]
    if packed.dtype == "U8":  # floats of 4 bits
        return in_float4(source.shape[1] // parts["weight_scale"].shape[1])
    return _in_equal_groups(_packed_bits(packed.shape[1], source), parts, source)


def _in_equal_groups(bits: int, parts: Headers, source: WeightSource) -> StoredQuantization:
    """Return the memory format of integers with scales [], [1], [rows, 1] or [rows, groups]."""
    scales = parts["weight_scale"].shape
    groups = scales[1] if len(scales) > 1 else 1
    return in_groups(bits, _group_size(groups, source), has_zeros="weight_zero_point" in parts)


def _in_blocks(
    parts: Headers, blocks: Sequence[tuple[int, int] | None], source: WeightSource
) -> StoredQuantization:
    scales = (parts.get("weight_scale_inv") or parts["weight_scale"]).shape
    return in_float8(block_of(blocks, scales, source.shape[0]))


def _stem(source: WeightSource) -> str:
    return source.name.removesuffix(".weight")


def _packed_bits(num_words: int, source: WeightSource) -> int:
    return 8 if num_words * 4 >= source.shape[1] else 4


def _group_size(groups: int, source: WeightSource) -> int:
    """Return how many inputs share a scale; 0: all of a row."""
    return 0 if groups == 1 else source.shape[1] // groups
