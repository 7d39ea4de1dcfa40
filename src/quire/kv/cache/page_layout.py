"""Where in a page of the KV cache each layer's keys and values lie, in bytes.

A page (the scheduler calls it a block) is one contiguous span: layer after layer, of each layer the keys and
then the values, of these head after head, and of a head the numbers of its tokens and then their scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from quire.kv.cache.plain_data import plain_number

NUMBER_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of a number, by the name of its type."""

CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4", "float8_e4m3fn")
"""Types that keys and values can be held as without a quantizer of one's own."""

FEATURE_MULTIPLES = {"int8": 4, "int4": 8}
"""Of these types, what the sizes of heads are multiples of: scales, in float32, lie behind the numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """What one layer keeps of each token.

    Args:
        num_kv_heads: heads of keys and values.
        key_head_dim: features of one head of keys.
        value_head_dim: features of one head of values; 0: a head's key is its value, too, and kept once.
        window: tokens that the layer sees, itself included; 0: all.
    """

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    window: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain_number(getattr(self, field.name)))


@dataclasses.dataclass(frozen=True, slots=True)
class VectorFormat:
    """How the key or the value of one token and head is held.

    Args:
        dtype: type of the numbers.
        num_numbers: how many there are.
        scale_dtype: type of the scales; empty: there are none.
        scale_shape: shape of a vector's scales, () for a single one.
    """

    dtype: str
    num_numbers: int
    scale_dtype: str = ""
    scale_shape: tuple[int, ...] = ()

    @property
    def number_bytes(self) -> int:
        """Bytes of the numbers."""
        return self.num_numbers * NUMBER_BYTES[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        if not self.scale_dtype:
            return 0
        size = NUMBER_BYTES[self.scale_dtype]
        for length in self.scale_shape:
            size *= length
        return size

    @property
    def alignment(self) -> int:
        """Alignment of the vector's parts, in bytes."""
        return max(NUMBER_BYTES[self.dtype], NUMBER_BYTES.get(self.scale_dtype, 1))


def cache_format(dtype: str, head_dim: int) -> VectorFormat:
    """Return how a cache of `dtype` holds a vector: int8 and int4 with a scale, the others without."""
    if dtype == "int4":
        return VectorFormat("uint8", head_dim // 2, "float32")
    return VectorFormat(dtype, head_dim, "float32" if dtype == "int8" else "")


@dataclasses.dataclass(frozen=True, slots=True)
class HeadsLayout:
    """Where a layer's keys, or its values, lie in a page."""

    format: VectorFormat
    num_heads: int
    offset: int  # bytes from the page's start to the first head
    scales_offset: int  # bytes from a head's start to its scales
    head_bytes: int  # from one head to the next


@dataclasses.dataclass(frozen=True, slots=True)
class LayerLayout:
    """Where one layer lies in a page; its values may be its keys."""

    keys: HeadsLayout
    values: HeadsLayout

    @property
    def parts(self) -> tuple[HeadsLayout, ...]:
        """Keys and values, or what is both."""
        return (self.keys,) if self.values == self.keys else (self.keys, self.values)


@dataclasses.dataclass(frozen=True, slots=True)
class PageLayout:
    """What lies where in a page: a `LayerLayout` for each layer that has keys and values, None for others."""

    page_size: int  # tokens
    layers: tuple[LayerLayout | None, ...]
    bytes_per_page: int

    @classmethod
    def of(
        cls, layers: Sequence[KVLayerSpec | None], page_size: int, format_of: Callable[[int], VectorFormat]
    ) -> PageLayout:
        """Lay out pages of `page_size` tokens.

        Args:
            layers: what each layer keeps; None: nothing.
            page_size: in tokens.
            format_of: the format of a vector, by its number of features.
        """
        placed: list[LayerLayout | None] = []
        end = 0
        alignment = 1
        for spec in layers:
            if spec is None:
                placed.append(None)
                continue
            keys = _place(end, spec.num_kv_heads, format_of(spec.key_head_dim), page_size)
            values = keys
            if spec.value_head_dim:
                values = _place(_end(keys), spec.num_kv_heads, format_of(spec.value_head_dim), page_size)
            end = _end(values)
            alignment = max(alignment, keys.format.alignment, values.format.alignment)
            placed.append(LayerLayout(keys, values))
        return cls(page_size, tuple(placed), _aligned(end, alignment))

    @property
    def layer_ends(self) -> tuple[int, ...]:
        """Bytes from a page's start to the end of each layer."""
        ends: list[int] = []
        for layer in self.layers:
            ends.append(_end(layer.values) if layer is not None else ends[-1] if ends else 0)
        return tuple(ends)


def _place(start: int, num_heads: int, vector: VectorFormat, page_size: int) -> HeadsLayout:
    scales = page_size * vector.number_bytes
    if vector.scale_dtype:
        scales = _aligned(scales, NUMBER_BYTES[vector.scale_dtype])
    head_bytes = _aligned(scales + page_size * vector.scale_bytes, vector.alignment)
    return HeadsLayout(vector, num_heads, _aligned(start, vector.alignment), scales, head_bytes)


def _end(heads: HeadsLayout) -> int:
    return heads.offset + heads.num_heads * heads.head_bytes


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
