"""The blocks of an engine's KV cache as peers read and fill them: of all its ranks, if there are several."""

from __future__ import annotations

import dataclasses

import torch

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.memory import CacheMemory, DeviceMemory
from quire.datadist.caches.registered_memory import memory_of_tensors
from quire.datadist.enums import DataType
from quire.kv.cache.page_layout import PageLayout
from quire.kv.cache.paged_cache import PagedAttentionCache
from quire.kv.peers.block_layouts import BlockLayouts, ShardLayout


def memory_of(kv_caches: PagedAttentionCache) -> CacheMemory:
    """Return the memory of the blocks, of all ranks if there are several.

    On a GPU, copies go beside the steps: blocks are read when the step that fills them has been computed, and
    written when those have that used them before.
    """
    shards = kv_caches.shards
    tensor = kv_caches.tensor if shards is None else shards.tensor
    uint8 = tensor.new_empty(0).byte().dtype
    flat = tensor.view(-1).view(uint8)
    shape = [len(tensor), len(flat) // len(tensor)]
    desc = CacheDesc(1, shape, DataType.DT_INT8)
    if flat.device.type == "cuda":
        stream = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        return DeviceMemory(desc, flat.device, [flat], stream=stream)
    return memory_of_tensors(desc, [flat])


def layouts_of(kv_caches: PagedAttentionCache) -> BlockLayouts:
    """Return how the blocks lie in this memory, and how those of peers go into them."""
    metadata, shards = kv_caches.metadata, kv_caches.shards
    as_sent = metadata if shards is None else metadata.replace(kv_head_shards=1)

    def layout_of(block_size: int) -> PageLayout:
        return dataclasses.replace(as_sent, page_size=block_size).page_layout()

    held = None
    if shards is not None:
        held = ShardLayout(metadata.page_layout(), shards.num_shards, shards.stride)
    return BlockLayouts(as_sent.page_layout(), layout_of, held)
