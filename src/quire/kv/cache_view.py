"""One layer of a paged KV cache: what the kernels read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

from quire.kv.page_memory import PageMemory, page_quantizer

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from quire.kernels.page_quantizers import PageQuantizer
    from quire.kv.cache_metadata import PagedAttentionCacheMetaData, PagesSharding


class PagedAttentionCacheView:
    """Keys and values of one layer, in pages.

    Without pages the view is uninitialized: it says what the layer is, and a use of its pages raises
    AttributeError. So is the view of a layer that has no KV.

    Args:
        metadata: of the cache.
        layer_index: number of the layer.
        key_pages: (num_kv_heads, num_pages, page_size, head_dim). Places that were never written may hold
            anything.
        value_pages: likewise.
        kv_pages_sharding: how the pages are divided among devices; None: as `metadata` says.
        key_scales: (num_kv_heads, num_pages, page_size, ...) of a quantizer that has scales.
        value_scales: likewise.
        quantizer: makes the pages' numbers out of keys and values; None: they are rounded to the pages' type.
    """

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    quantizer: PageQuantizer | None
    handles: dict[str, Any]

    def __init__(
        self,
        metadata: PagedAttentionCacheMetaData,
        layer_index: int,
        key_pages: torch.Tensor | None = None,
        value_pages: torch.Tensor | None = None,
        kv_pages_sharding: PagesSharding | None = None,
        *,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
        quantizer: PageQuantizer | None = None,
    ) -> None:
        self.metadata = metadata
        self.layer_index = layer_index
        self.kv_pages_sharding = kv_pages_sharding or metadata.pages_sharding(layer_index)
        if key_pages is not None and value_pages is not None:
            self.key_pages, self.value_pages = key_pages, value_pages
        self.key_scales, self.value_scales = key_scales, value_scales
        self.quantizer = quantizer
        self.handles = {}

    @classmethod
    def init(
        cls,
        mesh: DeviceMesh | None,
        metadata: PagedAttentionCacheMetaData,
        layer_index: int,
        quantizer: object | None = None,
        kv_pages_sharding: PagesSharding | None = None,
    ) -> Self:
        """Return a view of one layer with pages of its own.

        Args:
            mesh: as for `PagedAttentionCache.init_cache`.
            metadata: of the cache.
            layer_index: number of the layer.
            quantizer: as for `PagedAttentionCache.init_cache`.
            kv_pages_sharding: as for `PagedAttentionCache.init_cache`.

        Raises:
            ValueError: as `PagedAttentionCache.init_cache` does.
        """
        metadata = metadata.sharded_over(mesh, kv_pages_sharding)
        own = page_quantizer(metadata.dtype, quantizer)
        return cls.over(PageMemory(metadata.of_layer(layer_index), own), metadata, layer_index, own)

    @classmethod
    def over(
        cls,
        memory: PageMemory,
        metadata: PagedAttentionCacheMetaData,
        layer_index: int,
        quantizer: PageQuantizer | None,
    ) -> Self:
        """Return the view of a layer over memory that has all layers, or only this one."""
        layers = memory.layout.layers
        layout = layers[layer_index if len(layers) > 1 else 0]
        if layout is None:
            return cls(metadata, layer_index)
        return cls(
            metadata,
            layer_index,
            memory.numbers(layout.keys),
            memory.numbers(layout.values),
            key_scales=memory.scales(layout.keys),
            value_scales=memory.scales(layout.values),
            quantizer=quantizer,
        )

    @property
    def is_initialized(self) -> bool:
        """Whether the view has pages."""
        return "key_pages" in self.__dict__

    def __getattr__(self, name: str) -> NoReturn:
        """Say what is missing; called only for attributes that are not set."""
        if name in ("key_pages", "value_pages"):
            raise AttributeError(
                f"layer {self.layer_index} has no {name}: its view is uninitialized; "
                "PagedAttentionCache.init_cache() makes pages for each layer that has KV"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        pages = "Uninitialized"
        if self.is_initialized:
            pages = f"key_pages={tuple(self.key_pages.shape)}, value_pages={tuple(self.value_pages.shape)}"
        return f"{type(self).__name__}(layer_index={self.layer_index}, {pages})"
