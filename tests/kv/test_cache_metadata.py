"""What a paged cache is in numbers: its size by the memory there is, its layers, its share on each device."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from quire.kv import KVLayerSpec, PagedAttentionCache, PagedAttentionCacheMetaData, PartitionAxis
from quire.kv.cache import metadata as cache_metadata
from quire.kv.cache.memory_limits import MemoryLimit

SIZES = {
    "batch_size": 4,
    "num_hidden_layers": 6,
    "max_sequences": 100,
    "page_size": 16,
    "num_kv_heads": 4,
    "kv_head_dim_size": 64,
}
LIMIT, IN_USE = 10_000_000, 1_234_567


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_metadata, "memory_limit", lambda: MemoryLimit(LIMIT, LIMIT - IN_USE))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """2 x 4 devices, of which this process plays one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def create(mesh: DeviceMesh | None = None, **fields) -> PagedAttentionCacheMetaData:
    fields = {**SIZES, "hbm_utilization": 0.5, **fields}
    return PagedAttentionCacheMetaData.create(mesh, fields.pop("partition_axis", PartitionAxis()), **fields)


@pytest.mark.parametrize(
    ("dtype", "item"), [("bfloat16", 2), (torch.bfloat16, 2), (torch.float32, 4), ("float16", 2)]
)
@pytest.mark.parametrize("utilization", [0.2, 0.5, 0.99])
def test_pages_are_counted_as_the_specification_says(dtype: object, item: int, utilization: float):
    made = create(hbm_utilization=utilization, dtype=dtype)
    hbm_bytes = int(LIMIT * utilization) - IN_USE
    assert made.hbm_bytes == hbm_bytes
    assert made.num_pages_per_layer == (hbm_bytes // 6) // (16 * 4 * 64 * item * 2)
    assert made.num_pages_per_sequence == 7
    assert made.num_pages_per_layer * made.bytes_per_block <= hbm_bytes
    assert (made.max_sequences, made.hbm_utilization, made.batch_size) == (100, utilization, 4)


def test_bfloat16_is_the_default():
    assert create().dtype == "bfloat16"


def test_int8_has_scales_too():
    made = create(dtype="int8")
    assert made.bytes_per_token == 6 * 2 * 4 * (64 + 4)
    assert made.num_pages_per_layer == made.hbm_bytes // (16 * made.bytes_per_token)


def test_what_is_in_use_counts_once_the_limit_is_shared():
    assert create(hbm_utilization=0.5).hbm_bytes == LIMIT // 2 - IN_USE


@pytest.mark.parametrize("value", [0, -3, 2.0, True, None])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_is_not_positive_is_refused_by_name(name: str, value: object):
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; "):
        create(**{name: value})


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 1.5])
def test_a_utilization_out_of_range_is_refused_by_name(value: float):
    with pytest.raises(ValueError, match=rf"hbm_utilization is {value}"):
        create(hbm_utilization=value)


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match=r"dtype is 'int2'; .*bfloat16"):
        create(dtype="int2")
    with pytest.raises(ValueError, match=r"dtype is int8.*multiple of 4, and this is 6"):
        create(dtype="int8", kv_head_dim_size=6)
    with pytest.raises(ValueError, match=r"dtype is int4.*multiple of 8, and this is 12"):
        create(dtype="int4", kv_head_dim_size=12)


def test_no_page_that_fits_is_refused_with_the_numbers_and_the_longest_length():
    token = 6 * 4 * 64 * 2 * 2
    utilization = (IN_USE + 5.5 * token) / LIMIT
    with pytest.raises(ValueError, match=rf"{IN_USE:,} are in use.*{16 * token:,}.* 5 tokens; raise"):
        create(hbm_utilization=utilization)
    assert create(hbm_utilization=utilization, page_size=5).num_pages_per_layer == 1
    with pytest.raises(ValueError, match=" 0 tokens; raise"):
        create(hbm_utilization=0.1)


