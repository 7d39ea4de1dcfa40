"""The rows of EasyDeL's paged attention cache: its names, and what the specification adds to them."""

from __future__ import annotations

ROWS: dict[str, list[str]] = {
    "PagedAttentionCacheMetaData": [
        "PagedAttentionCacheMetaData fields",
        "PagedAttentionCacheMetaData.create",
        "PagedAttentionCacheMetaData.create: hbm_bytes",
        "PagedAttentionCacheMetaData.create: num_pages_per_layer",
        "PagedAttentionCacheMetaData.create: num_pages_per_sequence",
        "PagedAttentionCacheMetaData.create: validation",
        "PagedAttentionCacheMetaData.create: KV heads over a mesh",
        "PagedAttentionCacheMetaData.to_dict, from_dict",
        "PagedAttentionCacheMetaData.to_json, from_json",
        "PagedAttentionCacheMetaData.replace",
    ],
    "PagedAttentionCache": [
        "PagedAttentionCache.views",
        "PagedAttentionCache.init_cache",
        "PagedAttentionCache.init_empty",
        "PagedAttentionCache.to_dict, from_dict",
        "PagedAttentionCache.to_json, from_json",
        "PagedAttentionCache.replace",
        "the engine's own cache is a PagedAttentionCache",
    ],
    "PagedAttentionCacheView": [
        "PagedAttentionCacheView: metadata, layer_index, key_pages, value_pages, kv_pages_sharding",
        "PagedAttentionCacheView.init",
        "PagedAttentionCacheView.concatenate_to_cache",
        "PagedAttentionCacheView.write_prefill_to_cache",
        "PagedAttentionCacheView.write_generate_to_cache",
        "PagedAttentionCacheView repr",
        "PagedAttentionCacheView.to_dict, from_dict",
        "PagedAttentionCacheView.to_json, from_json",
        "PagedAttentionCacheView.replace",
    ],
    "PagedAttentionCacheManager": [
        "PagedAttentionCacheManager.current_page_index",
        "PagedAttentionCacheManager.page_size",
        "PagedAttentionCacheManager.alloc_prefill_hbm_pages",
        "PagedAttentionCacheManager.alloc_hbm_pages",
        "PagedAttentionCacheManager.free_hbm_pages",
    ],
    "PagedAttentionMetadata": [
        "PagedAttentionMetadata fields",
        "PagedAttentionMetadata: the empty state",
        "PagedAttentionMetadata.to_dict, from_dict",
        "PagedAttentionMetadata.to_json, from_json",
        "PagedAttentionMetadata.replace",
    ],
    "Quantizers": [
        "quantizer: int8 per token and head",
        "quantizer: an object with quantize and dequantize",
        "quantizer: a callable",
    ],
}

ELSEWHERE: dict[str, str] = {
    "PagedAttentionCacheMetaData.create: KV heads over a mesh": "tests/kv/test_cache_metadata.py",
}

NOT_YET: dict[str, str] = {}
