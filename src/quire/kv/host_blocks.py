"""Contents of KV blocks in host memory, by key: a bounded dictionary, and access to the cache's blocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quire.kv.block_hash import BlockKey

if TYPE_CHECKING:
    from quire.kv.paged_cache import PagedAttentionCache


class BlockContent(Protocol):
    """The keys and values of one block, all layers: an array or a tensor in host memory."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


@runtime_checkable
class BlockStore(Protocol):
    """The engine's KV cache, one block at a time."""

    def read_block(self, block_id: int) -> BlockContent:
        """Return a copy of a block."""

    def write_block(self, block_id: int, content: Any) -> None:
        """Overwrite a block with what `read_block` has returned for it or another one."""


class TensorBlocks:
    """`BlockStore` over the cache's tensors; all layers of a block are one contiguous span."""

    def __init__(self, kv_caches: PagedAttentionCache) -> None:
        self._tensor = kv_caches.tensor

    def read_block(self, block_id: int) -> BlockContent:
        """Return a copy in host memory, shaped as a block of `PagedAttentionCache.tensor`."""
        return self._tensor[block_id].to("cpu", copy=True)

    def write_block(self, block_id: int, content: Any) -> None:
        """Overwrite a block."""
        self._tensor[block_id].copy_(content)


def block_store(kv_caches: PagedAttentionCache | BlockStore) -> BlockStore:
    """Return the cache as single blocks."""
    return kv_caches if isinstance(kv_caches, BlockStore) else TensorBlocks(kv_caches)


class HostBlocks:
    """Block contents by key, least recently used dropped first.

    `generation` counts how often everything was forgotten: what was found in one generation may not be used
    in another, because the weights may have changed between them.

    Args:
        capacity_bytes: maximum number of bytes to keep.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.generation = 0
        self.num_bytes = 0
        self._capacity = capacity_bytes
        self._contents: OrderedDict[bytes, tuple[BlockKey, BlockContent]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, key: BlockKey) -> bool:
        entry = self._contents.get(key.digest)
        return entry is not None and entry[0] == key

    def get(self, key: BlockKey) -> BlockContent | None:
        """Return the content of `key` and count it as used, or None."""
        if key not in self:
            return None
        self._contents.move_to_end(key.digest)
        return self._contents[key.digest][1]

    def put(self, key: BlockKey, content: BlockContent) -> None:
        """Keep a content, at the cost of the least recently used ones; one that is too large is not kept."""
        if key.digest in self._contents or content.nbytes > self._capacity:
            return
        self._contents[key.digest] = (key, content)
        self.num_bytes += content.nbytes
        while self.num_bytes > self._capacity:
            _, (_, dropped) = self._contents.popitem(last=False)
            self.num_bytes -= dropped.nbytes

    def clear(self) -> None:
        """Forget everything and begin a new generation."""
        self._contents.clear()
        self.num_bytes = 0
        self.generation += 1
