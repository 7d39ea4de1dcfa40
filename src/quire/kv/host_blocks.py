"""The KV cache as single blocks, copied to and from host memory as plain bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from quire.kv.paged_cache import PagedAttentionCache

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

    Blocks may be read and written by several threads, each block by one at a time.
    """

    def __init__(self, kv_caches: PagedAttentionCache) -> None:
        tensor = kv_caches.tensor
        uint8 = tensor.new_empty(0).byte().dtype  # this module is also imported where torch is not
        self._blocks: ByteArray = tensor.view(len(tensor), -1).view(uint8).numpy()

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


def block_store(kv_caches: PagedAttentionCache | BlockStore) -> BlockStore:
    """Return the cache as single blocks."""
    return kv_caches if isinstance(kv_caches, BlockStore) else TensorBlocks(kv_caches)
