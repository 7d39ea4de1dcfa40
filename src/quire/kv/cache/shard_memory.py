"""Memory of the KV caches of all ranks of an engine, which are processes of one machine."""

from __future__ import annotations

import os

import torch

from quire.kernels.devices.memory import PAGE, map_file
from quire.kv.cache.metadata import PagedAttentionCacheMetaData


class ShardMemory:
    """The caches of all ranks, one after the other in a file, so that each rank can reach all of them.

    Args:
        file: descriptor of a file in memory that all ranks have; it may be closed afterwards.
        metadata: metadata of a cache whose KV heads are divided among the ranks.

    Attributes:
        tensor: the file's bytes, [num_shards, stride] uint8.
        num_shards: number of ranks.
        stride: bytes from the first block of a rank to that of the next one.

    Raises:
        OSError: there is no room for them.
    """

    def __init__(self, file: int, metadata: PagedAttentionCacheMetaData) -> None:
        self.num_shards = metadata.kv_head_shards
        self._shape = metadata.num_pages_per_layer, metadata.bytes_per_block
        self.stride = -(-self._shape[0] * self._shape[1] // PAGE) * PAGE  # ranks share no large page
        size = self.num_shards * self.stride
        os.ftruncate(file, size)  # each rank knows the size, and the first one sets it
        self.tensor = map_file(file, size).view(self.num_shards, self.stride)

    def of_rank(self, rank: int) -> torch.Tensor:
        """Return the blocks of a rank, [num_blocks, bytes_per_block] uint8."""
        num_blocks, block_bytes = self._shape
        return self.tensor[rank, : num_blocks * block_bytes].view(num_blocks, block_bytes)
