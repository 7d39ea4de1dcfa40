"""The memory of a paged KV cache, and tensors over the parts of its pages."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from quire.kernels.attention.kv_quantizers import BUILT_IN_QUANTIZERS, ConvertingQuantizer, PageQuantizer
from quire.kernels.devices.device import HOST
from quire.kernels.devices.memory import PAGE, map_large_pages
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.page_layout import NUMBER_BYTES, HeadsLayout, PageLayout, VectorFormat


class PageMemory:
    """The pages of one device, one after the other. Only the first is initialized, with zeros.

    Attention may read that one, `NULL_BLOCK`, beside keys that count.

    `tensor` is the same memory, page by page, as `PagedAttentionCache` describes it.

    Args:
        metadata: metadata of the cache.
        quantizer: makes the pages' numbers; None: keys and values are rounded to `metadata.dtype`.
        memory: bytes that there are already [N], at least those of all pages; None: memory of its own.
        device: where its own memory is.

    Raises:
        ValueError: what the quantizer makes cannot be held in pages; says why.
    """

    def __init__(
        self,
        metadata: PagedAttentionCacheMetaData,
        quantizer: PageQuantizer | None,
        memory: torch.Tensor | None = None,
        *,
        device: torch.device = HOST,
    ) -> None:
        has_own_format = quantizer is not None and type(quantizer) not in BUILT_IN_QUANTIZERS.values()
        self.layout = layout_of(metadata, quantizer)
        self._num_pages = metadata.num_pages_per_layer
        num_bytes = self._num_pages * self.layout.bytes_per_page
        if memory is None:
            memory = allocate(num_bytes, device)
            if device != HOST:  # whose memory begins as zeros
                memory[: self.layout.bytes_per_page] = 0
        self._bytes = memory[:num_bytes]
        first = self.layout.layers[0]
        if first is not None and not has_own_format and metadata.has_equal_layers:
            self.tensor = self._by_layer(first.keys)
        else:
            self.tensor = self._bytes.view(self._num_pages, self.layout.bytes_per_page)

    def numbers(self, heads: HeadsLayout) -> torch.Tensor:
        """Return the numbers of a layer's keys or values, (heads, pages, page_size, numbers of a vector)."""
        return self._part(heads, heads.format.dtype, (heads.format.num_numbers,), heads.offset)

    def scales(self, heads: HeadsLayout) -> torch.Tensor | None:
        """Return the scales of a layer's keys or values, (heads, pages, page_size, ...), if it has any."""
        vector = heads.format
        if not vector.scale_dtype:
            return None
        return self._part(heads, vector.scale_dtype, vector.scale_shape, heads.offset + heads.scales_offset)

    def _part(
        self, heads: HeadsLayout, dtype: str, vector_shape: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        size = NUMBER_BYTES[dtype]
        shape = heads.num_heads, self._num_pages, self.layout.page_size, *vector_shape
        strides = [heads.head_bytes // size, self.layout.bytes_per_page // size, math.prod(vector_shape)]
        strides += [math.prod(vector_shape[place:]) for place in range(1, len(vector_shape) + 1)]
        numbers = self._bytes.view(getattr(torch, dtype))
        return numbers.as_strided(shape, strides, numbers.storage_offset() + offset // size)

    def _by_layer(self, heads: HeadsLayout) -> torch.Tensor:
        """Return [pages, layers, 2, heads, page_size, head_dim]; with scales the last two are one."""
        shape = [self._num_pages, len(self.layout.layers), 2, heads.num_heads]
        vector = heads.format
        if vector.scale_dtype:
            return self._bytes.view(torch.int8).view(*shape, heads.head_bytes)
        return self._bytes.view(getattr(torch, vector.dtype)).view(
            *shape, self.layout.page_size, vector.num_numbers
        )


def group_starts(groups: Sequence[PagedAttentionCacheMetaData]) -> list[int]:
    """Return where the cache of each cache group begins in memory that they share, and the end of all.

    In bytes, [G + 1]; no two groups share a large page of the host.
    """
    sizes = (-(-each.num_pages_per_layer * each.bytes_per_block // PAGE) * PAGE for each in groups)
    return list(itertools.accumulate(sizes, initial=0))


def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return at least `num_bytes` of a device's memory; the host's is taken up as it is written to."""
    if device == HOST:
        return map_large_pages(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def layout_of(metadata: PagedAttentionCacheMetaData, quantizer: PageQuantizer | None) -> PageLayout:
    """Return what lies where in a page whose numbers `quantizer` makes."""
    return metadata.page_layout(None if quantizer is None else functools.partial(_format, quantizer))


def page_quantizer(dtype: str, quantizer: object | None) -> PageQuantizer | None:
    """Return what makes the numbers of a cache's pages.

    Args:
        dtype: the cache's type; int8 and float8_e4m3fn have quantizers of their own.
        quantizer: an object with `quantize` and `dequantize` (see `PageQuantizer`), or a function that
            returns states [..., head_dim] as numbers [..., n] that need only be converted back; None: what
            `dtype` asks for.

    Raises:
        ValueError: it is none of these.
    """
    if quantizer is None:
        built_in = BUILT_IN_QUANTIZERS.get(dtype)
        return None if built_in is None else built_in()
    if isinstance(quantizer, PageQuantizer):
        return quantizer
    if callable(quantizer):
        return ConvertingQuantizer(quantizer)
    raise ValueError(
        f"quantizer is {quantizer!r}; it must have quantize() and dequantize(), or be a function of keys or "
        "values"
    )


def quantizer_name(quantizer: PageQuantizer | None) -> str | None:
    """Return a quantizer's name in a saved cache: its cache's type, or its class."""
    if quantizer is None:
        return None
    kind = type(quantizer)
    names = {built_in: name for name, built_in in BUILT_IN_QUANTIZERS.items()}
    return names.get(kind) or f"{kind.__module__}.{kind.__qualname__}"


def quantizer_of_name(name: str | None, quantizer: object | None) -> PageQuantizer | None:
    """Return the quantizer saved as `name`, or `quantizer` if it has that name.

    Raises:
        ValueError: it is another, or it is none of Quire's and was not given.
    """
    if quantizer is None and name in (None, *BUILT_IN_QUANTIZERS):
        return page_quantizer(name or "", None)
    given = page_quantizer("", quantizer)
    if quantizer_name(given) != name:
        raise ValueError(
            f"the cache was written with the quantizer {name}, and quantizer is {quantizer_name(given)}; "
            "give the one that it had"
        )
    return given


def _format(quantizer: PageQuantizer, head_dim: int) -> VectorFormat:
    """Return what a quantizer makes of a vector, by trying it on one."""
    numbers, scales = quantizer.quantize(torch.zeros(1, 1, head_dim))
    return VectorFormat(
        _type_of("numbers", numbers),
        numbers.shape[-1],
        "" if scales is None else _type_of("scales", scales),
        () if scales is None else tuple(scales.shape[2:]),
    )


def _type_of(part: str, result: torch.Tensor) -> str:
    name = str(result.dtype).removeprefix("torch.")
    if name not in NUMBER_BYTES or result.shape[:2] != (1, 1):
        raise ValueError(
            f"the quantizer makes {part} {name} {list(result.shape)} of [1, 1, head_dim]; they must "
            f"begin with [1, 1] and be of {', '.join(NUMBER_BYTES)}"
        )
    return name
