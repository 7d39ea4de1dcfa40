"""The KV cache itself: one block-major tensor, and a view of each layer over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
import torch

from quire.kv.cache_metadata import PagedAttentionCacheMetaData, PagesSharding
from quire.kv.cache_view import PagedAttentionCacheView
from quire.kv.page_memory import PageMemory, page_quantizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PagedAttentionCache:
    """Keys and values of all layers, block after block; a block is a page with its part of every layer.

    All layers of one block are one contiguous span of `bytes_per_block` bytes, so that moving a block is one
    copy. The memory is not initialized: a place holds anything until its token is written.

    `tensor` is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]` where all layers are alike.
    With int8 it is `[num_blocks, num_layers, 2, num_kv_heads, block_size * (head_dim + 4)]` bytes: for each
    head the block's numbers, `[block_size, head_dim]`, and then its float32 scales, `[block_size]`. Where
    layers differ, or with a quantizer of one's own, it is `[num_blocks, bytes_per_block]` bytes;
    `quire.kv.page_layout` says what is where.

    Args:
        views: one for each layer.
        tensor: the memory of the views; None: they have none.
    """

    def __init__(self, views: Sequence[PagedAttentionCacheView], tensor: torch.Tensor | None = None) -> None:
        self.views = list(views)
        self._tensor = tensor

    @classmethod
    def init_cache(
        cls,
        mesh: DeviceMesh | None,
        metadata: PagedAttentionCacheMetaData,
        quantizer: object | None = None,
        kv_pages_sharding: PagesSharding | None = None,
    ) -> Self:
        """Return a cache with memory for all pages; memory is taken up as it is written to.

        Args:
            mesh: the devices, of which this process is one; None: as many as `metadata` says.
            metadata: what the cache is.
            quantizer: an object with `quantize` and `dequantize` (`quire.kernels.page_quantizers`), or a
                function that returns keys or values [..., head_dim] as numbers that need only be converted
                back; each vector by itself. None: int8 if that is the cache's type, else none.
            kv_pages_sharding: for each dimension of a layer's pages the mesh axis that divides it: only that
                of KV heads can be. None: as `metadata` says.

        Raises:
            ValueError: mesh and metadata differ, pages cannot be divided so, or the quantizer's results
                cannot be held in pages.
        """
        metadata = metadata.sharded_over(mesh, kv_pages_sharding)
        own = page_quantizer(metadata.dtype, quantizer)
        memory = PageMemory(metadata, own)
        views = [
            PagedAttentionCacheView.over(memory, metadata, index, own)
            for index in range(metadata.num_hidden_layers)
        ]
        return cls(views, memory.tensor)

    @classmethod
    def init_empty(cls, metadata: PagedAttentionCacheMetaData | None = None) -> Self:
        """Return a container without tensors: an uninitialized view of each layer, or no views at all."""
        if metadata is None:
            return cls([])
        return cls([PagedAttentionCacheView(metadata, index) for index in range(metadata.num_hidden_layers)])

    @property
    def metadata(self) -> PagedAttentionCacheMetaData:
        """What the cache is."""
        if not self.views:
            raise AttributeError("the cache has no views, so nothing is known of it")
        return self.views[0].metadata

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, block after block."""
        if self._tensor is None:
            raise AttributeError("the cache has no tensor; PagedAttentionCache.init_cache() makes one")
        return self._tensor

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.metadata.num_pages_per_layer

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.metadata.page_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block, all layers together."""
        return self.tensor.stride(0) * self.tensor.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks, each as it was before this call.

        Args:
            copies: [N, 2] block ids (from, to); no two go to the same block.
        """
        if len(copies):
            source, target = torch.from_numpy(copies.astype(np.int64)).unbind(1)
            self.tensor[target] = self.tensor[source]
