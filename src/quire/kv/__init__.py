"""Where keys and values live: the logical side (blocks, hashes) and the physical (tensors).

The public names are imported when first used, so that the logical side does not import torch.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

TYPE_CHECKING = False  # as in `quire.lazy_attributes`

if TYPE_CHECKING:
    from quire.kernels.attention.kv_quantizers import (
        Float8PageQuantizer,
        Int4PageQuantizer,
        Int8PageQuantizer,
        PageQuantizer,
    )
    from quire.kv.cache.head_sharding import PartitionAxis
    from quire.kv.cache.metadata import PagedAttentionCacheMetaData
    from quire.kv.cache.page_layout import KVLayerSpec
    from quire.kv.cache.page_manager import PagedAttentionCacheManager
    from quire.kv.cache.paged_cache import PagedAttentionCache
    from quire.kv.cache.step_metadata import PagedAttentionMetadata
    from quire.kv.cache.view import PagedAttentionCacheView

__all__ = [
    "Float8PageQuantizer",
    "Int4PageQuantizer",
    "Int8PageQuantizer",
    "KVLayerSpec",
    "PageQuantizer",
    "PagedAttentionCache",
    "PagedAttentionCacheManager",
    "PagedAttentionCacheMetaData",
    "PagedAttentionCacheView",
    "PagedAttentionMetadata",
    "PartitionAxis",
]

_HOMES = {
    "Float8PageQuantizer": "quire.kernels.attention.kv_quantizers",
    "Int4PageQuantizer": "quire.kernels.attention.kv_quantizers",
    "Int8PageQuantizer": "quire.kernels.attention.kv_quantizers",
    "KVLayerSpec": "quire.kv.cache.page_layout",
    "PageQuantizer": "quire.kernels.attention.kv_quantizers",
    "PagedAttentionCache": "quire.kv.cache.paged_cache",
    "PagedAttentionCacheManager": "quire.kv.cache.page_manager",
    "PagedAttentionCacheMetaData": "quire.kv.cache.metadata",
    "PagedAttentionCacheView": "quire.kv.cache.view",
    "PagedAttentionMetadata": "quire.kv.cache.step_metadata",
    "PartitionAxis": "quire.kv.cache.head_sharding",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
