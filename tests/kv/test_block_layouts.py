"""Blocks put together from smaller ones: each token's keys and values are where the larger cache looks."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.datadist.loans.loans import BlockPart
from quire.kv import KVLayerSpec, PagedAttentionCache, PagedAttentionCacheMetaData
from quire.kv.cache.page_layout import PageLayout, VectorFormat
from quire.kv.peers.block_layouts import BlockLayouts, GroupLayout, ShardLayout, conversion

SPECS = st.builds(
    KVLayerSpec, st.integers(1, 3), st.sampled_from([4, 8]), st.sampled_from([0, 4, 8]), st.just(0)
)


def cache_of(layers, dtype: str, page_size: int, num_pages: int) -> PagedAttentionCache:
    metadata = PagedAttentionCacheMetaData.for_layers(
        layers, dtype=dtype, page_size=page_size, num_pages=num_pages
    )
    cache = PagedAttentionCache.init_cache(None, metadata)
    cache.tensor.view(torch.uint8).zero_()
    return cache


def tokens_of(cache: PagedAttentionCache, pages: list[int]) -> list[np.ndarray]:
    """Return the bytes of each part of each layer by token: [heads, tokens, ...]."""
    found = []
    for view in cache.views:
        parts = [view.key_pages, view.value_pages, view.key_scales, view.value_scales]
        for part in (one for one in parts if one is not None):
            by_token = part[:, pages].contiguous()
            heads, tokens = by_token.shape[0], len(pages) * by_token.shape[2]
            found.append(by_token.view(torch.uint8).reshape(heads, tokens, -1).numpy())
    return found


def bytes_of(cache: PagedAttentionCache) -> np.ndarray:
    return cache.tensor.view(torch.uint8).reshape(-1).numpy()


@settings(max_examples=40)
@given(
    data=st.data(),
    layers=st.lists(SPECS, min_size=1, max_size=3),
    size=st.sampled_from([1, 2, 4]),
    ratio=st.integers(1, 3),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
)
def test_each_token_is_where_the_larger_cache_looks_for_it(data, layers, size, ratio, dtype):
    num_small = data.draw(st.integers(1, 7))
    num_large = -(-num_small // ratio)
    small, large = cache_of(layers, dtype, size, 9), cache_of(layers, dtype, size * ratio, 8)
    sources = data.draw(st.permutations(range(9)))[:num_small]
    targets = data.draw(st.permutations(range(8)))[:num_large]
    bytes_of(small)[:] = np.random.default_rng(7).integers(0, 256, small.nbytes)
    layouts = BlockLayouts(
        large.metadata.page_layout(),
        lambda page_size: dataclasses.replace(large.metadata, page_size=page_size).page_layout(),
    )
    first = ratio * data.draw(st.integers(0, 3))  # what comes before is there already
    arriving = layouts.arriving(np.array([targets]), range(first, first + num_small), size)
    cuts = sorted(
        {
            0,
            *data.draw(st.sets(st.sampled_from(small.metadata.page_layout().layer_ends))),
            small.bytes_per_block,
        }
    )
    done = data.draw(st.integers(0, num_small))
    for blocks in (range(done), range(done, num_small)):
        for begin, end in itertools.pairwise(cuts):
            if not blocks:
                continue
            rows = [sources[number] for number in blocks]
            content = bytes_of(small).reshape(9, -1)[rows, begin:end].ravel()
            spans = arriving.spans_for(BlockPart(first + blocks.start, len(blocks), begin, end - begin))
            places = [
                np.arange(at, at + length) for at, length in zip(spans.offsets, spans.lengths, strict=True)
            ]
            bytes_of(large)[np.concatenate(places)] = content
    assert arriving.is_complete
    expected, found = tokens_of(small, sources), tokens_of(large, targets)
    for one, other in zip(expected, found, strict=True):
        assert (one == other[:, : num_small * size]).all()
        assert not other[:, num_small * size :].any()
    others = np.delete(bytes_of(large).reshape(8, -1), targets, axis=0)
    assert not others.any()


def layout(page_size: int, scale: bool = False) -> PageLayout:
    vector = VectorFormat("int8", 5, "float32" if scale else "")
    return PageLayout.of([KVLayerSpec(2, 5, 5)], page_size, lambda _: vector)


@pytest.mark.parametrize(("small", "large"), [(4, 6), (8, 4), (0, 4)])
def test_blocks_that_are_no_part_of_the_larger_ones_are_refused(small, large):
    with pytest.raises(ValueError, match="no multiple of"):
        conversion(layout(small), ShardLayout([GroupLayout(layout(large))]))


def test_blocks_with_gaps_are_refused():
    assert conversion(layout(1), ShardLayout([GroupLayout(layout(4))])).ratio == 4
    with pytest.raises(ValueError, match="have gaps"):
        conversion(layout(1, scale=True), ShardLayout([GroupLayout(layout(4, scale=True))]))
