"""EasyDeL's paged attention cache: its names, signatures and what they do."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance import row

from engine_checks import tiny_config
from quire.engine.core import EngineCore
from quire.engine.memory.plan import plan_memory
from quire.kv import (
    KVLayerSpec,
    PagedAttentionCache,
    PagedAttentionCacheManager,
    PagedAttentionCacheMetaData,
    PagedAttentionCacheView,
    PagedAttentionMetadata,
    PartitionAxis,
)
from quire.kv.cache import metadata as cache_metadata
from quire.kv.cache.memory_limits import MemoryLimit
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


@row(
    "PagedAttentionCacheMetaData.create",
    "PagedAttentionCacheMetaData fields",
)
@pytest.mark.parametrize("dtype", ["float32", torch.float32, np.float32, np.dtype("f4"), np.single])
def test_numbers_and_types_are_taken_as_numpy_has_them(dtype):
    made = create(**{name: np.int32(size) for name, size in SIZES.items()}, dtype=dtype)
    assert made == create(dtype="float32")
    assert made.replace(hbm_utilization=np.float32(0.5), hbm_bytes=np.float64(4e5)) == made
    assert PagedAttentionCacheMetaData.from_json(made.to_json()) == made
    for name in SIZES:
        for wrong in (np.bool_(True), np.float64(2.0), np.int64(0)):
            with pytest.raises(ValueError, match=f"{name} is "):
                create(**{name: wrong})


@row("PagedAttentionCacheMetaData.replace", "PagedAttentionCacheMetaData fields")
@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 5},
        {"num_kv_heads": 4, "kv_head_dim_size": 8},
        {"dtype": "int8", "page_size": 4},
        {"hbm_bytes": 1e9},
        {"hbm_bytes": 1234.5},
        {"partition_axis": PartitionAxis(head_axis="heads")},
    ],
)
def test_a_field_can_be_replaced_without_naming_layers(change):
    made = create()
    replaced = made.replace(**change)
    assert {name: getattr(replaced, name) for name in change} == change
    fields = {name: getattr(replaced, name) for name in FIELDS}
    assert PagedAttentionCacheMetaData(**fields) == replaced
    assert len(PagedAttentionCache.init_empty(replaced).views) == replaced.num_hidden_layers
    for again in (pickle.loads(pickle.dumps(replaced)), copy.deepcopy(replaced), copy.copy(replaced)):
        assert (again, hash(again)) == (replaced, hash(replaced))


@row("PagedAttentionCacheMetaData.replace")
def test_layers_that_differ_are_replaced_with_the_numbers_that_depend_on_them():
    layers = [KVLayerSpec(2, 8, 8), None]
    odd = PagedAttentionCacheMetaData.for_layers(layers, page_size=4, dtype="float32", num_pages=3)
    assert odd.replace(batch_size=7).layers == odd.layers
    with pytest.raises(ValueError, match="layers has 2 entries, and num_hidden_layers is 5"):
        odd.replace(num_hidden_layers=5)
    with pytest.raises(ValueError, match="num_kv_heads is 4, and the maximum over the layers is 2"):
        odd.replace(num_kv_heads=4)


@row("PagedAttentionCacheMetaData.to_dict, from_dict")
def test_metadata_is_read_from_its_own_fields_alone():
    made = create()
    data = {name: value for name, value in made.to_dict().items() if name in FIELDS}
    for axis in ({"head_axis": "tp"}, {"kv_head_axis": "tp"}, {}):
        assert PagedAttentionCacheMetaData.from_dict({**data, "partition_axis": axis}) == made
    assert PagedAttentionCacheMetaData.from_json(json.dumps({**data, "hbm_bytes": 4e5})) == made
    cache = PagedAttentionCache.init_empty(made)
    assert PagedAttentionCache.from_dict({**cache.to_dict(), "metadata": data}).metadata == made


@row("PagedAttentionCacheMetaData fields")
def test_the_axis_of_heads_has_two_names():
    assert PartitionAxis(head_axis="x") == PartitionAxis(kv_head_axis="x") == PartitionAxis("x")
    assert PartitionAxis().head_axis == "tp"
    assert pickle.loads(pickle.dumps(PartitionAxis(head_axis=None))) == PartitionAxis(None)
    with pytest.raises(ValueError, match="kv_head_axis is 'a', and head_axis 'b'"):
        PartitionAxis("a", head_axis="b")
    with pytest.raises(ValueError, match=r"head_axis is \('tp', 'sp'\)"):
        PartitionAxis(head_axis=("tp", "sp"))
    with pytest.raises(TypeError, match="batch_axis"):
        PartitionAxis(batch_axis="dp")


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
        cache = core.runner.kv_caches[0]
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


@row("PagedAttentionCacheView: metadata, layer_index, key_pages, value_pages, kv_pages_sharding")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_view_takes_only_pages_of_its_layer(dtype):
    made = create(dtype=dtype).replace(num_pages_per_layer=4)
    view = PagedAttentionCacheView.init(None, made, np.int64(1))
    parts = {"key_pages": view.key_pages, "value_pages": view.value_pages}
    if dtype == "int8":
        parts |= {"key_scales": view.key_scales, "value_scales": view.value_scales}
    again = PagedAttentionCacheView(made, 1, **parts)
    assert type(again.quantizer) is type(view.quantizer)
    assert PagedAttentionCacheView.from_json(again.to_json()).layer_index == 1
    for name, tensor in parts.items():
        for wrong in (None, tensor[..., :-1], tensor.double(), tensor[:1], tensor[:, :3], [1], 3):
            with pytest.raises(ValueError, match=f"{name} is .*layer 1 has .*4, 8"):
                PagedAttentionCacheView(made, 1, **{**parts, name: wrong})
    for index in (-1, 3, 1.0, True, None):
        with pytest.raises(ValueError, match=f"layer_index is {index}; the cache has layers 0 to 2"):
            PagedAttentionCacheView(made, index)


@row("PagedAttentionCacheView: metadata, layer_index, key_pages, value_pages, kv_pages_sharding")
def test_a_view_writes_to_arrays_of_numpy():
    made = create(dtype="float32").replace(num_pages_per_layer=4)
    pages = np.zeros((2, 2, 4, 8, 16), dtype=np.float32)
    view = PagedAttentionCacheView(made, 0, *pages)
    key, value = states(3)
    view.concatenate_to_cache(key, value, PagedAttentionMetadata([3], range(3), [[2]], [], []))
    np.testing.assert_array_equal(pages[0, :, 2, :3], key.transpose(0, 1))


@row("PagedAttentionCache.views", "PagedAttentionCacheView repr")
def test_a_cache_prints_its_shapes():
    cache = make_cache()
    assert repr(cache).count(f"key_pages={tuple(cache.views[0].key_pages.shape)}") == 3
    assert repr(PagedAttentionCache.init_empty(cache.metadata)).count("Uninitialized") == 3
    assert repr(PagedAttentionCache.init_empty()) == "PagedAttentionCache(Uninitialized)"
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert repr(again) == repr(cache)
        again.views[1].key_pages.fill_(7)
        assert again.tensor[:, 1, 0].eq(7).all()
        assert not cache.tensor.any()
    copy.copy(cache).views[1].key_pages.fill_(7)
    assert cache.views[1].key_pages.eq(7).all()


@row("PagedAttentionCacheView.write_prefill_to_cache")
def test_a_prompt_that_was_padded_is_written_to_its_length():
    view = make_cache().views[0]
    key, value = states(16)
    pages = PagedAttentionCacheManager(view.metadata).alloc_prefill_hbm_pages(12)
    step = PagedAttentionMetadata.init_empty().replace(
        prefill_length=np.int32(12), prefill_pos=np.arange(16), prefill_page_table=np.array([*pages, 0, 0])
    )
    view.write_prefill_to_cache(key, value, step)
    written = view.key_pages[:, pages].flatten(1, 2)
    assert torch.equal(written[:, :12], key[:12].transpose(0, 1))
    assert not written[:, 12:].any()
    assert not view.key_pages[:, 0].any()


@row("PagedAttentionCacheView.write_prefill_to_cache", "PagedAttentionCacheView.write_generate_to_cache")
def test_the_page_about_it_runs_and_attention_sees_no_padding(monkeypatch):
    monkeypatch.setattr(cache_metadata, "memory_limit", lambda: MemoryLimit(50_000_000, 50_000_000))
    page = (Path(__file__).parents[2] / "docs" / "paged-cache.md").read_text(encoding="utf-8")
    named: dict = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, named)
    view, [[own, _]] = named["view"], named["pages_so_far"]
    keys, values = (pages[:, own, :6].float() for pages in (view.key_pages, view.value_pages))
    query = named["query"].transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values).transpose(0, 1)
    torch.testing.assert_close(named["output"], expected, atol=2e-3, rtol=1e-3)


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