def test_heads_are_divided_over_their_mesh_axis(mesh: DeviceMesh):
    alone, made = create(), create(mesh)
    assert (made.kv_head_shards, made.kv_heads_per_rank(0)) == (4, 1)
    assert made.hbm_bytes == 4 * alone.hbm_bytes
    assert made.num_pages_per_layer == (made.hbm_bytes // 6) // (16 * 4 * 64 * 2 * 2)
    assert made.bytes_per_block == alone.bytes_per_block // 4
    cache = PagedAttentionCache.init_cache(mesh, made)
    assert cache.views[5].key_pages.shape == (1, made.num_pages_per_layer, 16, 64)
    assert cache.views[5].kv_pages_sharding == ("tp", None, None, None)
    over_two = create(mesh, partition_axis=PartitionAxis("dp"))
    assert (over_two.kv_head_shards, over_two.kv_heads_per_rank(0)) == (2, 2)


def test_heads_that_cannot_be_divided_are_everywhere_with_a_warning(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        made = create(mesh, num_kv_heads=6)
    assert "num_kv_heads 6 cannot be divided evenly over the 4 devices of the mesh axis 'tp'" in caplog.text
    alone = create(num_kv_heads=6)
    assert (made.kv_heads_per_rank(0), made.hbm_bytes) == (6, alone.hbm_bytes)
    assert made.num_pages_per_layer == alone.num_pages_per_layer
    view = PagedAttentionCache.init_cache(mesh, made).views[0]
    assert view.kv_pages_sharding == (None, None, None, None)
    assert view.key_pages.shape[0] == 6


def test_layers_are_divided_one_by_one(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture):
    layers = [KVLayerSpec(8, 16, 16), KVLayerSpec(3, 16, 32), None]
    made = PagedAttentionCacheMetaData.create_for_layers(
        mesh, PartitionAxis(), 1, layers, 64, 8, 0.5, "float32"
    )
    assert [made.kv_heads_per_rank(index) for index in range(3)] == [2, 3, 0]
    assert made.bytes_per_block == 8 * 4 * (2 * (16 + 16) + 3 * (16 + 32))
    assert made.num_pages_per_layer == (LIMIT // 2 - IN_USE) // made.bytes_per_block
    assert "num_kv_heads 3 cannot" in caplog.text


def test_pages_may_be_kept_whole_on_every_device(mesh: DeviceMesh):
    made = create(mesh, hbm_utilization=0.2)
    whole = PagedAttentionCache.init_cache(mesh, made, kv_pages_sharding=(None, None, None, None))
    assert whole.views[0].key_pages.shape[0] == 4
    assert whole.views[0].kv_pages_sharding == (None, None, None, None)
    with pytest.raises(ValueError, match=r"kv_pages_sharding is \(None, 'tp', None, None\)"):
        PagedAttentionCache.init_cache(mesh, made, kv_pages_sharding=(None, "tp", None, None))


def test_a_mesh_that_does_not_fit_is_refused(mesh: DeviceMesh):
    with pytest.raises(ValueError, match=r"kv_head_axis is 'heads'; the mesh has the axes \['dp', 'tp'\]"):
        create(mesh, partition_axis=PartitionAxis("heads"))
    with pytest.raises(ValueError, match="mesh has 4 devices along 'tp', and kv_head_shards is 1"):
        PagedAttentionCache.init_cache(mesh, create())
    elsewhere = type("Mesh", (), {"device_type": "cuda", "mesh_dim_names": ("tp",)})()
    with pytest.raises(ValueError, match="mesh has 'cuda' devices"):
        create(elsewhere)


def test_layers_that_differ_are_described_one_by_one():
    layers = [KVLayerSpec(2, 8, 8, window=128), None, KVLayerSpec(4, 24, 16)]
    made = PagedAttentionCacheMetaData.for_layers(layers, page_size=4, dtype="float32", num_pages=3)
    assert (made.num_hidden_layers, made.num_kv_heads, made.kv_head_dim_size) == (3, 4, 24)
    assert made.bytes_per_token == 4 * (2 * (8 + 8) + 4 * (24 + 16))
    assert made.hbm_bytes == 3 * made.bytes_per_block
    assert (made.max_sequences, made.num_pages_per_sequence) == (12, 3)
    with pytest.raises(ValueError, match=r"layers\[1\]\.value_head_dim is -1"):
        PagedAttentionCacheMetaData.for_layers(
            [None, KVLayerSpec(1, 4, -1)], page_size=4, dtype="float32", num_pages=3
        )
    with pytest.raises(ValueError, match="at least one layer must have keys and values"):
        PagedAttentionCacheMetaData.create_for_layers(None, PartitionAxis(), 1, [None], 64, 4, 0.9)
    with pytest.raises(ValueError, match="layers has 3 entries, and num_hidden_layers is 2"):
        made.replace(num_hidden_layers=2)
    with pytest.raises(ValueError, match="num_pages_per_layer is -1"):
        made.replace(num_pages_per_layer=-1)


def test_the_constructor_makes_equal_layers_by_itself():
    made = create()
    fields = {name: getattr(made, name) for name in made.to_dict() if name != "layers"}
    assert PagedAttentionCacheMetaData(**fields) == made


def test_it_is_written_down_and_read_back(mesh: DeviceMesh):
    layers = [KVLayerSpec(2, 8, 8, window=128), None, KVLayerSpec(4, 24, 16)]
    made = PagedAttentionCacheMetaData.create_for_layers(mesh, PartitionAxis(), 1, layers, 64, 8, 0.5)
    assert PagedAttentionCacheMetaData.from_dict(made.to_dict()) == made
    assert PagedAttentionCacheMetaData.from_json(made.to_json(indent=1)) == made
    assert PagedAttentionCacheMetaData.from_dict(create().to_dict()) == create()
    for data, message in (
        ({**made.to_dict(), "page_sise": 4}, "has no 'page_sise'; did you mean 'page_size'"),
        ({"page_size": 4}, "needs 'partition_axis', which is missing"),
        ({**made.to_dict(), "page_size": -4}, "page_size is -4"),
        ([], "made from a dictionary, and this is list"),
    ):
        with pytest.raises(ValueError, match=message):
            PagedAttentionCacheMetaData.from_dict(data)


SOMETHING = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=3)
    | st.just([])
    | st.just({})
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_it_is_read_from_only_sound_metadata_comes_out(data: st.DataObject):
    layers = [KVLayerSpec(2, 8, 8, window=128), None]
    plain = PagedAttentionCacheMetaData.for_layers(layers, page_size=4, dtype="int8", num_pages=3).to_dict()
    owner = data.draw(st.sampled_from([plain, plain["partition_axis"], plain["layers"][0]]))
    owner[data.draw(st.sampled_from([*owner, "other"]))] = data.draw(SOMETHING)
    try:
        made = PagedAttentionCacheMetaData.from_dict(plain)
    except ValueError as error:
        assert str(error)
    else:
        assert PagedAttentionCacheMetaData.from_json(made.to_json()) == made
        assert made.bytes_per_block > 0
