"""The physical KV cache: its layout, its memory, and views of its layers.

One tensor, block-major: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`. All layers of a
block are one contiguous span, so that moving a block is one copy. `PagedAttentionCache`
(`kv/cache/paged_cache.py`) owns it and has a strided `PagedAttentionCacheView` of each layer, which is what
kernels take. `PagedAttentionCacheMetaData` says what the cache is and how large; the memory plan is made of
it. It has a `KVLayerSpec` for each layer: where layers differ in heads or head sizes, or have no KV, a block
is one span of bytes and `kv/cache/page_layout.py` says what is where in it. docs/paged-cache.md has the rest:
several devices, quantizers, saving.
"""
