"""Memory of the KV caches of all ranks of an engine, which are processes of one machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from quire.kernels.devices.memory import map_file
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.page_memory import group_starts


class ShardMemory:
    """The caches of all ranks, one after the other in a file, so that each rank can reach all of them.

    Those of a rank are one for each cache group, one after the other.

    Args:
        file: descriptor of a file in memory that all ranks have; it may be closed afterwards.
        groups: metadata of the cache of each cache group, whose KV heads are divided among the ranks.

    Attributes:
        tensor: the file's bytes, [num_shards, stride] uint8.
        num_shards: number of ranks.
        stride: bytes from the caches of a rank to those of the next one.

    Raises:
        OSError: there is no room for them.
    """

    def __init__(self, file: int, groups: Sequence[PagedAttentionCacheMetaData]) -> None:
        self.num_shards = groups[0].kv_head_shards
        self._shapes = [(each.num_pages_per_layer, each.bytes_per_block) for each in groups]
        *self._starts, self.stride = group_starts(groups)
        size = self.num_shards * self.stride
        os.ftruncate(file, size)  # each rank knows the size, and the first one sets it
        self.tensor = map_file(file, size).view(self.num_shards, self.stride)

    def of_rank(self, rank: int, group: int) -> torch.Tensor:
        """Return a rank's blocks of a cache group, [num_blocks, bytes_per_block] uint8."""
        (num_blocks, block_bytes), start = self._shapes[group], self._starts[group]
        return self.tensor[rank, start : start + num_blocks * block_bytes].view(num_blocks, block_bytes)
