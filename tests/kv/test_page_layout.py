"""Pages whose layers differ: each byte has one owner, and a cache's views lie where the layout says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kv import KVLayerSpec, PagedAttentionCache, PagedAttentionCacheMetaData
from quire.kv.cache.view import PagedAttentionCacheView

SPECS = st.builds(
    KVLayerSpec, st.integers(1, 4), st.sampled_from([4, 8, 12]), st.sampled_from([4, 8, 12]), st.just(0)
)


def parts(view: PagedAttentionCacheView) -> list[torch.Tensor]:
    found = [view.key_pages, view.value_pages, view.key_scales, view.value_scales]
    return [part for part in found if part is not None]


def owners(cache: PagedAttentionCache) -> np.ndarray:
    """Return how many parts lie on each byte of block 1."""
    start = cache.tensor.data_ptr() + cache.bytes_per_block
    covered = np.zeros(cache.bytes_per_block, dtype=int)
    for view in cache.views:
        for part in parts(view) if view.is_initialized else []:
            block = part[:, 1]
            places = np.arange(block.element_size())
            for size, stride in zip(block.shape, block.stride(), strict=True):
                places = np.add.outer(np.arange(size) * stride * block.element_size(), places).ravel()
            covered[block.data_ptr() - start + places] += 1
    return covered


@given(
    layers=st.lists(st.none() | SPECS, min_size=1, max_size=4).filter(any),
    page_size=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"]),
)
def test_every_byte_belongs_to_one_part_of_one_layer(layers, page_size, dtype):
    metadata = PagedAttentionCacheMetaData.for_layers(layers, page_size=page_size, dtype=dtype, num_pages=3)
    cache = PagedAttentionCache.init_cache(None, metadata)
    assert (owners(cache) == 1).all()
    assert cache.bytes_per_block == metadata.bytes_per_block == page_size * metadata.bytes_per_token
    assert cache.nbytes == cache.tensor.nbytes == 3 * cache.bytes_per_block
    for spec, view in zip(layers, cache.views, strict=True):
        if spec is None:
            assert repr(view).endswith("Uninitialized)")
            continue
        assert view.key_pages.shape == (spec.num_kv_heads, 3, page_size, spec.key_head_dim)
        assert view.value_pages.shape == (spec.num_kv_heads, 3, page_size, spec.value_head_dim)
    cache.tensor.view(torch.uint8).zero_()
    for number, part in enumerate(
        part for view in cache.views if view.is_initialized for part in parts(view)
    ):
        part[:, 2] = number + 1
    cache.copy_blocks(np.array([[2, 0]], dtype=np.int32))
    for number, part in enumerate(
        part for view in cache.views if view.is_initialized for part in parts(view)
    ):
        assert part[:, 0].eq(number + 1).all()
        assert part[:, 1].eq(0).all()


def test_equal_layers_keep_the_shape_that_says_what_is_where():
    metadata = PagedAttentionCacheMetaData.for_layers(
        [KVLayerSpec(2, 8, 8), KVLayerSpec(2, 8, 8, window=16)], page_size=4, dtype="bfloat16", num_pages=5
    )
    cache = PagedAttentionCache.init_cache(None, metadata)
    assert cache.tensor.shape == (5, 2, 2, 2, 4, 8)
    for layer, view in enumerate(cache.views):
        for part, pages in enumerate((view.key_pages, view.value_pages)):
            assert pages.data_ptr() == cache.tensor[0, layer, part].data_ptr()
            assert pages.stride() == cache.tensor[:, layer, part].transpose(0, 1).stride()


def test_a_view_can_have_pages_of_its_own():
    metadata = PagedAttentionCacheMetaData.for_layers(
        [None, KVLayerSpec(2, 8, 4)], page_size=4, dtype="int8", num_pages=5
    )
    view = PagedAttentionCacheView.init(None, metadata, 1)
    assert repr(view) == (
        "PagedAttentionCacheView(layer_index=1, key_pages=(2, 5, 4, 8), value_pages=(2, 5, 4, 4))"
    )
    assert view.key_scales.shape == view.value_scales.shape == (2, 5, 4)
    assert not PagedAttentionCacheView.init(None, metadata, 0).is_initialized


def test_what_has_no_tensors_says_so():
    metadata = PagedAttentionCacheMetaData.for_layers(
        [KVLayerSpec(2, 8, 8)], page_size=4, dtype="float32", num_pages=5
    )
    empty = PagedAttentionCache.init_empty(metadata)
    assert [repr(view) for view in empty.views] == ["PagedAttentionCacheView(layer_index=0, Uninitialized)"]
    assert empty.metadata == metadata
    with pytest.raises(AttributeError, match=r"layer 0 has no key_pages: .*init_cache"):
        _ = empty.views[0].key_pages
    with pytest.raises(AttributeError, match=r"no tensor.*init_cache"):
        _ = empty.tensor
    with pytest.raises(AttributeError, match="no attribute 'pages'"):
        _ = empty.views[0].pages
    with pytest.raises(AttributeError, match="no views"):
        _ = PagedAttentionCache.init_empty().metadata
