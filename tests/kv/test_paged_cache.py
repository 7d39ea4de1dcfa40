"""The KV cache's memory: what lies where, for every type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from caches import make_cache
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.reference import write_kv
from quire.kv import KVLayerSpec, PagedAttentionCache, PagedAttentionCacheMetaData, PagedAttentionCacheView
from quire.kv.connectors.host_blocks import TensorBlocks
from quire.models.config import ModelConfig
from quire.models.layer import LayerConfig
from quire.models.layers.attention import AttentionConfig

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
SHAPE = {"num_blocks": 5, "num_layers": 3, "num_kv_heads": 2, "block_size": 4, "head_dim": 8}


def _filled(dtype: torch.dtype) -> PagedAttentionCache:
    """Return a cache that holds tokens 0 to 15 in blocks 0 to 3, different ones in each layer."""
    cache = make_cache(**SHAPE, dtype=dtype)
    batch = AttentionBatch.build(np.array([0]), np.array([16]), np.array([[0, 1, 2, 3]]), 4)
    generator = torch.Generator().manual_seed(0)
    for layer in range(3):
        key, value = torch.randn(2, 16, 2, 8, generator=generator)
        write_kv(key, value, cache.views[layer], batch)
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_one_span_that_holds_all_of_it(dtype: torch.dtype) -> None:
    cache = make_cache(**SHAPE, dtype=dtype)
    assert cache.tensor[0].is_contiguous()
    assert cache.tensor[0].nbytes == cache.bytes_per_block
    assert cache.nbytes == cache.tensor.nbytes
    start = cache.tensor.data_ptr() + cache.bytes_per_block
    covered = np.zeros(cache.bytes_per_block, dtype=int)
    for index in range(3):
        layer = cache.views[index]
        for part in (layer.key_pages, layer.value_pages, layer.key_scales, layer.value_scales):
            if part is not None:
                where = part[:, 1].data_ptr() - start + _byte_places(part[:, 1])
                covered[where] += 1
    assert (covered == 1).all()


def _byte_places(part: torch.Tensor) -> np.ndarray:
    """Return where the bytes of a strided tensor lie, relative to its first."""
    places = np.arange(part.element_size())
    for size, stride in zip(part.shape, part.stride(), strict=True):
        places = np.add.outer(np.arange(size) * stride * part.element_size(), places).ravel()
    return places


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_metadata_of_a_model_counts_the_same_bytes(dtype: torch.dtype) -> None:
    cache = make_cache(**SHAPE, dtype=dtype)
    model = ModelConfig(layers=(LayerConfig((AttentionConfig(num_kv_heads=2, head_dim=8),)),) * 3)
    metadata = PagedAttentionCacheMetaData.for_layers(
        model.kv_layers, page_size=4, dtype=str(dtype).removeprefix("torch."), num_pages=5
    )
    assert metadata == cache.metadata
    assert metadata.bytes_per_block == 4 * metadata.bytes_per_token == cache.bytes_per_block


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_saved_blocks_are_whole(dtype: torch.dtype) -> None:
    cache = _filled(dtype)
    before = cache.tensor.clone()
    cache.copy_blocks(np.array([[1, 4], [4, 1], [2, 0]], dtype=np.int32))
    for source, target in ((1, 4), (2, 0), (2, 2), (3, 3)):
        assert torch.equal(cache.tensor[target].view(torch.uint8), before[source].view(torch.uint8))
    blocks = TensorBlocks(cache)
    content = np.empty(blocks.bytes_per_block, dtype=np.uint8)
    blocks.read_block(4, content)
    assert content.nbytes == cache.bytes_per_block
    blocks.write_block(3, content)
    assert torch.equal(cache.tensor[3].view(torch.uint8), before[1].view(torch.uint8))


def test_an_int8_cache_holds_numbers_and_scales() -> None:
    layer = _filled(torch.int8).views[2]
    assert layer.key_pages.dtype == layer.value_pages.dtype == torch.int8
    assert layer.key_scales is not None
    assert layer.key_scales.shape == (2, 5, 4)
    assert layer.key_pages[:, :4].abs().amax(-1).eq(127).all()
    assert layer.key_scales.data_ptr() % 4 == 0


def test_int8_needs_room_for_aligned_scales() -> None:
    with pytest.raises(ValueError, match="multiple of 4, and this is 6"):
        make_cache(2, 1, 1, 4, 6, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_the_values_are_kept_and_saved_once(dtype: torch.dtype, tmp_path: Path) -> None:
    metadata = PagedAttentionCacheMetaData.for_layers(
        [KVLayerSpec(1, 8, 0)] * 2, page_size=4, dtype=dtype, num_pages=3
    )
    cache = PagedAttentionCache.init_cache(None, metadata)
    scales = 4 * (dtype == torch.int8)
    assert metadata.bytes_per_token == 2 * (8 * dtype.itemsize + scales)
    view = cache.views[1]
    assert view.value_pages is view.key_pages
    view.key_pages.copy_(torch.arange(96).view(1, 3, 4, 8))
    copy = PagedAttentionCacheView.from_dict(
        view.to_dict(tmp_path / "view.safetensors"), tmp_path / "view.safetensors"
    )
    assert torch.equal(copy.key_pages, view.key_pages)
    assert copy.value_pages is copy.key_pages
    assert load_file(tmp_path / "view.safetensors").keys() == {"key_pages", *["key_scales"] * bool(scales)}
