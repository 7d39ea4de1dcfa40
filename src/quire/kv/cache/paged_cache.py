"""The KV cache itself: one block-major tensor, and a view of each layer over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.devices.device import HOST, array_to_device
from quire.kv.cache.head_sharding import PagesSharding
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.page_memory import (
    PageMemory,
    allocate,
    group_starts,
    layout_of,
    page_quantizer,
    quantizer_name,
    quantizer_of_name,
)
from quire.kv.cache.plain_data import check_keys, plain_text
from quire.kv.cache.saved_tensors import TensorData, load_tensors, save_tensors
from quire.kv.cache.view import PagedAttentionCacheView

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from quire.kernels.attention.kv_quantizers import PageQuantizer
    from quire.kv.cache.shard_memory import ShardMemory


class PagedAttentionCache(TensorData):
    """Keys and values of all layers, block after block; a block is a page with its part of every layer.

    All layers of one block are one contiguous span of `bytes_per_block` bytes, so that moving a block is one
    copy. The memory is not initialized: a place holds anything until its token is written.

    `tensor` is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]` where all layers are alike.
    With int8 it is `[num_blocks, num_layers, 2, num_kv_heads, block_size * (head_dim + 4)]` bytes: for each
    head the block's numbers, `[block_size, head_dim]`, and then its float32 scales, `[block_size]`. Where
    layers differ, or with a custom quantizer, it is `[num_blocks, bytes_per_block]` bytes;
    `quire.kv.cache.page_layout` says what is where.

    Args:
        views: one for each layer.
        memory: that of the views; None: they have none.
    """

    def __init__(self, views: Sequence[PagedAttentionCacheView], memory: PageMemory | None = None) -> None:
        self.views = list(views)
        self._memory = memory

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
            quantizer: an object with `quantize` and `dequantize` (see
                `quire.kernels.attention.kv_quantizers`), or a function that returns keys or values
                [..., head_dim] as numbers that need only be converted back; each vector by itself.
                None: that of the cache's type, int8 or float8_e4m3fn, else none.
            kv_pages_sharding: for each dimension of a layer's pages the mesh axis that divides it: only that
                of KV heads can be. None: as `metadata` says.

        Raises:
            ValueError: mesh and metadata differ, pages cannot be divided so, or the quantizer's results
                cannot be held in pages.
        """
        metadata = metadata.sharded_over(mesh, kv_pages_sharding)
        own = page_quantizer(metadata.dtype, quantizer)
        return cls._over(PageMemory(metadata, own), metadata, own)

    @classmethod
    def on_device(cls, metadata: PagedAttentionCacheMetaData, device: torch.device) -> Self:
        """Return a cache like `init_cache(None, metadata)`, in the memory of `device`.

        Args:
            metadata: what the cache is.
            device: on which its memory is allocated.
        """
        metadata = metadata.sharded_over(None, None)
        own = page_quantizer(metadata.dtype, None)
        return cls._over(PageMemory(metadata, own, device=device), metadata, own)

    @classmethod
    def over(cls, metadata: PagedAttentionCacheMetaData, memory: torch.Tensor) -> Self:
        """Return a cache over memory that there is already, which it keeps.

        Args:
            metadata: what the cache is.
            memory: contiguous bytes (uint8 or int8), at least `num_pages_per_layer * bytes_per_block`.

        Raises:
            RuntimeError: the memory is too short, not contiguous, or not of bytes.
        """
        own = page_quantizer(metadata.dtype, None)
        return cls._over(PageMemory(metadata, own, memory.view(-1)), metadata, own)

    @classmethod
    def _over(
        cls, memory: PageMemory, metadata: PagedAttentionCacheMetaData, quantizer: PageQuantizer | None
    ) -> Self:
        layers = range(metadata.num_hidden_layers)
        views = [PagedAttentionCacheView.over(memory, metadata, index, quantizer) for index in layers]
        return cls(views, memory)

    @classmethod
    def _of_pages(
        cls, metadata: PagedAttentionCacheMetaData, quantizer: PageQuantizer | None, memory: torch.Tensor
    ) -> Self:
        return cls._over(PageMemory(metadata, quantizer, memory), metadata, quantizer)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the memory once, with views over it: tensors would each be pickled by itself."""
        if self._memory is None or not self.views:
            return type(self), (self.views,)
        memory = self.tensor.view(torch.uint8).view(-1)
        return type(self)._of_pages, (self.metadata, self.views[0].quantizer, memory)

    @classmethod
    def init_empty(
        cls, metadata: PagedAttentionCacheMetaData | None = None, quantizer: object | None = None
    ) -> Self:
        """Return a container without tensors: an uninitialized view of each layer, or no views at all."""
        if metadata is None:
            return cls([])
        own = page_quantizer(metadata.dtype, quantizer)
        layers = range(metadata.num_hidden_layers)
        return cls([PagedAttentionCacheView(metadata, index, quantizer=own) for index in layers])

    @property
    def metadata(self) -> PagedAttentionCacheMetaData:
        """What the cache is."""
        if not self.views:
            raise AttributeError("the cache has no views, so its layout is unknown")
        return self.views[0].metadata

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, block after block."""
        return self._pages.tensor

    @property
    def _pages(self) -> PageMemory:
        if self._memory is None:
            raise AttributeError("the cache has no tensor; PagedAttentionCache.init_cache() makes one")
        return self._memory

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
        return self._pages.layout.bytes_per_page

    @property
    def shards(self) -> ShardMemory | None:
        """Memory of the blocks of all ranks, this one's too; None: no other rank's is in this process."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks, each as it was before this call.

        Args:
            copies: [N, 2] block ids (from, to); no two go to the same block.

        Raises:
            AttributeError: the cache has no tensor.
            IndexError: a block is none of the cache's.
        """
        if len(copies):
            blocks = array_to_device(copies.astype(np.int64), self.tensor.device)
            source, target = blocks.unbind(1)
            self.tensor[target] = self.tensor[source]

    def replace(self, **kwargs: Any) -> Self:
        """Return a cache with other `views` or other `memory`."""
        return type(self)(**{"views": self.views, "memory": self._memory, **kwargs})

    def to_dict(self, tensors: str | Path | None = None) -> dict[str, Any]:
        """Return metadata and layout as plain data.

        Args:
            tensors: a safetensors file to write the memory to; None: tensors are left out.

        Raises:
            ValueError: tensors are asked for, and the cache has none.
        """
        data: dict[str, Any] = {"metadata": None, "quantizer": None, "layout": None}
        if self.views:
            quantizer = self.views[0].quantizer
            data["metadata"] = self.metadata.to_dict()
            data["quantizer"] = quantizer_name(quantizer)
            data["layout"] = dataclasses.asdict(layout_of(self.metadata, quantizer))
        if tensors is not None:
            if self._memory is None:
                raise ValueError(f"the cache has no tensors to write to {tensors}")
            save_tensors(tensors, {"pages": self.tensor}, data)
        return data

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        tensors: str | Path | None = None,
        *,
        mesh: DeviceMesh | None = None,
        quantizer: object | None = None,
    ) -> Self:
        """Return the cache that `to_dict` wrote down.

        Args:
            data: what `to_dict` returned.
            tensors: the file that it wrote; None: the views are uninitialized.
            mesh: as for `init_cache`.
            quantizer: the one that the cache had, if it was none of Quire's.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a key is missing or unknown, a value is out of range, or file, data and quantizer
                belong to different caches.
        """
        check_keys(cls.__name__, data, ["metadata", "quantizer", "layout"])
        if data["metadata"] is None:
            return cls.init_empty()
        metadata = PagedAttentionCacheMetaData.from_dict(data["metadata"])
        own = quantizer_of_name(data["quantizer"], quantizer)
        cache = cls.init_empty(metadata, own) if tensors is None else cls.init_cache(mesh, metadata, own)
        here = cache.to_dict()
        if plain_text(here["layout"]) != plain_text(data["layout"]):
            raise ValueError(
                f"the layout of pages is {plain_text(data['layout'])}; here it is "
                f"{plain_text(here['layout'])}"
            )
        if tensors is not None:
            load_tensors(tensors, {"pages": cache.tensor}, here)
        return cache

    def __repr__(self) -> str:
        views = "Uninitialized"
        if self.views:
            views = "\n  " + ",\n  ".join(map(repr, self.views)) + "\n"
        return f"{type(self).__name__}({views})"


def caches_on_device(
    groups: Sequence[PagedAttentionCacheMetaData],
    device: torch.device,
    *,
    num_more: int = 0,
    alignment: int = 1,
) -> tuple[tuple[PagedAttentionCache, ...], torch.Tensor]:
    """Return the cache of each cache group, one after the other in one allocation of a device.

    Each is like `PagedAttentionCache.on_device`.

    Args:
        groups: what each is.
        device: whose memory it is.
        num_more: bytes behind them, for something else.
        alignment: of these bytes, counted from the first cache.

    Returns:
        The caches, and the bytes behind them, not initialized.
    """
    *starts, num_bytes = group_starts(groups)
    end = -(-num_bytes // alignment) * alignment
    memory = allocate(end + num_more, device)
    caches = tuple(
        PagedAttentionCache.over(metadata.sharded_over(None, None), memory[start:])
        for metadata, start in zip(groups, starts, strict=True)
    )
    if device != HOST:  # whose memory begins as zeros
        for cache in caches:
            cache.tensor[:1] = 0
    return caches, memory[end : end + num_more]


def views_of_layers(caches: Sequence[PagedAttentionCache]) -> list[PagedAttentionCacheView]:
    """Return each layer's view in the cache of its group, with the number of the group.

    Args:
        caches: of each cache group; at most one of them has KV of a layer.
    """
    views = list(caches[0].views)
    for group, cache in enumerate(caches):
        for index, spec in enumerate(cache.metadata.layers):
            if spec is not None:
                views[index] = cache.views[index]
                views[index].group = group
    return views
