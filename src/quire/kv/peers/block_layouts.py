"""The layout of blocks sent between engines: where this engine's blocks are, and how peers' blocks fill them.

A block travels with all its KV heads in order, as it lies in the cache of an engine that is one process. So
neither side knows among how many ranks the other divides its heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.memory import CacheMemory, DeviceMemory
from quire.datadist.caches.registered_memory import memory_of_tensors
from quire.datadist.caches.spans import ByteSpans, Int64Array, part_spans
from quire.datadist.enums import DataType
from quire.datadist.loans.arriving_blocks import ArrivingBlocks, BlockConversion, ConvertedBlocks
from quire.kv.cache.page_layout import HeadsLayout, PageLayout
from quire.kv.cache.paged_cache import PagedAttentionCache

MAX_SENT_SPANS = 1 << 16
"""Spans of bytes that are sent at a time: transports tell them in one message."""


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """Where ranks, which divide the KV heads evenly, have their parts of blocks.

    Attributes:
        layout: layout of a rank's part of a block.
        num_shards: number of ranks.
        stride: bytes from a rank's part of a block to that of the next rank.
    """

    layout: PageLayout
    num_shards: int
    stride: int


class BlockLayouts:
    """This engine's blocks, and how those of its peers go into them.

    Args:
        layout: layout of this engine's blocks as they travel.
        layout_of: returns that of blocks of another size.
        shards: where the ranks of this engine have them; None: there is one process, whose blocks are laid
            out as they travel.

    Attributes:
        block_size: tokens of a block.
        block_bytes: bytes of a block, of all ranks together.
        layer_ends: bytes from a block's start to the end of each layer, of all ranks together.

    Raises:
        ValueError: the ranks' parts do not make up the blocks.
    """

    def __init__(
        self, layout: PageLayout, layout_of: Callable[[int], PageLayout], shards: ShardLayout | None = None
    ) -> None:
        self.block_size = layout.page_size
        self.block_bytes = layout.bytes_per_page
        self.layer_ends = layout.layer_ends
        target = ShardLayout(layout, 1, 0) if shards is None else shards
        self._conversion_from = functools.cache(lambda size: conversion(layout_of(size), target))
        self._divided = None if shards is None else conversion(layout, shards)

    @property
    def max_sent_blocks(self) -> int:
        """Blocks that can be sent at a time."""
        num_spans = 1 if self._divided is None else len(self._divided.lengths)
        return max(1, MAX_SENT_SPANS // num_spans)

    def spans_of(self, block_ids: Int64Array, offset: int, num_bytes: int) -> ByteSpans:
        """Return where `num_bytes` bytes from `offset` on of each of some of this engine's blocks are."""
        if self._divided is None:
            return part_spans(block_ids, self.block_bytes, offset, num_bytes)
        return self._divided.spans(block_ids, np.zeros_like(block_ids), offset, num_bytes)

    def arriving(self, block_ids: Int64Array, blocks: range, block_size: int) -> ArrivingBlocks:
        """Return blocks that a peer's blocks fill, from the start of the first one on.

        Args:
            block_ids: the blocks to fill, one after another.
            blocks: numbers of the peer's blocks.
            block_size: tokens of the peer's blocks.

        Raises:
            ValueError: they do not fit together.
        """
        if block_size != self.block_size:
            return ConvertedBlocks(block_ids, blocks, self._conversion_from(block_size))
        if self._divided is None:
            return ArrivingBlocks(block_ids, blocks.start, self.block_bytes)
        return ConvertedBlocks(block_ids, blocks, self._divided)


def conversion(small: PageLayout, shards: ShardLayout) -> BlockConversion:
    """Return how blocks of one layout make up those of another one, which has more tokens, or is divided.

    Raises:
        ValueError: their tokens, their heads or their bytes do not fit together.
    """
    large = shards.layout
    if not small.page_size or large.page_size % small.page_size:
        raise ValueError(f"{large.page_size} tokens are no multiple of {small.page_size}")
    pieces: list[_Piece] = []
    for one, other in zip(small.layers, large.layers, strict=True):
        if one is not None and other is not None:
            pieces += _pieces(one.keys, other.keys, small.page_size, shards)
            pieces += _pieces(one.values, other.values, small.page_size, shards)
    starts, lengths, offsets = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
    ends = np.cumsum(lengths)
    if ends[-1] != small.bytes_per_page or (starts != ends - lengths).any():
        raise ValueError(f"blocks of {small.page_size} tokens have gaps between heads")
    is_first = np.append(True, offsets[1:] != (offsets + lengths)[:-1])  # what adjoins is one piece
    lengths = np.add.reduceat(lengths, np.flatnonzero(is_first))
    return BlockConversion(
        ratio=large.page_size // small.page_size,
        small_bytes=small.bytes_per_page,
        large_bytes=large.bytes_per_page,
        lengths=lengths,
        offsets=offsets[is_first],
        strides=lengths,  # a head's tokens follow each other
    )


_Piece = tuple[int, int, int]
"""Start in the small block, length, and where it goes; in bytes."""


def _pieces(small: HeadsLayout, large: HeadsLayout, num_tokens: int, shards: ShardLayout) -> list[_Piece]:
    """Return the numbers and the scales of each head."""
    if small.num_heads != large.num_heads * shards.num_shards:
        raise ValueError(f"{small.num_heads} heads are not {large.num_heads} on each of {shards.num_shards}")
    pieces = []
    for head in range(small.num_heads):
        shard, own_head = divmod(head, large.num_heads)
        start = small.offset + head * small.head_bytes
        target = shard * shards.stride + large.offset + own_head * large.head_bytes
        pieces.append((start, num_tokens * small.format.number_bytes, target))
        if small.format.scale_bytes:
            length = num_tokens * small.format.scale_bytes
            pieces.append((start + small.scales_offset, length, target + large.scales_offset))
    return pieces


def memory_of(kv_caches: PagedAttentionCache) -> CacheMemory:
    """Return the memory of the blocks, of all ranks if there are several.

    On a GPU, copies go beside the steps: blocks are read when the step that fills them has been computed, and
    written when those have that used them before.
    """
    shards = kv_caches.shards
    tensor = kv_caches.tensor if shards is None else shards.tensor
    uint8 = tensor.new_empty(0).byte().dtype
    flat = tensor.view(-1).view(uint8)
    shape = [len(tensor), len(flat) // len(tensor)]
    desc = CacheDesc(1, shape, DataType.DT_INT8)
    if flat.device.type == "cuda":
        stream = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        return DeviceMemory(desc, flat.device, [flat], stream=stream)
    return memory_of_tensors(desc, [flat])


def layouts_of(kv_caches: PagedAttentionCache) -> BlockLayouts:
    """Return how the blocks lie in this memory, and how those of peers go into them."""
    metadata, shards = kv_caches.metadata, kv_caches.shards
    as_sent = metadata if shards is None else metadata.replace(kv_head_shards=1)

    def layout_of(block_size: int) -> PageLayout:
        return dataclasses.replace(as_sent, page_size=block_size).page_layout()

    held = None
    if shards is not None:
        held = ShardLayout(metadata.page_layout(), shards.num_shards, shards.stride)
    return BlockLayouts(as_sent.page_layout(), layout_of, held)
