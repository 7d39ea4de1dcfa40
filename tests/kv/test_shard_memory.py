"""KV heads divided among ranks: blocks travel as those of one process, and each rank finds its own heads."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.datadist.loans.loans import BlockPart
from quire.kv import KVLayerSpec, PagedAttentionCache, PagedAttentionCacheMetaData
from quire.kv.cache.page_layout import PageLayout, VectorFormat
from quire.kv.cache.shard_memory import ShardMemory
from quire.kv.peers import block_layouts
from quire.kv.peers.block_layouts import (
    BlockLayouts,
    GroupLayout,
    ShardLayout,
    conversion,
    layouts_of,
    memory_of,
)

NUM_BLOCKS = 9


class Ranks(PagedAttentionCache):
    """The cache of rank 0, and those of all ranks in the memory that they share."""

    def __init__(self, views, memory=None) -> None:
        super().__init__(views, memory)
        self.shard_memory: ShardMemory | None = None
        self.by_rank: list[PagedAttentionCache] = []

    @property
    def shards(self) -> ShardMemory | None:
        return self.shard_memory

    @classmethod
    def of(cls, metadata: PagedAttentionCacheMetaData) -> Ranks:
        with memory_file() as file:
            shards = ShardMemory(file, [metadata])
            elsewhere = ShardMemory(file, [metadata])  # as another process has it
        caches = [cls.over(metadata, elsewhere.of_rank(rank, 0)) for rank in range(metadata.kv_head_shards)]
        caches[0].shard_memory, caches[0].by_rank = shards, caches
        return caches[0]

    def parts(self, rank: int) -> list[torch.Tensor]:
        return parts_of(self.by_rank[rank])


@contextlib.contextmanager
def memory_file():
    file = os.memfd_create("test")
    try:
        yield file
    finally:
        os.close(file)


def parts_of(cache: PagedAttentionCache) -> list[torch.Tensor]:
    """Keys, values and their scales of each layer, [heads, blocks, tokens, ...]."""
    found = []
    for view in cache.views:
        if cache.metadata.layers[view.layer_index] is None:
            continue
        found += [view.key_pages, view.value_pages, view.key_scales, view.value_scales]
    return [part for part in found if part is not None]


def share(part: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    return part.chunk(num_ranks)[rank]


def raw(part: torch.Tensor) -> np.ndarray:
    return part.contiguous().view(torch.uint8).numpy()


def tokens_of(part: torch.Tensor, blocks: list[int]) -> np.ndarray:
    """The bytes of a part by token, [heads, tokens, ...]."""
    by_token = part[:, blocks].contiguous()
    heads, tokens = by_token.shape[0], len(blocks) * by_token.shape[2]
    return by_token.view(torch.uint8).reshape(heads, tokens, -1).numpy()


def places(spans) -> np.ndarray:
    return np.concatenate(
        [np.arange(at, at + length) for at, length in zip(spans.offsets, spans.lengths, strict=True)]
    )


@settings(max_examples=40)
@given(
    data=st.data(),
    num_sending=st.integers(1, 3),
    num_receiving=st.integers(1, 4),
    size=st.sampled_from([1, 4]),
    ratio=st.integers(1, 2),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
)
def test_each_rank_finds_the_tokens_of_its_heads(data, num_sending, num_receiving, size, ratio, dtype):
    heads = math.lcm(num_sending, num_receiving)
    specs = st.builds(
        KVLayerSpec, st.sampled_from([heads, 2 * heads]), st.sampled_from([4, 8]), st.sampled_from([4, 8])
    )
    layers = data.draw(st.lists(specs | st.none(), min_size=1, max_size=3).filter(any))
    metadata = PagedAttentionCacheMetaData.for_layers(
        layers, dtype=dtype, page_size=size, num_pages=NUM_BLOCKS
    )
    whole = PagedAttentionCache.init_cache(None, metadata)
    content = whole.tensor.view(torch.uint8).view(NUM_BLOCKS, -1).numpy()
    content[:] = np.random.default_rng(7).integers(0, 256, content.shape)
    sending = Ranks.of(dataclasses.replace(metadata, kv_head_shards=num_sending))
    for rank in range(num_sending):
        for mine, part in zip(sending.parts(rank), parts_of(whole), strict=True):
            mine.copy_(share(part, rank, num_sending))
    receiving = Ranks.of(dataclasses.replace(metadata, kv_head_shards=num_receiving, page_size=size * ratio))

    num_sent = data.draw(st.integers(1, 7))
    sources = data.draw(st.permutations(range(NUM_BLOCKS)))[:num_sent]
    targets = data.draw(st.permutations(range(NUM_BLOCKS)))[: -(-num_sent // ratio)]
    arriving = layouts_of([receiving]).arriving(np.array([targets]), range(num_sent), size)
    cuts = sorted({0, *data.draw(st.sets(st.sampled_from(metadata.page_layout().layer_ends))),
                   metadata.bytes_per_block})  # fmt: skip
    [sent_from], [received_in] = memory_of([sending]).tensor_bytes, memory_of([receiving]).tensor_bytes
    max_blocks = data.draw(st.integers(1, 7))
    for begin, end in itertools.pairwise(cuts):
        for part in BlockPart(0, num_sent, begin, end - begin).split(max_blocks):
            rows = np.array(sources)[part.first_block : part.first_block + part.num_blocks]
            sent = sent_from.numpy()[places(layouts_of([sending]).spans_of(rows[None], begin, end - begin))]
            assert (sent == content[rows, begin:end].ravel()).all()
            received_in.numpy()[places(arriving.spans_for(part))] = sent
    assert arriving.is_complete
    for rank in range(num_receiving):
        for mine, part in zip(receiving.parts(rank), parts_of(whole), strict=True):
            expected = tokens_of(share(part, rank, num_receiving), sources)
            found = tokens_of(mine, targets)
            assert (found[:, : num_sent * size] == expected).all()
            assert not found[:, num_sent * size :].any()
            assert not raw(mine[:, sorted(set(range(NUM_BLOCKS)) - set(targets))]).any()


def layout(num_heads: int) -> PageLayout:
    return PageLayout.of([KVLayerSpec(num_heads, 8, 8)], 4, lambda _: VectorFormat("int8", 8))


def test_ranks_must_have_all_heads():
    assert len(conversion(layout(4), ShardLayout([GroupLayout(layout(2))], 2, 1000)).lengths) == 4
    with pytest.raises(ValueError, match="4 heads are not 3 on each of 2"):
        conversion(layout(4), ShardLayout([GroupLayout(layout(3))], 2, 1000))


def test_so_many_blocks_are_sent_at_a_time_that_their_spans_fit_into_a_message(monkeypatch):
    monkeypatch.setattr(block_layouts, "MAX_SENT_SPANS", 10)
    assert BlockLayouts(layout(4), lambda _: layout(4)).max_sent_blocks == 10
    shards = ShardLayout([GroupLayout(layout(2))], 2, 1000)  # keys and values of two ranks
    divided = BlockLayouts(layout(4), lambda _: layout(4), shards)
    assert divided.max_sent_blocks == 2
    assert len(divided.spans_of(np.array([[3, 8]]), 0, divided.block_bytes).lengths) == 8
