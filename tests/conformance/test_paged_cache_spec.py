"""EasyDeL's paged attention cache: its names, signatures and what they do."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance import row
from engine_checks import tiny_config
from quire.engine.core import EngineCore
from quire.engine.memory_plan import plan_memory
from quire.kv import (
    KVLayerSpec,
    PagedAttentionCache,
    PagedAttentionCacheManager,
    PagedAttentionCacheMetaData,
    PagedAttentionCacheView,
    PagedAttentionMetadata,
    PartitionAxis,
    cache_metadata,
)
from quire.kv.memory_limits import MemoryLimit
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.hub import resolve_model

SIZES = {
    "batch_size": 2, "num_hidden_layers": 3, "max_sequences": 50, "page_size": 8, "num_kv_heads": 2,
    "kv_head_dim_size": 16,
}  # fmt: skip
FIELDS = [
    "partition_axis", "dtype", "batch_size", "num_hidden_layers", "num_pages_per_layer",
    "num_pages_per_sequence", "max_sequences", "page_size", "num_kv_heads", "kv_head_dim_size",
    "hbm_utilization", "hbm_bytes",
]  # fmt: skip


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(cache_metadata, "memory_limit", lambda: MemoryLimit(1_000_000, 900_000))


def create(**fields) -> PagedAttentionCacheMetaData:
    return PagedAttentionCacheMetaData.create(
        None, PartitionAxis(), **{**SIZES, "hbm_utilization": 0.5, **fields}
    )


def make_cache(**options) -> PagedAttentionCache:
    cache = PagedAttentionCache.init_cache(None, create(dtype="float32"), **options)
    cache.tensor.view(torch.uint8).zero_()
    return cache


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def states(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(2 * count * 32.0).view(2, count, 2, 16).unbind()


@row("PagedAttentionCacheMetaData fields")
def test_metadata_has_the_fields_in_order():
    assert parameters(PagedAttentionCacheMetaData)[: len(FIELDS)] == FIELDS


@row(
    "PagedAttentionCacheMetaData.create",
    "PagedAttentionCacheMetaData.create: hbm_bytes",
    "PagedAttentionCacheMetaData.create: num_pages_per_layer",
    "PagedAttentionCacheMetaData.create: num_pages_per_sequence",
)
def test_create_counts_the_pages_that_fit():
    assert parameters(PagedAttentionCacheMetaData.create) == [
        "mesh", "partition_axis", "batch_size", "num_hidden_layers", "max_sequences", "page_size",
        "num_kv_heads", "kv_head_dim_size", "hbm_utilization", "dtype",
    ]  # fmt: skip
    made = create()
    assert made.hbm_bytes == int(1_000_000 * 0.5) - 100_000
    assert made.num_pages_per_layer == (400_000 // 3) // (8 * 2 * 16 * 2 * 2)
    assert made.num_pages_per_sequence == 7


@row("PagedAttentionCacheMetaData.create: validation")
def test_create_names_what_is_wrong():
    for name in SIZES:
        with pytest.raises(ValueError, match=f"{name} is 0"):
            create(**{name: 0})
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"hbm_utilization is {share}"):
            create(hbm_utilization=share)
    with pytest.raises(ValueError, match="longest sequence that fits has 2 tokens"):
        create(hbm_utilization=(100_000 + 2 * 3 * 2 * 2 * 16 * 2 + 1) / 1_000_000)


@row(
    "PagedAttentionCacheMetaData.to_dict, from_dict",
    "PagedAttentionCacheMetaData.to_json, from_json",
    "PagedAttentionCacheMetaData.replace",
)
def test_metadata_is_plain_data():
    made = create()
    assert PagedAttentionCacheMetaData.from_dict(made.to_dict()) == made
    assert PagedAttentionCacheMetaData.from_json(made.to_json()) == made
    assert made.replace(batch_size=9).batch_size == 9


@row("PagedAttentionCache.init_cache", "PagedAttentionCache.views")
def test_a_cache_has_one_view_of_each_layer_over_one_tensor():
    assert parameters(PagedAttentionCache.init_cache) == [
        "mesh", "metadata", "quantizer", "kv_pages_sharding",
    ]  # fmt: skip
    cache = make_cache()
    pages = cache.metadata.num_pages_per_layer
    assert cache.tensor.shape == (pages, 3, 2, 2, 8, 16)
    for index, view in enumerate(cache.views):
        view.key_pages.fill_(index + 1)
        view.value_pages.fill_(-index - 1)
    for index in range(3):
        assert cache.tensor[:, index, 0].eq(index + 1).all()
        assert cache.tensor[:, index, 1].eq(-index - 1).all()


@row("PagedAttentionCache.init_empty")
def test_an_empty_cache_has_no_tensors():
    assert PagedAttentionCache.init_empty().views == []
    assert not any(view.is_initialized for view in PagedAttentionCache.init_empty(create()).views)


@row(
    "PagedAttentionCache.to_dict, from_dict",
    "PagedAttentionCache.to_json, from_json",
    "PagedAttentionCache.replace",
)
def test_a_cache_is_written_down(tmp_path: Path):
    cache = make_cache()
    cache.tensor[3] = 5
    again = PagedAttentionCache.from_json(cache.to_json(tmp_path / "kv"), tmp_path / "kv")
    assert torch.equal(again.tensor, cache.tensor)
    bare = PagedAttentionCache.from_dict(cache.to_dict())
    assert (bare.metadata, bare.views[0].is_initialized) == (cache.metadata, False)
    assert cache.replace(views=[]).views == []


@row("the engine's own cache is a PagedAttentionCache")
def test_the_engine_runs_on_it():
    config = tiny_config("mini", num_kv_blocks=16, max_num_seqs=1)
    path = resolve_model("mini")
    core = EngineCore(config, path)
    try:
        cache = core.runner.kv_cache
        assert isinstance(cache, PagedAttentionCache)
        assert all(isinstance(view, PagedAttentionCacheView) for view in cache.views)
        assert cache.metadata == plan_memory(config, read_model_config(path)).kv_caches[0]
        assert (cache.metadata.num_pages_per_layer, cache.metadata.batch_size) == (16, 1)
    finally:
        core.shutdown()


@row(
    "PagedAttentionCacheView: metadata, layer_index, key_pages, value_pages, kv_pages_sharding",
    "PagedAttentionCacheView.init",
    "PagedAttentionCacheView repr",
)
def test_a_view_is_of_one_layer():
    names = ["metadata", "layer_index", "key_pages", "value_pages", "kv_pages_sharding"]
    assert parameters(PagedAttentionCacheView)[:5] == names
    assert parameters(PagedAttentionCacheView.init) == [
        "mesh", "metadata", "layer_index", "quantizer", "kv_pages_sharding",
    ]  # fmt: skip
    made = create()
    view = PagedAttentionCacheView.init(None, made, 2)
    shape = (2, made.num_pages_per_layer, 8, 16)
    assert view.key_pages.shape == view.value_pages.shape == shape
    assert str(shape) in repr(view)
    again = PagedAttentionCacheView(*(getattr(view, name) for name in names))
    assert again.key_pages is view.key_pages
    assert "Uninitialized" in repr(PagedAttentionCacheView(made, 2))


@row("PagedAttentionCacheView.concatenate_to_cache")
def test_prompts_and_generated_tokens_are_written_in_place():
    view = make_cache().views[1]
    key, value = states(13)
    metadata = PagedAttentionMetadata([10, 2], [*range(10), 6, 7], [[4, 1], [3, 3]], [8], [[5, 7]])
    assert view.concatenate_to_cache(key, value, metadata) is view
    places = [(4, i) for i in range(8)] + [(1, 0), (1, 1), (3, 6), (3, 7), (7, 0)]
    for rows, pages in ((key, view.key_pages), (value, view.value_pages)):
        expected = np.zeros(pages.shape, dtype=np.float32)
        for place, states_of_token in zip(places, rows, strict=True):
            expected[:, place[0], place[1]] = states_of_token
        np.testing.assert_array_equal(pages, expected)


@row("PagedAttentionCacheView.write_prefill_to_cache", "PagedAttentionCacheView.write_generate_to_cache")
def test_the_two_halves_write_by_themselves():
    view = make_cache().views[0]
    key, value = states(3)
    metadata = PagedAttentionMetadata([2], [0, 1], [[4]], [2], [[4]])
    view.write_prefill_to_cache(key[:2], value[:2], metadata)
    assert not view.key_pages[:, 4, 2].any()
    view.write_generate_to_cache(key[2:], value[2:], metadata)
    assert torch.equal(view.key_pages[:, 4, :3], key.transpose(0, 1))
    assert torch.equal(view.value_pages[:, 4, :3], value.transpose(0, 1))


@row(
    "PagedAttentionCacheView.to_dict, from_dict",
    "PagedAttentionCacheView.to_json, from_json",
    "PagedAttentionCacheView.replace",
)
def test_a_view_is_written_down(tmp_path: Path):
    view = make_cache().views[1]
    view.key_pages.fill_(3)
    again = PagedAttentionCacheView.from_json(view.to_json(tmp_path / "kv"), tmp_path / "kv")
    assert torch.equal(again.key_pages, view.key_pages)
    assert PagedAttentionCacheView.from_dict(view.to_dict()).layer_index == 1
    assert view.replace(layer_index=2).layer_index == 2


@row(
    "PagedAttentionCacheManager.current_page_index",
    "PagedAttentionCacheManager.page_size",
    "PagedAttentionCacheManager.alloc_prefill_hbm_pages",
    "PagedAttentionCacheManager.alloc_hbm_pages",
    "PagedAttentionCacheManager.free_hbm_pages",
)
def test_pages_are_handed_out_and_come_back():
    manager = PagedAttentionCacheManager(create().replace(num_pages_per_layer=6))
    assert (manager.current_page_index, manager.page_size) == (0, 8)
    prompt, one = manager.alloc_prefill_hbm_pages(17), manager.alloc_hbm_pages(1)
    assert len(prompt) == 3
    assert sorted([*prompt, *one, *manager.alloc_hbm_pages(1)]) == [1, 2, 3, 4, 5]
    assert [manager.alloc_hbm_pages(n) for n in (1, 0, -1)] == [[], [], []]
    manager.free_hbm_pages([0, *prompt])
    assert sorted(manager.alloc_prefill_hbm_pages(24)) == sorted(prompt)


@row(
    "PagedAttentionMetadata fields",
    "PagedAttentionMetadata: the empty state",
    "PagedAttentionMetadata.to_dict, from_dict",
    "PagedAttentionMetadata.to_json, from_json",
    "PagedAttentionMetadata.replace",
)
def test_step_metadata_is_plain_data_with_an_empty_state():
    names = ["prefill_length", "prefill_pos", "prefill_page_table", "generate_pos", "generate_page_table"]
    assert parameters(PagedAttentionMetadata) == names
    empty = PagedAttentionMetadata.init_empty()
    assert all(np.all(getattr(empty, name) == 10**7) for name in names)
    made = empty.replace(generate_pos=[3], generate_page_table=[[1]])
    assert PagedAttentionMetadata.from_dict(made.to_dict()) == made
    assert PagedAttentionMetadata.from_json(made.to_json()) == made


class Rounding:
    def quantize(self, states):
        return states.round().to(torch.int16), None

    def dequantize(self, numbers, scales):
        return numbers.float()


@row(
    "quantizer: int8 per token and head",
    "quantizer: an object with quantize and dequantize",
    "quantizer: a callable",
)
def test_a_quantizer_makes_the_numbers_of_pages():
    key, value = (part * 0.1 for part in states(3))
    metadata = PagedAttentionMetadata([3], range(3), [[4]], [], [])
    rounded = make_cache(quantizer=Rounding()).views[0].concatenate_to_cache(key, value, metadata)
    assert torch.equal(rounded.key_pages[:, 4, :3], key.round().transpose(0, 1).to(torch.int16))
    halved = make_cache(quantizer=torch.Tensor.half).views[0]
    halved.concatenate_to_cache(key, value, metadata)
    assert torch.equal(halved.value_pages[:, 4, :3], value.half().transpose(0, 1))
    spec = KVLayerSpec(2, 16, 16)
    int8 = PagedAttentionCacheMetaData.for_layers([spec], page_size=8, dtype="int8", num_pages=5)
    view = PagedAttentionCache.init_cache(None, int8).views[0].concatenate_to_cache(key, value, metadata)
    scales = key.abs().amax(-1) / 127
    assert torch.equal(view.key_scales[:, 4, :3], scales.transpose(0, 1))
    numbers = key.div(scales[..., None]).nan_to_num().transpose(0, 1)
    assert (view.key_pages[:, 4, :3] - numbers).abs().max() <= 0.51
