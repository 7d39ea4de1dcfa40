"""Arguments: of the wrong type, and out of their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance import row
from sides import byte_desc, cluster_info, described

from quire.datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMReq,
    LLMRole,
    ModelConfig,
    Tensor,
    TensorDesc,
)

U16 = (-1, 2**16)


U32 = (-1, 2**32)


U64 = (-1, 2**64)


I32_POSITIVE = (0, -1, 2**31)


SIZE = (0, -2, 2**63)


def set_on(make: Callable[[], Any], name: str) -> Callable[[Any], None]:
    return lambda value: setattr(make(), name, value)


def uninitialised() -> LLMDataDist:
    return LLMDataDist(LLMRole.DECODER, 2)


PEER = cluster_info(1, 26000)


# What takes an integer, and the nearest values outside its range. Where `None` is allowed, it is not refused.
INT_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "LLMDataDist.cluster_id": (lambda n: LLMDataDist(LLMRole.PROMPT, n), U64),
    "link_clusters.timeout": (lambda n: uninitialised().link_clusters([PEER], n), I32_POSITIVE),
    "unlink_clusters.timeout": (lambda n: uninitialised().unlink_clusters([PEER], n), I32_POSITIVE),
    "TensorDesc.shape": (lambda n: TensorDesc(DataType.DT_INT8, [2, n]), (-1,)),
    "LLMClusterInfo.remote_cluster_id": (set_on(LLMClusterInfo, "remote_cluster_id"), U64),
    "append_local_ip_info.port": (lambda n: LLMClusterInfo().append_local_ip_info("127.0.0.1", n), U16),
    "append_remote_ip_info.port": (lambda n: LLMClusterInfo().append_remote_ip_info("127.0.0.1", n), U16),
    "LLMConfig.device_id": (set_on(LLMConfig, "device_id"), (-1,)),
    "LLMConfig.device_id in a list": (lambda n: setattr(LLMConfig(), "device_id", [n]), (-1,)),
    "ModelConfig.kv_seq_len_dim_index": (set_on(ModelConfig, "kv_seq_len_dim_index"), (-1,)),
    "CacheDesc.num_tensors": (lambda n: described(num_tensors=n), (0, -1, 2**32)),
    "CacheDesc.shape": (lambda n: described(shape=(4, n)), (0, -1)),
    "CacheDesc.batch_dim_index": (lambda n: described(batch_dim_index=n), (-1, 2)),
    "CacheDesc.seq_len_dim_index": (lambda n: described(seq_len_dim_index=n), (-2, 2)),
    "CacheKey.prompt_cluster_id": (lambda n: CacheKey(n, 1), U64),
    "CacheKey.cluster_id": (lambda n: CacheKey(cluster_id=n, req_id=1), U64),
    "CacheKey.req_id": (lambda n: CacheKey(1, n), U64),
    "CacheKey.model_id": (lambda n: CacheKey(1, 1, n), U64),
    "CacheKey.prefix_id": (lambda n: CacheKey(1, 1, prefix_id=n), U64),
    "CacheKeyByIdAndIndex.cluster_id": (lambda n: CacheKeyByIdAndIndex(n, 1), U64),
    "CacheKeyByIdAndIndex.cache_id": (lambda n: CacheKeyByIdAndIndex(1, n), (2**63,)),
    "CacheKeyByIdAndIndex.batch_index": (lambda n: CacheKeyByIdAndIndex(1, 1, n), U32),
    "BlocksCacheKey.prompt_cluster_id": (BlocksCacheKey, U64),
    "BlocksCacheKey.model_id": (lambda n: BlocksCacheKey(1, n), U64),
    **{
        f"LLMReq.{name}": (lambda n, name=name: LLMReq(**{name: n}), U64)
        for name in ("req_id", "prompt_length", "prompt_cluster_id", "decoder_cluster_id", "prefix_id")
    },
    "LLMReq.req_id, set": (set_on(LLMReq, "req_id"), U64),
    "LLMReq.prefix_id, set": (set_on(LLMReq, "prefix_id"), U64),
}


def pulled(name: str) -> Callable[[KvCacheManager, KvCache, Any], None]:
    return lambda dm, cache, n: dm.pull_cache(CacheKey(1, 1), cache, **{name: n})


def copied(name: str) -> Callable[[KvCacheManager, KvCache, Any], None]:
    return lambda dm, cache, n: dm.copy_cache(cache, cache, **{name: n})


INT_ARGUMENTS_OF_A_MANAGER: dict[
    str, tuple[Callable[[KvCacheManager, KvCache, Any], None], tuple[int, ...]]
] = {
    "pull_cache.batch_index": (pulled("batch_index"), U32),
    "pull_cache.size": (pulled("size"), SIZE),
    "pull_cache.tensor_num_per_layer": (pulled("tensor_num_per_layer"), ()),
    "copy_cache.dst_batch_index": (copied("dst_batch_index"), U32),
    "copy_cache.src_batch_index": (copied("src_batch_index"), U32),
    "copy_cache.offset": (copied("offset"), (-1, 2**63)),
    "copy_cache.size": (copied("size"), SIZE),
    "get_cache_tensors.tensor_index": (lambda dm, cache, n: dm.get_cache_tensors(cache, n), (-1,)),
    "pull_blocks.prompt_blocks": (
        lambda dm, cache, n: dm.pull_blocks(BlocksCacheKey(1), cache, [n], [0]),
        U64,
    ),
    "pull_blocks.decoder_blocks": (
        lambda dm, cache, n: dm.pull_blocks(BlocksCacheKey(1), cache, [0], [n]),
        U64,
    ),
    "copy_blocks, source": (lambda dm, cache, n: dm.copy_blocks(cache, {n: [1]}), U64),
    "copy_blocks, destination": (lambda dm, cache, n: dm.copy_blocks(cache, {0: [n]}), U64),
}


@row("E1")
@pytest.mark.parametrize("name", INT_ARGUMENTS)
def test_what_is_no_int_is_a_type_error(name):
    call, _ = INT_ARGUMENTS[name]
    for value in (None, True, "1", 1.0):
        with pytest.raises(TypeError):
            call(value)


@row("E1")
@pytest.mark.parametrize("name", INT_ARGUMENTS_OF_A_MANAGER)
def test_what_is_no_int_is_a_type_error_for_a_manager(decoder, name):
    dm = decoder.kv_cache_manager
    cache = dm.allocate_blocks_cache(byte_desc()) if "blocks" in name else dm.allocate_cache(byte_desc())
    for value in (None, True, "1", 1.0):
        with pytest.raises(TypeError):
            INT_ARGUMENTS_OF_A_MANAGER[name][0](dm, cache, value)


@row("E1")
@pytest.mark.parametrize("name", ["src_cache_offset", "dst_cache_offset", "req_id"])
def test_an_int_that_may_be_none_may_be_nothing_else(decoder, name):
    dm = decoder.kv_cache_manager
    cache = dm.allocate_cache(byte_desc())
    call = copied(name) if name == "req_id" else pulled(name)
    for value in (True, "1"):
        with pytest.raises(TypeError):
            call(dm, cache, value)
    with pytest.raises(ValueError, match=r"\w"):
        call(dm, cache, -1)


@row("E1")
def test_timeouts_and_addresses_that_are_neither_ints_nor_texts_are_type_errors():
    for value in (None, True, 1.0):
        with pytest.raises(TypeError):
            LLMConfig().sync_kv_timeout = value
        with pytest.raises(TypeError):
            LLMClusterInfo().append_remote_ip_info(value, 1)


WRONG_TYPES: dict[str, Callable[[], Any]] = {
    "role": lambda: LLMDataDist("PROMPT", 1),
    "no role": lambda: LLMDataDist(None, 1),
    "dtype": lambda: TensorDesc(None, [1]),
    "data_type": lambda: described(data_type="DT_INT8"),
    "placement": lambda: described(placement=None),
    "shape": lambda: described(shape=None),
    "clusters": lambda: uninitialised().link_clusters(None),
    "cluster": lambda: uninitialised().link_clusters([None]),
    "force": lambda: uninitialised().unlink_clusters([PEER], force=1),
    "llm_req": lambda: uninitialised().complete_request(None),
    "options": lambda: uninitialised().init(None),
    "value of options": lambda: uninitialised().init({"ge.exec.deviceId": 0}),
    "model_options": lambda: uninitialised().add_model(None),
    "model_runner": lambda: uninitialised().add_model({}, print),
    "kv_shapes": lambda: setattr(ModelConfig(), "kv_shapes", "1,2"),
    "kv_dtypes": lambda: setattr(ModelConfig(), "kv_dtypes", [1.0]),
    "enable_page_attention": lambda: setattr(ModelConfig(), "enable_page_attention", 1),
    "ge_options": lambda: setattr(LLMConfig(), "ge_options", {"key": 1}),
    "listen_ip_info": lambda: setattr(LLMConfig(), "listen_ip_info", 26000),
    "data": lambda: Tensor([1, 2]),
}


@row("E1")
@pytest.mark.parametrize("name", WRONG_TYPES)
def test_other_wrong_types_are_type_errors(name):
    with pytest.raises(TypeError):
        WRONG_TYPES[name]()


@row("E1")
def test_a_manager_refuses_what_is_no_cache_and_no_key(decoder):
    dm = decoder.kv_cache_manager
    cache = dm.allocate_cache(byte_desc())
    for call in (
        lambda: dm.allocate_cache(None),
        lambda: dm.allocate_cache(byte_desc(), None),
        lambda: dm.allocate_cache(byte_desc(), [1]),
        lambda: dm.deallocate_cache(None),
        lambda: dm.remove_cache_key(BlocksCacheKey(1)),
        lambda: dm.pull_cache(None, cache),
        lambda: dm.pull_cache(BlocksCacheKey(1), cache),
        lambda: dm.pull_cache(CacheKey(1, 1), None),
        lambda: dm.copy_cache(cache, None),
        lambda: dm.get_cache_tensors(None),
        lambda: dm.pull_cache(CacheKey(1, 1), cache, src_layer_range=[0, 1]),
        lambda: dm.pull_cache(CacheKey(1, 1), cache, unknown=1),
        lambda: dm.copy_blocks(cache, [(0, 1)]),
        lambda: dm.pull_blocks(BlocksCacheKey(1), cache, None, []),
    ):
        with pytest.raises(TypeError):
            call()


@row("E2")
@pytest.mark.parametrize("name", INT_ARGUMENTS)
def test_an_int_out_of_range_is_a_value_error(name):
    call, values = INT_ARGUMENTS[name]
    for value in values:
        with pytest.raises(ValueError, match=r"\w"):
            call(value)


@row("E2")
@pytest.mark.parametrize("name", INT_ARGUMENTS_OF_A_MANAGER)
def test_an_int_out_of_range_is_a_value_error_for_a_manager(decoder, name):
    dm = decoder.kv_cache_manager
    cache = dm.allocate_blocks_cache(byte_desc()) if "blocks" in name else dm.allocate_cache(byte_desc())
    call, values = INT_ARGUMENTS_OF_A_MANAGER[name]
    for value in values:
        with pytest.raises(ValueError, match=r"\w"):
            call(dm, cache, value)


@row("E2")
def test_the_ends_of_a_range_and_other_integer_types_are_accepted():
    assert CacheKey(2**64 - 1, 0).prompt_cluster_id == 2**64 - 1
    assert LLMDataDist(LLMRole.PROMPT, 0).cluster_id == 0
    assert CacheKey(np.int64(7), np.uint8(8)) == CacheKey(7, 8)
    info = LLMClusterInfo()
    info.append_remote_ip_info("127.0.0.1", 65535)
    assert info.remote_ip_infos == ((0x0100007F, 65535),)
