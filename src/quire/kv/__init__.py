"""Where keys and values live: the logical side (blocks, hashes) and the physical (tensors).

The public names are imported when first used, so that the logical side does not import torch.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

TYPE_CHECKING = False  # as in `quire.lazy_attributes`

if TYPE_CHECKING:
    from quire.kernels.attention.kv_quantizers import Float8PageQuantizer, Int8PageQuantizer, PageQuantizer
    from quire.kv.cache_metadata import PagedAttentionCacheMetaData
    from quire.kv.cache_view import PagedAttentionCacheView
    from quire.kv.head_sharding import PartitionAxis
    from quire.kv.page_layout import KVLayerSpec
    from quire.kv.page_manager import PagedAttentionCacheManager
    from quire.kv.paged_cache import PagedAttentionCache
    from quire.kv.step_metadata import PagedAttentionMetadata

__all__ = [
    "Float8PageQuantizer",
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
    "Int8PageQuantizer": "quire.kernels.attention.kv_quantizers",
    "KVLayerSpec": "quire.kv.page_layout",
    "PageQuantizer": "quire.kernels.attention.kv_quantizers",
    "PagedAttentionCache": "quire.kv.paged_cache",
    "PagedAttentionCacheManager": "quire.kv.page_manager",
    "PagedAttentionCacheMetaData": "quire.kv.cache_metadata",
    "PagedAttentionCacheView": "quire.kv.cache_view",
    "PagedAttentionMetadata": "quire.kv.step_metadata",
    "PartitionAxis": "quire.kv.head_sharding",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
