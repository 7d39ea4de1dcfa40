"""The layout of blocks sent between engines: where this engine's blocks are, and how peers' blocks fill them.

A block travels with all its layers and KV heads in order, as it lies in the cache of an engine that is one
process and has one cache group. So neither side knows among how many ranks the other divides its heads. With
several groups, both sides leave out what no token behind the prefix sees: these blocks have `NO_BLOCK` as
their number in that group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.memory import CacheMemory, DeviceMemory
from quire.datadist.caches.registered_memory import memory_of_tensors
from quire.datadist.caches.spans import ByteSpans, Int64Array, part_spans
from quire.datadist.enums import DataType
from quire.datadist.loans.arriving_blocks import ArrivingBlocks, BlockConversion, ConvertedBlocks
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.page_layout import HeadsLayout, PageLayout
from quire.kv.cache.paged_cache import PagedAttentionCache
from quire.kv.cache.state_cache import StateCache
from quire.kv.peers.shared_prompt import NO_STATES, StateBlocks

MAX_SENT_SPANS = 1 << 16
"""Spans of bytes that are sent at a time: transports tell them in one message."""


@dataclasses.dataclass(frozen=True)
class GroupLayout:
    """Where a rank has the blocks of one cache group.

    Attributes:
        layout: layout of the rank's part of a block.
        start: bytes from the start of the rank's memory to its first block.
    """

    layout: PageLayout
    start: int = 0


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """Where ranks, which divide the KV heads evenly, have their parts of blocks.

    Attributes:
        groups: where a rank has them, by cache group; each layer with KV is in one of them.
        num_shards: number of ranks.
        stride: bytes from a rank's part of a block to that of the next rank.
    """

    groups: Sequence[GroupLayout]
    num_shards: int = 1
    stride: int = 0

    @property
    def is_as_sent(self) -> bool:
        """Whether whole blocks lie one after the other, in one process."""
        return len(self.groups) == 1 and self.num_shards == 1


class BlockLayouts:
    """This engine's blocks, and how those of its peers go into them.

    Args:
        layout: layout of this engine's blocks as they travel.
        layout_of: returns that of blocks of another size.
        shards: where the ranks of this engine have them; None: whole blocks lie one after the other.

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
        target = ShardLayout([GroupLayout(layout)]) if shards is None else shards
        self._has_groups = len(target.groups) > 1
        self._conversion_from = functools.cache(lambda size: conversion(layout_of(size), target))
        self._divided = None if target.is_as_sent else conversion(layout, target)

    @property
    def max_sent_blocks(self) -> int:
        """Blocks that can be sent at a time."""
        num_spans = 1 if self._divided is None else len(self._divided.lengths)
        return max(1, MAX_SENT_SPANS // num_spans)

    def spans_of(self, block_ids: Int64Array, offset: int, num_bytes: int) -> ByteSpans:
        """Return where `num_bytes` bytes from `offset` on of each of some of this engine's blocks are.

        Args:
            block_ids: the blocks, of each group [G, N].
            offset: in a block as it travels.
            num_bytes: of each block, those of groups in which it has `NO_BLOCK` included.
        """
        if self._divided is None:
            return part_spans(block_ids[0], self.block_bytes, offset, num_bytes)
        return self._divided.spans(block_ids, np.zeros_like(block_ids[0]), offset, num_bytes)

    def arriving(self, block_ids: Int64Array, blocks: range, block_size: int) -> ArrivingBlocks:
        """Return blocks that a peer's blocks fill, from the start of the first one on.

        Args:
            block_ids: the blocks to fill, one after another, of each group [G, N].
            blocks: numbers of the peer's blocks.
            block_size: tokens of the peer's blocks.

        Raises:
            ValueError: they do not fit together.
        """
        if block_size != self.block_size:
            if self._has_groups:
                raise ValueError(
                    f"the peer's blocks have {block_size} tokens, and these {self.block_size}; they must be "
                    "equally large where layers have windows"
                )
            return ConvertedBlocks(block_ids, blocks, self._conversion_from(block_size))
        if self._divided is None:
            return ArrivingBlocks(block_ids, blocks.start, self.block_bytes)
        return ConvertedBlocks(block_ids, blocks, self._divided)


def conversion(small: PageLayout, shards: ShardLayout) -> BlockConversion:
    """Return how blocks of one layout make up those of another one, which has more tokens, or is divided.

    Raises:
        ValueError: their tokens, their heads or their bytes do not fit together.
    """
    page_size = shards.groups[0].layout.page_size
    if not small.page_size or page_size % small.page_size:
        raise ValueError(f"{page_size} tokens are no multiple of {small.page_size}")
    pieces: list[_Piece] = []
    for index, one in enumerate(small.layers):
        for group, place in enumerate(shards.groups):
            other = place.layout.layers[index]
            if one is not None and other is not None:
                for part, larger in zip(one.parts, other.parts, strict=True):
                    pieces += _pieces(part, larger, small.page_size, shards, group)
    starts, lengths, offsets, groups = (
        np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True)
    )
    ends = np.cumsum(lengths)
    if ends[-1] != small.bytes_per_page or (starts != ends - lengths).any():
        raise ValueError(f"blocks of {small.page_size} tokens have gaps between heads")
    adjoins = (offsets[1:] == (offsets + lengths)[:-1]) & (groups[1:] == groups[:-1])
    is_first = np.append(True, ~adjoins)  # what adjoins is one piece
    lengths, groups = np.add.reduceat(lengths, np.flatnonzero(is_first)), groups[is_first]
    return BlockConversion(
        ratio=page_size // small.page_size,
        small_bytes=small.bytes_per_page,
        lengths=lengths,
        groups=groups,
        offsets=offsets[is_first],
        large_strides=np.array([place.layout.bytes_per_page for place in shards.groups])[groups],
        strides=lengths,  # a head's tokens follow each other
    )


