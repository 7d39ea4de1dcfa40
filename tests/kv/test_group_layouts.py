"""Blocks of several cache groups: what is seen lands where the other engine looks for it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shard_memory import memory_file, parts_of, places, raw

from quire.datadist.loans.arriving_blocks import NO_BLOCK
from quire.datadist.loans.loans import BlockPart
from quire.kv import KVLayerSpec, PagedAttentionCache, PagedAttentionCacheMetaData
from quire.kv.blocks.groups import cache_groups
from quire.kv.cache.paged_cache import caches_on_device
from quire.kv.cache.shard_memory import ShardMemory
from quire.kv.peers.block_layouts import layouts_of, memory_of

NUM_BLOCKS = 6
SIZE = 4
HOST = torch.device("cpu")


class SharedByRanks(PagedAttentionCache):
    """Rank 0's cache of a group, and the memory of all ranks and groups."""

    shard_memory: ShardMemory | None = None

    @property
    def shards(self) -> ShardMemory | None:
        return self.shard_memory


class Side:
    """An engine's caches, by rank and group."""

    def __init__(self, layers, dtype: str, num_ranks: int) -> None:
        groups = cache_groups(layers, keeps_all=False)
        metadata = [
            PagedAttentionCacheMetaData.for_layers(
                group.layers,
                dtype=dtype,
                page_size=SIZE,
                num_pages=NUM_BLOCKS + number,
                kv_head_shards=num_ranks,
            )
            for number, group in enumerate(groups)
        ]
        if num_ranks == 1:
            self.by_rank = [caches_on_device(metadata, HOST)[0]]
        else:
            with memory_file() as file:
                shards = ShardMemory(file, metadata)
            self.by_rank = [
                [SharedByRanks.over(one, shards.of_rank(rank, group)) for group, one in enumerate(metadata)]
                for rank in range(num_ranks)
            ]
            for cache in self.by_rank[0]:
                cache.shard_memory = shards
        self.layouts, self.memory = layouts_of(self.by_rank[0]), memory_of(self.by_rank[0])

    @property
    def bytes(self) -> np.ndarray:
        [tensor] = self.memory.tensor_bytes
        return tensor.numpy()

    def of_group(self, group: int, part: int) -> np.ndarray:
        """A part of the layers of a group in all heads, [heads, blocks, tokens, ...] bytes."""
        return np.concatenate([raw(parts_of(caches[group])[part]) for caches in self.by_rank])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_every_byte_that_is_seen_lands_where_it_belongs(data, ranks):
    heads = math.lcm(*ranks)
    specs = st.builds(
        KVLayerSpec,
        st.sampled_from([heads, 2 * heads]),
        st.sampled_from([4, 8]),
        st.sampled_from([4, 8]),
        st.sampled_from([0, 3, 7]),
    )
    layers = data.draw(st.lists(specs | st.none(), min_size=1, max_size=5).filter(any))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int8"]))
    lender, borrower = (Side(layers, dtype, number) for number in ranks)
    num_groups = len(lender.by_rank[0])
    rng = np.random.default_rng(7)
    for caches in lender.by_rank:
        for cache in caches:
            content = cache.tensor.view(-1).view(torch.uint8).numpy()
            content[:] = rng.integers(1, 256, content.shape)

    count = data.draw(st.integers(1, NUM_BLOCKS - 1))
    moved = np.ones((num_groups, count), dtype=bool)
    for group in range(1, num_groups):  # windows see the last ones
        moved[group, : data.draw(st.integers(0, count))] = False
    sources, targets = (
        np.array([data.draw(st.permutations(range(1, NUM_BLOCKS)))[:count] for _ in range(num_groups)])
        for _ in range(2)
    )
    sent_ids, filled_ids = (np.where(moved, ids, NO_BLOCK) for ids in (sources, targets))
    ends = lender.layouts.layer_ends
    assert ends == borrower.layouts.layer_ends == tuple(sorted(ends))
    arriving = borrower.layouts.arriving(filled_ids, range(3, 3 + count), SIZE)
    cuts = sorted({0, *data.draw(st.sets(st.sampled_from(ends))), lender.layouts.block_bytes})
    num_sent = 0
    for begin, end in itertools.pairwise(cuts):
        for part in BlockPart(3, count, begin, end - begin).split(data.draw(st.integers(1, 5))):
            taken = slice(part.first_block - 3, part.first_block - 3 + part.num_blocks)
            spans = lender.layouts.spans_of(sent_ids[:, taken], begin, end - begin)
            into = arriving.spans_for(part)
            assert spans.num_bytes == into.num_bytes
            num_sent += spans.num_bytes
            if spans.num_bytes:
                borrower.bytes[places(into)] = lender.bytes[places(spans)]
    assert arriving.is_complete
    sizes = [sum(caches[group].bytes_per_block for caches in lender.by_rank) for group in range(num_groups)]
    assert arriving.num_bytes == num_sent == int(moved.sum(axis=1) @ sizes)

    for group in range(num_groups):
        for part in range(len(parts_of(lender.by_rank[0][group]))):
            sent, found = lender.of_group(group, part), borrower.of_group(group, part)
            expected = np.zeros_like(found)
            expected[:, targets[group, moved[group]]] = sent[:, sources[group, moved[group]]]
            assert (found == expected).all()


def test_blocks_of_another_size_are_refused_where_layers_have_windows():
    side = Side([KVLayerSpec(1, 4, 4, 0), KVLayerSpec(1, 4, 4, 7)], "float32", 1)
    with pytest.raises(ValueError, match="have 2 tokens, and these 4; they must be equally large"):
        side.layouts.arriving(np.array([[1], [1]]), range(2), 2)


def test_caches_of_several_allocations_are_refused():
    one, other = (Side([KVLayerSpec(1, 4, 4, 0)], "float32", 1) for _ in range(2))
    with pytest.raises(ValueError, match="not in one allocation"):
        memory_of([*one.by_rank[0], *other.by_rank[0]])
