"""Blocks filled part by part from a peer; the peer's blocks may be smaller."""

from __future__ import annotations

import dataclasses

import numpy as np
from typing_extensions import override

from quire.datadist.caches.spans import ByteSpans, Int64Array, part_spans
from quire.datadist.loans.loans import BlockPart

NO_BLOCK = -1
"""In ids of blocks by group: the part of the block in this group is not moved."""


class ArrivingBlocks:
    """Blocks filled from a peer's blocks of the same size.

    Args:
        block_ids: where block `first_block + i` of the peer goes, in each group [G, N]; here there is one.
        first_block: in the peer's numbers.
        block_bytes: bytes of a block.

    Attributes:
        num_bytes: bytes that have arrived.
    """

    def __init__(self, block_ids: Int64Array, first_block: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._block_ids = block_ids
        self._first_block = first_block
        self._filled = np.zeros(block_ids.shape[1], dtype=np.int64)
        self.num_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether all blocks have arrived completely."""
        return bool((self._filled == self._block_bytes).all())

    def spans_for(self, part: BlockPart) -> ByteSpans:
        """Return the destination of a part, and count it as arrived.

        Raises:
            ValueError: it does not continue the received blocks.
        """
        spans = self._spans(part, self._take(part))
        self.num_bytes += spans.num_bytes
        return spans

    def _spans(self, part: BlockPart, taken: slice) -> ByteSpans:
        """Return where the part goes that fills these blocks."""
        return part_spans(self._block_ids[0, taken], self._block_bytes, part.offset, part.num_bytes)

    def _take(self, part: BlockPart) -> slice:
        """Return the blocks that a part fills; raises like `spans_for`."""
        start = part.first_block - self._first_block
        stop = start + part.num_blocks
        if not (0 <= start < stop <= len(self._filled)) or part.num_bytes < 1:
            raise ValueError(f"{part} is not among the requested blocks")
        filled = self._filled[start:stop]
        if (filled != part.offset).any() or part.offset + part.num_bytes > self._block_bytes:
            raise ValueError(f"{part} does not continue the received blocks")
        filled += part.num_bytes
        return slice(start, stop)


@dataclasses.dataclass(frozen=True)
class BlockConversion:
    """How small blocks make up a large one: where their bytes are.

    A small block consists of contiguous pieces, each of one group. A large block may be spread over several
    places, each with the same part of all blocks of a group.

    Attributes:
        ratio: small blocks in a large one.
        small_bytes: bytes of a small block.
        lengths: lengths of the pieces, in bytes [P].
        groups: their groups [P].
        offsets: from the start of the memory to the pieces of the first small block of large block 0 [P].
        large_strides: from there to those of the next large block [P].
        strides: to those of the next small one [P].
    """

    ratio: int
    small_bytes: int
    lengths: Int64Array
    groups: Int64Array
    offsets: Int64Array
    large_strides: Int64Array
    strides: Int64Array

    def spans(self, large: Int64Array, small: Int64Array, offset: int, num_bytes: int) -> ByteSpans:
        """Return the spans of a part of each small block, in order, but for what has `NO_BLOCK`.

        Args:
            large: the large blocks that they are in, of each group [G, N].
            small: which of the small blocks of these they are [N].
            offset: offset of the part, in the small block.
            num_bytes: number of bytes of the part.
        """
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        first = np.maximum(starts, offset)
        lengths = np.minimum(ends, offset + num_bytes) - first
        pieces = np.flatnonzero(lengths > 0)
        in_large = (self.offsets + first - starts)[pieces] + small[:, None] * self.strides[pieces]
        blocks = large[self.groups[pieces]].T
        is_moved = blocks != NO_BLOCK
        offsets = blocks * self.large_strides[pieces] + in_large
        return ByteSpans(
            range(1), offsets[is_moved], np.broadcast_to(lengths[pieces], offsets.shape)[is_moved]
        )


class ConvertedBlocks(ArrivingBlocks):
    """Blocks filled from a peer's smaller ones, or spread over several places.

    Args:
        block_ids: the blocks to fill, one after another, in each group [G, N].
        blocks: the peer's blocks that fill them, from the start of the first one on.
        conversion: conversion of the peer's blocks to these.
    """

    def __init__(self, block_ids: Int64Array, blocks: range, conversion: BlockConversion) -> None:
        targets = np.repeat(block_ids, conversion.ratio, axis=1)[:, : len(blocks)]
        super().__init__(targets, blocks.start, conversion.small_bytes)
        self._conversion = conversion

    @override
    def _spans(self, part: BlockPart, taken: slice) -> ByteSpans:
        number = np.arange(taken.start, taken.stop) % self._conversion.ratio
        return self._conversion.spans(self._block_ids[:, taken], number, part.offset, part.num_bytes)
