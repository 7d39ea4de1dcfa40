"""The KV cache as single blocks, copied to and from host memory as plain bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from quire.kv.cache.paged_cache import PagedAttentionCache
    from quire.kv.cache.state_cache import StateCache

ByteArray = npt.NDArray[np.uint8]


@runtime_checkable
class BlockStore(Protocol):
    """The engine's KV cache, one block at a time: keys and values of all layers, as they lie in memory."""

    @property
    def bytes_per_block(self) -> int:
        """Size of a block in bytes."""

    def read_block(self, block_id: int, into: ByteArray) -> None:
        """Copy a block into an array of `bytes_per_block` bytes."""

    def write_block(self, block_id: int, content: ByteArray) -> None:
        """Overwrite a block with `bytes_per_block` bytes that `read_block` has returned for any block."""


class TensorBlocks:
    """`BlockStore` over the cache's tensor in host memory; all layers of a block are one contiguous span.

    The pieces of states are blocks, too.

    Blocks may be read and written by several threads, each block by one at a time.
    """

    def __init__(self, kv_caches: PagedAttentionCache | StateCache) -> None:
        self._blocks: ByteArray = _as_bytes(kv_caches.tensor).numpy()

    @property
    def bytes_per_block(self) -> int:
        """Size of a block in bytes."""
        return int(self._blocks.shape[1])

    def read_block(self, block_id: int, into: ByteArray) -> None:
        """Copy a block into an array of `bytes_per_block` bytes."""
        np.copyto(into, self._blocks[block_id])

    def write_block(self, block_id: int, content: ByteArray) -> None:
        """Overwrite a block."""
        np.copyto(self._blocks[block_id], content)


class DeviceBlocks:
    """`BlockStore` over the cache's tensor in a device's memory.

    A block is copied behind all steps that the device has been asked for so far, and each call waits for
    that. Blocks may be read and written by several threads, each block by one at a time.
    """

    def __init__(self, kv_caches: PagedAttentionCache | StateCache) -> None:
        self._blocks = _as_bytes(kv_caches.tensor)

    @property
    def bytes_per_block(self) -> int:
        """Size of a block in bytes."""
        return int(self._blocks.shape[1])

    def read_block(self, block_id: int, into: ByteArray) -> None:
        """Copy a block into an array of `bytes_per_block` bytes."""
        np.copyto(into, self._blocks[block_id].cpu().numpy())

    def write_block(self, block_id: int, content: ByteArray) -> None:
        """Overwrite a block."""
        on_host = self._blocks.new_empty(self.bytes_per_block, device="cpu")
        np.copyto(on_host.numpy(), content)
        self._blocks[block_id].copy_(on_host)


def block_store(kv_caches: PagedAttentionCache | StateCache | BlockStore) -> BlockStore:
    """Return the cache as single blocks, wherever it is."""
    if isinstance(kv_caches, BlockStore):
        return kv_caches
    return TensorBlocks(kv_caches) if kv_caches.tensor.is_cpu else DeviceBlocks(kv_caches)


def _as_bytes(blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks [num_blocks, ...] as [num_blocks, bytes], in the same memory."""
    uint8 = blocks.new_empty(0).byte().dtype  # this module is also imported where torch is not
    return blocks.view(len(blocks), math.prod(blocks.shape[1:])).view(uint8)
