"""Parses `quantization_config` in a config.json; the supported methods. Needs no torch.

Only what applies to the whole checkpoint is read: which matrices are quantized, to how many bits and in which
groups is visible in the stored tensors themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ModelError
from quire.kernels.bounds import FLOAT8_INPUTS, MXFP4_GROUP, kernel_group
from quire.models.config_entries import check_quantization

METHODS = ("compressed-tensors", "fp8", "gptq", "awq", "mxfp4", "bitsandbytes")
_FLOAT4_FORMATS = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}  # and inputs that share a scale
_FORMATS = (
    *("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", *_FLOAT4_FORMATS),
    "mixed-precision",
)
_PACKED_FORMAT = "pack-quantized"
_PLAIN_FORMATS = ("int-quantized", "naive-quantized")  # an int8 for each weight, regardless of its bits
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_BITS = (4, 8)
_KINDS = (("int", 4), ("int", 8), ("float", 8), ("float", 4))
MAX_GROUP = 128  # inputs that share a scale in memory; longer groups are cut

Block = tuple[int, int]


@dataclasses.dataclass(slots=True, frozen=True)
class StoredQuantization:
    """The memory format of most matrices.

    Args:
        kind: none (floating point), int8, or groups: int4, int6, grouped_int8, mxfp4; where kernels have
            float8, fp8 (a scale for each row) or fp8_blocks.
        group_size: inputs that share a scale, of groups and blocks.
    """

    kind: str = "none"
    group_size: int = MAX_GROUP


IN_MXFP4 = StoredQuantization("mxfp4", MXFP4_GROUP)


def describe_quantization(values: Mapping[str, Any]) -> StoredQuantization:
    """Return the memory format described by `quantization_config`; {}: not quantized.

    Raises:
        ModelError: it describes weights that Quire does not support.
    """
    if not values:
        return StoredQuantization()
    method = values.get("quant_method")
    checks = {
        "compressed-tensors": _check_compressed_tensors,
        "fp8": _check_fp8,
        "gptq": _check_gptq,
        "awq": _check_awq,
    }
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"quantization_config.quant_method in config.json is {method!r:.100}, which Quire does not "
            f"support; it supports {', '.join(METHODS)} and GGUF, and quantizes the original weights itself "
            "(EngineConfig.quantization)"
        )
    check_quantization(values)
    if method in checks:
        checks[method](values)
    if method == "compressed-tensors":
        # Regular expressions assign matrices to groups; none takes more memory than the widest.
        return max(map(_of_group, _groups(values)), key=_width, default=StoredQuantization())
    if method == "fp8":
        return in_float8(values.get("weight_block_size"))
    if method == "mxfp4":
        return IN_MXFP4
    if method == "bitsandbytes":  # 4 bits become floats
        return StoredQuantization("int8" if values.get("load_in_8bit") else "none")
    size = values.get("group_size") or values.get("q_group_size") or 0
    return in_groups(_bits(values), size, has_zeros=values.get("sym") is False)


def float8_blocks(values: Mapping[str, Any]) -> tuple[Block | None, ...]:
    """Return the rows and inputs that share a scale in float8, None for a row or the matrix, of any matrix.

    Args:
        values: a `quantization_config` that `describe_quantization` accepts.
    """
    if values.get("quant_method") == "compressed-tensors":
        blocks = [_block_structure(group.weights) for group in _groups(values) if group.is_float8]
    else:
        blocks = [values.get("weight_block_size")]
    return tuple({None if block is None else (block[0], block[1]): True for block in blocks})


def block_of(blocks: Sequence[Block | None], scales: Sequence[int], num_rows: int) -> Block | None:
    """Return the rows and inputs that share a scale in a matrix of float8; None: a row or the matrix has one.

    Args:
        blocks: blocks of the checkpoint, see `float8_blocks`.
        scales: the shape of the matrix's scales.
        num_rows: number of rows of the matrix.
    """
    count = math.prod(scales)
    by_row = count == 1 or (count == num_rows == scales[0])
    return next((block for block in blocks if (block is None) == by_row), next(iter(blocks), None))


def has_float4(values: Mapping[str, Any]) -> bool:
    """Return whether compressed-tensors' groups have matrices of 4-bit floats.

    Args:
        values: a `quantization_config` that `describe_quantization` accepts.
    """
    return any(group.form in _FLOAT4_FORMATS for group in _groups(values))


def promised_parts(values: Mapping[str, Any], *, is_packed: bool = True) -> tuple[str, ...]:
    """Return the optional tensors, by the last part of their names, that all matrices have.

    Without them, a matrix would be read as if it were symmetric, or as if its groups were runs of inputs.

    Args:
        values: a `quantization_config` that `describe_quantization` accepts.
        is_packed: of compressed-tensors' matrices, those in the format pack-quantized; else those in others.
    """
    if values.get("quant_method") == "gptq":
        has_groups = (values.get("group_size") or 0) > 0
        is_in_runs = not values.get("desc_act") or values.get("static_groups")
        return ("g_idx",) if has_groups and not is_in_runs else ()
    if values.get("quant_method") != "compressed-tensors":
        return ()
    groups = [group for group in _groups(values) if is_packed == (group.form == _PACKED_FORMAT)]
    return tuple(
        name
        for name, is_promised in (
            ("weight_zero_point", all(group.has_zeros for group in groups)),
            ("weight_g_idx", is_packed and all(group.has_order for group in groups)),
        )
        if groups and is_promised
    )


def in_float8(block: Sequence[int] | None) -> StoredQuantization:
    """Return the memory format of float8 with scales per `block` (rows, inputs), if any."""
    if block is None:
        return StoredQuantization("fp8")
    return StoredQuantization("fp8_blocks", math.gcd(block[1], MAX_GROUP))


def in_groups(bits: int, group_size: int, *, has_zeros: bool) -> StoredQuantization:
    """Return the memory format of `bits`-bit numbers in groups of `group_size` inputs (<= 0: rows)."""
    if bits == 8 and group_size <= 0 and not has_zeros:
        return StoredQuantization("int8")
    size = kernel_group(group_size) if group_size > 0 else MAX_GROUP
    return StoredQuantization("int4" if bits == 4 else "grouped_int8", size) if size else StoredQuantization()


def in_float4(group_size: int) -> StoredQuantization:
    """Return the memory format of 4-bit floats in groups of 32 inputs (MXFP4) or 16 (NVFP4)."""
    return IN_MXFP4 if group_size == MXFP4_GROUP else StoredQuantization("grouped_int8", group_size)


@dataclasses.dataclass(slots=True, frozen=True)
class _Group:
    """A group of matrices of compressed-tensors: its format, and the entries of `weights`."""

    form: str | None
    weights: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return self.weights.get("type") or "int"

    @property
    def bits(self) -> int:
        return self.weights.get("num_bits") or 8

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; 0: there are no groups."""
        size = self.weights.get("group_size") or 0
        strategy = self.weights.get("strategy") or ("group" if size > 0 else "channel")
        return size if strategy == "group" else 0

    @property
    def is_float8(self) -> bool:
        return self.kind == "float" and self.form not in _FLOAT4_FORMATS

    @property
    def has_zeros(self) -> bool:
        return self.kind == "int" and self.weights.get("symmetric") is False

    @property
    def has_order(self) -> bool:
        """Whether groups are not contiguous inputs, as they are in the orders "weight" and "static"."""
        order = self.weights.get("actorder")
        return self.group_size > 0 and (order is True or str(order).lower() in ("group", "dynamic"))


