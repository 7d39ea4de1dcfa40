"""Where the blocks of one sequence lie, when its layers have evicted different ones.

All layers share a block table. After an eviction, it loses the entries right behind the start area, as many
as were evicted. A layer that keeps one of these blocks moves its part of it to the place of a block that it
has evicted. So tables stay equal and only orders differ, which attention over all keys does not depend on.
Blocks keep their order in the sequence, and those behind the evicted ones move back, so that positions stay
contiguous. L layers.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.step import Int64Array


@dataclasses.dataclass(slots=True, frozen=True)
class Moves:
    """Parts of blocks to be copied, by place in the table; a place is not both read and written."""

    layers: Int64Array  # [moves]
    sources: Int64Array  # [moves]
    targets: Int64Array  # [moves]


class BlockPlaces:
    """The places, in the block table, of each layer's blocks in the order of the sequence.

    Args:
        num_layers: L.
        num_start_blocks: blocks of the start area, which never move.
    """

    def __init__(self, num_layers: int, num_start_blocks: int) -> None:
        self._num_start_blocks = num_start_blocks
        self._places: Int64Array = np.zeros((num_layers, 0), dtype=np.int64)
        self.are_in_order = True
        """Whether each layer's blocks lie in the order of the sequence."""

    def of(self, num_blocks: int) -> Int64Array:
        """Return the place of each of a sequence's `num_blocks` blocks, [L, num_blocks]."""
        known = self._places.shape[1]
        new = np.arange(known, num_blocks)
        return np.concatenate((self._places, np.broadcast_to(new, (len(self._places), len(new)))), axis=1)

    def evict(self, evicted: Int64Array, num_blocks: int) -> Moves:
        """Take blocks out of the order, and return what has to be moved before the table loses its entries.

        Args:
            evicted: numbers of each layer's blocks, ascending, [L, count].
            num_blocks: blocks in the cache, the evicted ones included.
        """
        num_layers, count = evicted.shape
        places = self.of(num_blocks)
        is_kept = np.ones(places.shape, dtype=np.bool_)
        np.put_along_axis(is_kept, evicted, values=False, axis=1)
        kept = places[is_kept].reshape(num_layers, -1)
        end = self._num_start_blocks + count  # of the table's entries that go
        given_up = places[~is_kept].reshape(num_layers, -1)
        leaves = (kept >= self._num_start_blocks) & (kept < end)
        layers = np.nonzero(leaves)[0]
        sources, targets = kept[leaves], given_up[given_up >= end]
        kept[leaves] = targets
        kept[kept >= end] -= count
        self._places = kept
        self.are_in_order = bool((kept == np.arange(kept.shape[1])).all())
        return Moves(layers, sources, targets)


def positions_to_move_back(evicted: Int64Array, num_blocks: int, block_size: int) -> Int64Array:
    """Return by how many positions each block that stays moves back, [L, num_blocks - count].

    Args:
        evicted: numbers of each layer's blocks, ascending, [L, count].
        num_blocks: blocks in the cache, the evicted ones included, and the last, partly filled one.
        block_size: tokens per block.
    """
    is_evicted = np.zeros((len(evicted), num_blocks), dtype=np.bool_)
    np.put_along_axis(is_evicted, evicted, values=True, axis=1)
    num_before = np.cumsum(is_evicted, axis=1)
    return num_before[~is_evicted].reshape(len(evicted), -1) * block_size
