"""A layer's cache as the Triton kernels know it."""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from quire.errors import ConfigError
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.kv_quantizers import ConvertingQuantizer, Float8PageQuantizer, Int8PageQuantizer
from quire.kernels.triton.attention.items import feature_parts
from quire.kernels.triton.tensors import FLOAT_TYPES

_NAME = "triton"  # among a layer's handles
LATENT_HEADS = 16  # that a tile of latents has room for, with one token
_EXACT_IN_HALVES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)  # all their numbers are
PAGE_TYPES = (*FLOAT_TYPES, *_EXACT_IN_HALVES)


Strided = tuple[torch.Tensor | None, int, int, int]  # a tensor, and its strides of head, page and place


@dataclasses.dataclass(slots=True, frozen=True)
class TritonLayer:
    """A layer's cache as arguments of kernels."""

    num_kv_heads: int
    num_pages: int
    page_size: int
    head_dim: int
    dtype: torch.dtype
    keys: Strided
    key_scales: Strided
    values: torch.Tensor  # with the strides of keys
    value_scales: torch.Tensor | None

    @property
    def keys_are_values(self) -> bool:
        """Whether there are no values beside keys."""
        return self.values is self.keys[0]

    @property
    def has_scales(self) -> bool:
        """Whether numbers are to be multiplied by scales."""
        return self.key_scales[0] is not None

    def product_type(self, query_type: torch.dtype) -> tl.dtype:
        """Return the type that keys, values and queries are multiplied in; sums are float32."""
        is_exact = self.dtype in (query_type, *_EXACT_IN_HALVES)
        return FLOAT_TYPES[query_type if is_exact else torch.float32]


def triton_layer(kv: KVLayer) -> TritonLayer:
    """Return what the kernels know of a layer, made once.

    Raises:
        ConfigError: only the layer's quantizer knows what its numbers mean, or pages are of a type that the
            kernels do not have.
        ValueError: the features of a head are not adjacent; keys, values and scales differ in shape; or
            keys and values, or their scales, differ in strides.
    """
    layer: TritonLayer | None = kv.handles.get(_NAME)
    if layer is None:
        layer = kv.handles[_NAME] = _layer(kv)
    return layer


def with_groups(layer: TritonLayer, num_heads: int) -> TritonLayer:
    """Return a layer of latents as several KV heads, all the same, if a tile has not room for its heads.

    Their programs read the latents again.
    """
    least = -(-num_heads // LATENT_HEADS)
    if layer.num_kv_heads > 1 or least < 2 or not feature_parts(layer.head_dim)[1]:
        return layer
    parts = next(parts for parts in range(least, num_heads + 1) if num_heads % parts == 0)
    keys, _, page, place = layer.keys
    scales, _, scale_page, scale_place = layer.key_scales
    return dataclasses.replace(
        layer,
        num_kv_heads=parts,
        keys=(keys, 0, page, place),
        key_scales=(scales, 0, scale_page, scale_place),
    )


def _layer(kv: KVLayer) -> TritonLayer:
    _check_quantizer(kv)
    keys, values = kv.key_pages, kv.value_pages
    for name, pages in (("keys", keys), ("values", values)):
        if pages.dtype != keys.dtype or pages.dtype not in PAGE_TYPES:
            types = ", ".join(str(dtype).removeprefix("torch.") for dtype in PAGE_TYPES)
            raise ConfigError(
                f"the KV cache's {name} are {pages.dtype}; the Triton kernels read pages of one of {types}; "
                "make the cache with one of these, or set EngineConfig.kernels to 'reference'"
            )
        if pages.dim() != 4 or pages.stride(-1) != 1 or not _are_alike(pages, keys):
            raise ValueError(
                f"the {name} are {list(pages.shape)} with strides {pages.stride()}; they must be [KV heads, "
                f"pages, tokens, features] as the keys, {list(keys.shape)} with strides {keys.stride()}, and "
                "a head's features adjacent"
            )
    for name, scales in (("keys", kv.key_scales), ("values", kv.value_scales)):
        if scales is None:
            continue
        if scales.dtype != torch.float32 or scales.shape != keys.shape[:3]:
            raise ValueError(
                f"the scales of {name} are {scales.dtype} {list(scales.shape)}; they must be float32 "
                f"{list(keys.shape[:3])}"
            )
        if kv.key_scales is not None and not _are_alike(scales, kv.key_scales):
            raise ValueError(
                f"the scales of {name} have strides {scales.stride()}; they must be those of the keys', "
                f"{kv.key_scales.stride()}"
            )
    num_kv_heads, num_pages, page_size, head_dim = keys.shape
    return TritonLayer(
        num_kv_heads,
        num_pages,
        page_size,
        head_dim,
        keys.dtype,
        _strided(keys),
        _strided(kv.key_scales),
        values,
        kv.value_scales,
    )


def _are_alike(part: torch.Tensor, other: torch.Tensor) -> bool:
    return part.shape == other.shape and part.stride() == other.stride()


def _strided(part: torch.Tensor | None) -> Strided:
    if part is None:
        return None, 0, 0, 0
    head, page, place = part.stride()[:3]
    return part, head, page, place


def _check_quantizer(kv: KVLayer) -> None:
    kind = type(kv.quantizer)
    has_scales = kind is Int8PageQuantizer
    if kv.quantizer is not None and not has_scales and kind not in (ConvertingQuantizer, Float8PageQuantizer):
        raise ConfigError(
            f"the KV cache's quantizer is {kind.__module__}.{kind.__qualname__}, and its dequantize is no "
            "Triton kernel; give a function that makes numbers which only have to be converted (such as "
            "float8), or dtype int8, or set EngineConfig.kernels to 'reference'"
        )
    if has_scales in (kv.key_scales is None, kv.value_scales is None):
        raise ValueError(
            f"the quantizer {kind.__qualname__} {'needs' if has_scales else 'has no'} scales of keys and "
            f"values; there are{' none of one' if has_scales else ' some'}"
        )