def _groups(values: Mapping[str, Any]) -> list[_Group]:
    """Return the groups whose weights are quantized; the others quantize activations only."""
    return [
        _Group(group.get("format") or values.get("format"), group["weights"])
        for group in values["config_groups"].values()
        if group and group.get("weights") is not None
    ]


def _of_group(group: _Group) -> StoredQuantization:
    if group.form in _FLOAT4_FORMATS:
        return in_float4(_FLOAT4_FORMATS[group.form])
    if group.kind == "float":
        return in_float8(_block_structure(group.weights))
    bits = 8 if group.form in _PLAIN_FORMATS else group.bits
    return in_groups(bits, group.group_size, has_zeros=group.has_zeros)


def _width(stored: StoredQuantization) -> tuple[int, int]:
    """Return a sort key by memory use: a CPU holds float8 as floats."""
    return ("mxfp4", "int4", "int6", "int8", "grouped_int8", "fp8_blocks", "fp8", "none").index(
        stored.kind
    ), -stored.group_size


def _block_structure(weights: Mapping[str, Any]) -> list[int] | None:
    return weights.get("block_structure") if weights.get("strategy") == "block" else None


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
        _check_group(group)
    blocks = [block for block in float8_blocks(values) if block is not None]
    if len(blocks) > 1:  # a matrix's block size would have to be guessed from its scales
        shown = " and ".join(map(str, map(list, blocks)))
        raise _refusal("compressed-tensors", f"have blocks of {shown} (block_structure)", "one size of them")


def _check_group(group: _Group) -> None:
    if group.form not in _FORMATS:
        raise _refusal("compressed-tensors", f"have the format {group.form}", ", ".join(_FORMATS[:-1]))
    is_float4 = group.form in _FLOAT4_FORMATS
    if (group.kind, group.bits) not in _KINDS or is_float4 != ((group.kind, group.bits) == ("float", 4)):
        raise _refusal(
            "compressed-tensors",
            f"are {group.kind} of {group.bits} bits",
            f"int of 4 or 8 bits, float of 8, and of 4 in {' and '.join(_FLOAT4_FORMATS)}",
        )
    if is_float4:
        return
    strategy = group.weights.get("strategy") or "tensor"
    if group.kind == "float" and strategy not in ("tensor", "channel", "block"):
        raise _refusal("compressed-tensors", f"are float8 by {strategy}", "tensor, channel, block")
    if group.kind == "int" and strategy == "block":
        raise _refusal("compressed-tensors", "have a scale for each block", "tensor, channel, group")
    if strategy == "block":
        _check_block("compressed-tensors", "block_structure", group.weights.get("block_structure"))


def _check_fp8(values: Mapping[str, Any]) -> None:
    form = values.get("fmt") or "e4m3"
    if form != "e4m3":
        raise _refusal("fp8", f"have the format {form} (fmt)", "e4m3")
    if values.get("kv_cache_scheme"):
        raise _refusal("fp8", "describe a quantized KV cache (kv_cache_scheme)", "weights without")
    if values.get("weight_block_size") is not None:
        _check_block("fp8", "weight_block_size", values["weight_block_size"])


def _check_block(method: str, name: str, block: list[int] | None) -> None:
    if block is None or len(block) != 2 or block[1] % FLOAT8_INPUTS:
        raise _refusal(
            method,
            f"have the {name} {block}",
            f"rows and inputs, the latter a multiple of {FLOAT8_INPUTS}",
        )


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
