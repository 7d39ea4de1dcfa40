"""Caches and views, written down and read back, with their tensors and without."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from quire.kv import (
    KVLayerSpec,
    PagedAttentionCache,
    PagedAttentionCacheMetaData,
    PagedAttentionCacheView,
)

LAYERS = {
    "equal layers": [KVLayerSpec(2, 8, 8)] * 2,
    "layers that differ": [KVLayerSpec(2, 8, 4, window=16), None, KVLayerSpec(1, 12, 12)],
}


class Halves:
    def quantize(self, states):
        return states.to(torch.float16), None

    def dequantize(self, numbers, scales):
        return numbers.float()


class Others(Halves):
    pass


def make(layers: str = "equal layers", dtype: str = "float32", quantizer=None) -> PagedAttentionCache:
    metadata = PagedAttentionCacheMetaData.for_layers(
        LAYERS[layers], page_size=4, dtype=dtype, num_pages=3, batch_size=2
    )
    cache = PagedAttentionCache.init_cache(None, metadata, quantizer)
    random = np.random.default_rng(0).integers(0, 256, cache.nbytes, dtype=np.uint8)
    cache.tensor.view(torch.uint8).view(-1).copy_(torch.from_numpy(random))
    return cache


def content(cache: PagedAttentionCache) -> bytes:
    return cache.tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("layers", LAYERS)
def test_a_cache_comes_back_with_its_tensors(layers: str, dtype: str, tmp_path: Path):
    cache = make(layers, dtype)
    text = cache.to_json(tmp_path / "kv.safetensors", indent=1)
    again = PagedAttentionCache.from_json(text, tmp_path / "kv.safetensors")
    assert content(again) == content(cache)
    assert again.metadata == cache.metadata
    assert again.to_dict() == cache.to_dict()
    again.tensor.view(torch.uint8).zero_()
    twice = PagedAttentionCache.from_dict(cache.to_dict(), tmp_path / "kv.safetensors")
    assert content(twice) == content(cache), "the file is not the memory of what was read from it"
    assert [path.name for path in tmp_path.iterdir()] == ["kv.safetensors"]


def test_tensors_are_left_out_unless_asked_for(tmp_path: Path):
    cache = make("layers that differ", "int8")
    again = PagedAttentionCache.from_json(cache.to_json())
    assert not any(view.is_initialized for view in again.views)
    assert again.to_dict() == cache.to_dict()
    assert len(cache.to_json()) < 3000
    assert PagedAttentionCache.from_dict(PagedAttentionCache.init_empty().to_dict()).views == []
    for empty in (again, PagedAttentionCache.init_empty()):
        with pytest.raises(ValueError, match="no tensors to write to"):
            empty.to_dict(tmp_path / "kv.safetensors")
    with pytest.raises(ValueError, match="layer 0 has no tensors to write to"):
        again.views[0].to_dict(tmp_path / "kv.safetensors")


def test_the_layout_says_where_each_layer_lies():
    layout = json.loads(make("layers that differ", "int8").to_json())["layout"]
    assert layout["bytes_per_page"] == 4 * (2 * (8 + 4 + 4 + 4) + 2 * (12 + 4))
    assert layout["layers"][1] is None
    assert layout["layers"][2]["keys"]["offset"] == 4 * 2 * (8 + 4 + 4 + 4)
    assert layout["layers"][0]["values"] == {
        "format": {"dtype": "int8", "num_numbers": 4, "scale_dtype": "float32", "scale_shape": []},
        "num_heads": 2,
        "offset": 4 * 2 * (8 + 4),
        "scales_offset": 16,
        "head_bytes": 32,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_view_comes_back_with_its_pages(dtype: str, tmp_path: Path):
    view = make("layers that differ", dtype).views[2]
    again = PagedAttentionCacheView.from_json(view.to_json(tmp_path / "layer"), tmp_path / "layer")
    for name in ("key_pages", "value_pages", "key_scales"):
        ours, theirs = getattr(view, name), getattr(again, name)
        assert ours is theirs is None or torch.equal(
            ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
        )
    assert again.to_dict() == view.to_dict()
    bare = PagedAttentionCacheView.from_dict(view.to_dict())
    assert (bare.layer_index, bare.metadata) == (2, view.metadata)
    assert repr(bare) == "PagedAttentionCacheView(layer_index=2, Uninitialized)"
    with safe_open(tmp_path / "layer", framework="pt") as file:
        assert set(file.keys()) >= {"key_pages", "value_pages"}


def test_a_quantizer_of_ones_own_is_given_again(tmp_path: Path):
    cache, path = make(quantizer=Halves()), tmp_path / "kv"
    text = cache.to_json(path)
    again = PagedAttentionCache.from_json(text, path, quantizer=Halves())
    assert content(again) == content(cache)
    for wrong in (None, Others()):
        with pytest.raises(ValueError, match=r"written with the quantizer .*Halves, and quantizer is"):
            PagedAttentionCache.from_json(text, path, quantizer=wrong)
    with pytest.raises(ValueError, match=r"written with the quantizer None, and quantizer is .*Halves"):
        PagedAttentionCache.from_dict(make().to_dict(), quantizer=Halves())


def test_a_file_of_something_else_is_refused(tmp_path: Path):
    cache, path = make(), tmp_path / "kv"
    text = cache.to_json(path)
    with pytest.raises(FileNotFoundError):
        PagedAttentionCache.from_json(text, tmp_path / "none")
    other = make(dtype="bfloat16").to_dict()
    with pytest.raises(ValueError, match="does not hold the tensors of this cache"):
        PagedAttentionCache.from_dict(other, path)
    with pytest.raises(ValueError, match="does not hold the tensors of this cache"):
        PagedAttentionCacheView.from_dict(cache.views[0].to_dict(), path)
    whole = path.read_bytes()
    for broken in (b"", whole[:20], whole[:-1], b"\xff" * 100):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="cannot be read"):
            PagedAttentionCache.from_json(text, path)


def test_data_of_something_else_is_refused():
    data = make().to_dict()
    for wrong, message in (
        ({**data, "layer": 3}, "has no 'layer'"),
        ({"metadata": None}, "needs 'quantizer'"),
        ({**data, "layout": {**data["layout"], "bytes_per_page": 5}}, "the layout of pages is"),
        ({**data, "metadata": {**data["metadata"], "page_size": 0}}, "page_size is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            PagedAttentionCache.from_dict(wrong)
    view = make().views[1].to_dict()
    with pytest.raises(ValueError, match="layer_index is 2; the cache has layers 0 to 1"):
        PagedAttentionCacheView.from_dict({**view, "layer_index": 2})


def test_parts_can_be_replaced():
    cache = make()
    fewer = cache.replace(views=cache.views[:1])
    assert (len(fewer.views), fewer.tensor) == (1, cache.tensor)
    view = cache.views[0].replace(layer_index=1)
    assert (view.layer_index, view.key_pages) == (1, cache.views[0].key_pages)
    assert view.handles is not cache.views[0].handles
