"""Paged KV caches for tests."""

from __future__ import annotations

import torch

from quire.kv import KVLayerSpec, PagedAttentionCache, PagedAttentionCacheMetaData
from quire.kv.cache.state_cache import StateCache
from quire.kv.cache.state_layout import StateLayout
from quire.models.config import ModelConfig


def make_cache(
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype | str,
    value_dim: int | None = None,
) -> PagedAttentionCache:
    """Return a cache whose layers are all alike; values are as long as keys without a `value_dim`."""
    spec = KVLayerSpec(num_kv_heads, head_dim, head_dim if value_dim is None else value_dim)
    metadata = PagedAttentionCacheMetaData.for_layers(
        [spec] * num_layers, page_size=block_size, dtype=dtype, num_pages=num_blocks
    )
    return PagedAttentionCache.init_cache(None, metadata)


def cache_of(model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> PagedAttentionCache:
    """Return a cache for the layers of a model."""
    metadata = PagedAttentionCacheMetaData.for_layers(
        model.kv_layers, page_size=block_size, dtype=dtype, num_pages=num_blocks
    )
    return PagedAttentionCache.init_cache(None, metadata)


def states_of(model: ModelConfig, num_slots: int, dtype: torch.dtype) -> StateCache | None:
    """Return states for a model's recurrent layers that hold no numbers; None: there are no such layers."""
    layout = StateLayout.of(model.state_layers, str(dtype).removeprefix("torch."))
    if not layout.bytes_per_state:
        return None
    memory = torch.empty(num_slots * layout.bytes_per_state, dtype=torch.uint8)
    states = StateCache(layout, memory, num_slots=num_slots)
    for layer in states.layers:
        for part in layer.values():
            part.fill_(torch.nan)
    return states
