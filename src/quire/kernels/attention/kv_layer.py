"""One layer's part of the paged KV cache, as the kernels see it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from quire.kernels.attention.kv_quantizers import PageQuantizer

if TYPE_CHECKING:
    from quire.kernels.attention.tiles import HeadLayout


class KVLayer(Protocol):
    """Keys and values of one layer; `quire.kv.PagedAttentionCacheView` is one.

    Where keys serve as values, too, pages and scales of values are those of keys, the same tensors.

    The features of a head are adjacent, and values lie as keys do; other strides are free. Places that were
    never written may hold anything.
    """

    key_pages: torch.Tensor
    """[kv_heads, num_pages, page_size, head_dim], or what the quantizer makes of head_dim features."""
    value_pages: torch.Tensor
    key_scales: torch.Tensor | None
    """[kv_heads, num_pages, page_size], or more dimensions; of a quantizer that has scales."""
    value_scales: torch.Tensor | None
    quantizer: PageQuantizer | None
    """Makes the pages' numbers; None: keys and values are rounded to the pages' type."""
    handles: dict[str, Any]
    """What the kernels keep of this layer, by their name."""
    group: int
    """Number of its cache group, whose block tables say where a step's tokens are."""


@dataclasses.dataclass(slots=True, eq=False)
class KVOfRows:
    """The keys and values of a step's own tokens, in the rows that they are projected to: each is a page.

    See `AttentionBatch.over_rows`; the fields are those of `KVLayer`.
    """

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    quantizer: PageQuantizer | None = None
    handles: dict[str, Any] = dataclasses.field(default_factory=dict)
    group: int = 0

    @classmethod
    def of(cls, qkv: torch.Tensor, heads: HeadLayout) -> Self:
        """Return those of rows [T, queries, keys and values]."""
        stride, start = qkv.stride(0), qkv.storage_offset() + heads.num_heads * heads.head_dim
        key_shape, value_shape = (
            (heads.num_kv_heads, len(qkv), 1, size) for size in (heads.head_dim, heads.value_size)
        )
        keys = qkv.as_strided(key_shape, (heads.head_dim, stride, stride, 1), start)
        start += heads.num_kv_heads * heads.head_dim
        return cls(keys, qkv.as_strided(value_shape, (heads.value_size, stride, stride, 1), start))


def pages_of(pages: torch.Tensor, page_ids: torch.Tensor) -> torch.Tensor:
    """Return some pages of all, [kv_heads, num_pages, ...]: [kv_heads, N, ...] for ids [N].

    Along any dimension but the first, `index_select` would copy the whole cache to make it contiguous.
    """
    return pages.transpose(0, 1).index_select(0, page_ids).transpose(0, 1)


def keys_of(layer: KVLayer, page_ids: torch.Tensor) -> torch.Tensor:
    """Return the keys in some pages, one after the other, [kv_heads, N * page_size, head_dim] float32."""
    scales = None if layer.key_scales is None else pages_of(layer.key_scales, page_ids)
    return vectors_in(pages_of(layer.key_pages, page_ids), scales, layer.quantizer)


def vectors_in(
    pages: torch.Tensor, scales: torch.Tensor | None, quantizer: PageQuantizer | None
) -> torch.Tensor:
    """Return the vectors in pages [kv_heads, N, page_size, n], with scales of them if the quantizer has any.

    Returns:
        [kv_heads, N * page_size, head_dim] float32, one page after the other.
    """
    vectors = pages if quantizer is None else quantizer.dequantize(pages, scales)
    return vectors.float().flatten(1, 2)