_Piece = tuple[int, int, int, int]
"""Start in the small block, length, where it goes, in bytes, and the cache group."""


def _pieces(
    small: HeadsLayout, large: HeadsLayout, num_tokens: int, shards: ShardLayout, group: int
) -> list[_Piece]:
    """Return the numbers and the scales of each head."""
    if small.num_heads != large.num_heads * shards.num_shards:
        raise ValueError(f"{small.num_heads} heads are not {large.num_heads} on each of {shards.num_shards}")
    pieces = []
    for head in range(small.num_heads):
        shard, own_head = divmod(head, large.num_heads)
        start = small.offset + head * small.head_bytes
        target = shard * shards.stride + shards.groups[group].start
        target += large.offset + own_head * large.head_bytes
        pieces.append((start, num_tokens * small.format.number_bytes, target, group))
        if small.format.scale_bytes:
            length = num_tokens * small.format.scale_bytes
            pieces.append((start + small.scales_offset, length, target + large.scales_offset, group))
    return pieces


def memory_of(kv_caches: Sequence[PagedAttentionCache], states: StateCache | None = None) -> CacheMemory:
    """Return the memory of the blocks of all cache groups, of all ranks if there are several, and of states.

    On a GPU, copies go beside the steps: blocks are read when the step that fills them has been computed, and
    written when those have that used them before.
    """
    shards, starts = kv_caches[0].shards, _starts(kv_caches)
    if shards is None:
        first = _bytes_of(kv_caches[0])
        num_bytes = starts[-1] + kv_caches[-1].nbytes
        if states is not None:
            num_bytes = _offset(states.tensor) + states.tensor.nbytes - _offset(first)
        flat = first.as_strided([num_bytes], [1], first.storage_offset())
    else:
        flat = shards.tensor.view(-1)
    desc = CacheDesc(1, [len(flat)], DataType.DT_INT8)
    if flat.device.type == "cuda":
        stream = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        return DeviceMemory(desc, flat.device, [flat], stream=stream)
    return memory_of_tensors(desc, [flat])


def layouts_of(kv_caches: Sequence[PagedAttentionCache]) -> BlockLayouts:
    """Return how the blocks of all cache groups lie in this memory, and how those of peers go into them."""
    groups, shards = [cache.metadata for cache in kv_caches], kv_caches[0].shards
    layers = [next(filter(None, specs), None) for specs in zip(*(one.layers for one in groups), strict=True)]
    first = groups[0]

    def layout_of(block_size: int) -> PageLayout:
        return PagedAttentionCacheMetaData.for_layers(
            layers, page_size=block_size, dtype=first.dtype, num_pages=0
        ).page_layout()

    places = [
        GroupLayout(one.page_layout(), start) for one, start in zip(groups, _starts(kv_caches), strict=True)
    ]
    held = ShardLayout(places) if shards is None else ShardLayout(places, shards.num_shards, shards.stride)
    return BlockLayouts(layout_of(first.page_size), layout_of, held)


def state_blocks_of(kv_caches: Sequence[PagedAttentionCache], states: StateCache | None) -> StateBlocks:
    """Return the checkpoints as blocks behind those of the one cache group that there is."""
    if states is None:
        return NO_STATES
    first, block_bytes = _bytes_of(kv_caches[0]), states.tensor.shape[1]
    start = _offset(states.tensor) - _offset(first)
    if len(kv_caches) > 1 or start % block_bytes:
        raise ValueError(
            f"states begin {start} bytes behind the first of {len(kv_caches)} caches, and no whole blocks of "
            f"{block_bytes} bytes behind the only one"
        )
    return StateBlocks(start // block_bytes, states.num_pieces)


def _offset(memory: torch.Tensor) -> int:
    """Return where bytes begin in their allocation."""
    return int(memory.storage_offset())


def _bytes_of(cache: PagedAttentionCache) -> torch.Tensor:
    return cache.tensor.view(-1).view(torch.uint8)


def _starts(kv_caches: Sequence[PagedAttentionCache]) -> list[int]:
    """Return where the cache of each group begins, in bytes from the first one, in one allocation."""
    all_bytes = [_bytes_of(cache) for cache in kv_caches]
    if len({one.untyped_storage().data_ptr() for one in all_bytes}) > 1:
        raise ValueError("the caches of several groups are not in one allocation")
    offsets = [int(one.storage_offset()) for one in all_bytes]
    return [offset - offsets[0] for offset in offsets]
