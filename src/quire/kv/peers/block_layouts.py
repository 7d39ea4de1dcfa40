"""How blocks of peers go into this engine's, which may be larger."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from quire.datadist.arriving_blocks import ArrivingBlocks, BlockConversion, ConvertedBlocks
from quire.datadist.spans import Int64Array
from quire.kv.page_layout import HeadsLayout, PageLayout


class BlockLayouts:
    """This engine's blocks, and how those of its peers go into them.

    Args:
        layout: of this engine's blocks.
        layout_of: returns that of blocks of another size.
    """

    def __init__(self, layout: PageLayout, layout_of: Callable[[int], PageLayout]) -> None:
        self.block_size = layout.page_size
        self.block_bytes = layout.bytes_per_page
        self._conversion_from = functools.cache(lambda size: conversion(layout_of(size), layout))

    def arriving(self, block_ids: Int64Array, blocks: range, block_size: int) -> ArrivingBlocks:
        """Return blocks that a peer's blocks fill, from the start of the first one on.

        Args:
            block_ids: the blocks to fill, one after another.
            blocks: numbers of the peer's blocks.
            block_size: tokens of the peer's blocks.

        Raises:
            ValueError: they do not fit together.
        """
        if block_size == self.block_size:
            return ArrivingBlocks(block_ids, blocks.start, self.block_bytes)
        return ConvertedBlocks(block_ids, blocks, self._conversion_from(block_size))


def conversion(small: PageLayout, large: PageLayout) -> BlockConversion:
    """Return how blocks of one layout make up those of another one, which has more tokens.

    Raises:
        ValueError: their tokens or their bytes do not fit together.
    """
    if not small.page_size or large.page_size % small.page_size:
        raise ValueError(f"{large.page_size} tokens are no multiple of {small.page_size}")
    rows: list[tuple[int, int, int]] = []
    for one, other in zip(small.layers, large.layers, strict=True):
        if one is not None and other is not None:
            rows += _rows(one.keys, other.keys, small.page_size)
            rows += _rows(one.values, other.values, small.page_size)
    starts, lengths, offsets = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    ends = np.cumsum(lengths)
    if ends[-1] != small.bytes_per_page or (starts != ends - lengths).any():
        raise ValueError(f"blocks of {small.page_size} tokens have gaps between heads")
    return BlockConversion(
        ratio=large.page_size // small.page_size,
        small_bytes=small.bytes_per_page,
        large_bytes=large.bytes_per_page,
        lengths=lengths,
        offsets=offsets,
        strides=lengths,  # a head's tokens follow each other
    )


def _rows(small: HeadsLayout, large: HeadsLayout, num_tokens: int) -> list[tuple[int, int, int]]:
    """Return where the numbers and the scales of each head begin, how long they are, and where they go."""
    rows = []
    for head in range(small.num_heads):
        start, target = small.offset + head * small.head_bytes, large.offset + head * large.head_bytes
        rows.append((start, num_tokens * small.format.number_bytes, target))
        if small.format.scale_bytes:
            length = num_tokens * small.format.scale_bytes
            rows.append((start + small.scales_offset, length, target + large.scales_offset))
    return rows
