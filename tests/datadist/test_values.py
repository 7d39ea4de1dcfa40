"""Values of the interface: types, ranges, configuration, tensors, descriptions and keys."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from conformance import row
from failing import fails_with
from sides import byte_desc, described, write_new_cache

import quire.datadist
from quire.datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMModel,
    LLMReq,
    LLMRole,
    LLMStatusCode,
    ModelConfig,
    ModelRunner,
    Placement,
    Tensor,
    TensorDesc,
)

UINT64_MAX = 2**64 - 1


@row("E3", "LLMConfig")
def test_sync_kv_timeout_is_a_positive_number_or_its_digits():
    config = LLMConfig()
    for value in (0, -5, "abc", "0", "-5", "", "1.5", 2**31):
        with pytest.raises(ValueError, match=r"\w"):
            config.sync_kv_timeout = value
    assert "llm.SyncKvCacheWaitTime" not in config.generate_options()
    config.sync_kv_timeout = "1500"
    assert config.generate_options() == {"llm.SyncKvCacheWaitTime": "1500"}
    config.sync_kv_timeout = 20
    assert config.generate_options() == {"llm.SyncKvCacheWaitTime": "20"}


@row("E4")
def test_device_id_is_one_id():
    config = LLMConfig()
    for value in ([0, 1], [], -1, (-1,)):
        with pytest.raises(ValueError, match=r"\w"):
            config.device_id = value
    for value in (0, [0], (0,)):
        config.device_id = value
        assert config.generate_options() == {"ge.exec.deviceId": "0"}


@row("E5", "LLMConfig")
def test_the_options_of_a_side():
    config = LLMConfig()
    assert config.generate_options() == {}
    config.listen_ip_info = "127.0.0.1:26000"
    config.device_id = 3
    config.sync_kv_timeout = 500
    config.ge_options = {"ge.flowGraphMemMaxSize": "1024", "ge.exec.deviceId": "9", "unknown": "kept"}
    assert config.generate_options() == {
        "llm.listenIpInfo": "127.0.0.1:26000",
        "ge.exec.deviceId": "3",
        "llm.SyncKvCacheWaitTime": "500",
        "ge.flowGraphMemMaxSize": "1024",
        "unknown": "kept",
    }
    assert config.listen_ip_info == "127.0.0.1:26000"
    assert config.ge_options["unknown"] == "kept"


@row("E5")
@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "127.0.0.1:", ":26000", "127.0.0.1:65536", "127.0.0.1:-1", "1.2.3:4", "a:b"]
)
def test_a_bad_listen_address_is_a_value_error(address):
    with pytest.raises(ValueError, match=r"\w"):
        LLMConfig().listen_ip_info = address


@row("E5", "ModelConfig")
def test_the_options_of_a_model():
    config = ModelConfig()
    assert config.generate_options() == {}
    config.kv_shapes = ["2,16,8", "2,16,8"]
    config.kv_dtypes = [DataType.DT_FLOAT16, DataType.DT_FLOAT16]
    assert config.generate_options() == {"llm.RefInputShapes": "2,16,8;2,16,8", "llm.RefInputDtypes": "1;1"}
    config.kv_seq_len_dim_index = 1
    config.enable_page_attention = False
    config.enable_shared_system_prefix = True
    config.om_paths = ["first.om", "second.om"]
    config.is_flow_model = False
    config.ge_options = {"llm.IsFlowModel": "1", "other": "x"}
    options = config.generate_options()
    assert options == {
        "llm.RefInputShapes": "2,16,8;2,16,8",
        "llm.RefInputDtypes": "1;1",
        "llm.RefInputSeqLenDimIndex": "1",
        "llm.EnablePagedAttention": "0",
        "llm.EnableSharedSystemPrefix": "1",
        "llm.OmCachePath": "first.om;second.om",
        "llm.IsFlowModel": "0",
        "other": "x",
    }
    assert list(config.kv_shapes) == ["2,16,8", "2,16,8"]
    assert list(config.kv_dtypes) == [DataType.DT_FLOAT16] * 2
    assert (config.kv_seq_len_dim_index, config.enable_page_attention) == (1, False)
    assert (config.enable_shared_system_prefix, config.is_flow_model) == (True, False)
    assert list(config.om_paths) == ["first.om", "second.om"]


@row("E6", "LLMClusterInfo")
def test_an_address_is_a_text_or_its_number():
    info = LLMClusterInfo()
    assert info.remote_cluster_id is None
    info.append_remote_ip_info("1.0.0.0", 7)
    info.append_remote_ip_info(1, 7)
    info.append_local_ip_info("4.3.2.1", 0)
    assert info.remote_ip_infos == ((1, 7), (1, 7))
    assert info.local_ip_infos == ((0x01020304, 0),)
    for address in ("1.2.3", "1.2.3.256", "1.2.3.4.5", "", "a.b.c.d", "1.2.3.-4", -1, 2**32):
        with pytest.raises(ValueError, match=r"\w"):
            info.append_remote_ip_info(address, 7)


@row("E7", "Tensor", "TensorDesc")
def test_a_tensor_must_match_its_description():
    array = np.zeros((2, 3), np.float32)
    assert Tensor(array, TensorDesc(DataType.DT_FLOAT, [2, 3])).tensor_desc.shape == [2, 3]
    for desc in (TensorDesc(DataType.DT_FLOAT, (3, 2)), TensorDesc(DataType.DT_INT32, (2, 3))):
        with pytest.raises(RuntimeError):
            Tensor(array, desc)
    with pytest.raises(TypeError):
        Tensor(np.zeros(3, np.complex64))


@row("E7")
def test_a_tensor_keeps_the_values_of_any_layout():
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    for array in (base.T, base[::2, ::-3], np.broadcast_to(base[:1], (3, 6)), np.asfortranarray(base)):
        np.testing.assert_array_equal(Tensor(array).numpy(), array)
    assert Tensor(base.T).tensor_desc.shape == [6, 4]
    np.testing.assert_array_equal(Tensor(Tensor(base)).numpy(), base)


@row("TensorDesc")
def test_the_shape_of_a_description_is_a_fresh_list():
    desc = TensorDesc(DataType.DT_INT8, (0, 2))
    desc.shape.append(5)
    assert desc.shape == [0, 2]
    assert desc.dtype is DataType.DT_INT8
    with pytest.raises(AttributeError):
        desc.dtype = DataType.DT_BOOL


@row("E8")
def test_a_tensor_does_not_follow_its_source():
    array = np.ones(4, np.float32)
    tensor = Tensor(array)
    array[:] = 2
    assert tensor.numpy().tolist() == [1] * 4
    tensor.numpy()[:] = 3
    assert array.tolist() == [2] * 4


@row("E9")
def test_numpy_shares_memory_unless_a_copy_is_wanted():
    tensor = Tensor(np.zeros(4, np.int64))
    tensor.numpy()[1] = 5
    copy = tensor.numpy(copy=True)
    assert copy.tolist() == tensor.numpy().tolist() == tensor.torch().tolist() == [0, 5, 0, 0]
    copy[1] = 6
    tensor.torch()[2] = 7
    assert tensor.numpy().tolist() == [0, 5, 7, 0]


@row("E9")
def test_bfloat16_is_widened_for_numpy_and_kept_for_torch(decoder):
    dm = decoder.kv_cache_manager
    cache = dm.allocate_cache(CacheDesc(1, [2, 2], DataType.DT_BF16))
    (tensor,) = dm.get_cache_tensors(cache)
    tensor.torch().copy_(torch.tensor([[1.5, -3.0], [2**100, 0.0]]))
    array = tensor.numpy()
    assert tensor.torch().dtype == torch.bfloat16
    assert array.dtype == np.float32
    assert array.tolist() == [[1.5, -3.0], [2**100, 0.0]]


@row("E10", "CacheDesc")
@pytest.mark.parametrize(
    "changes",
    [
        {"num_tensors": 0},
        {"shape": []},
        {"shape": [2, 0]},
        {"shape": [2, -3]},
        {"batch_dim_index": 2},
        {"seq_len_dim_index": 2},
        {"seq_len_dim_index": -2},
    ],
)
def test_an_impossible_cache_is_a_value_error(changes):
    with pytest.raises(ValueError, match=r"\w"):
        described(**changes)


@row("CacheDesc")
def test_what_a_cache_description_says():
    desc = CacheDesc(
        3, (5, 2, 4), DataType.DT_FLOAT16, Placement.HOST, seq_len_dim_index=1, kv_tensor_format="ND"
    )
    assert (desc.num_tensors, tuple(desc.shape), desc.data_type) == (3, (5, 2, 4), DataType.DT_FLOAT16)
    assert (desc.placement, desc.batch_dim_index, desc.seq_len_dim_index) == (Placement.HOST, 0, 1)
    assert desc.kv_tensor_format == "ND"
    assert (desc.batch_size, desc.tensor_bytes, desc.slot_bytes) == (5, 80, 16)
    plain = CacheDesc(1, [3], DataType.DT_INT8)
    assert (plain.placement, plain.seq_len_dim_index, plain.kv_tensor_format) == (Placement.DEVICE, -1, None)


@row("CacheDesc")
def test_the_batch_dimension_of_a_cache_is_the_first(decoder):
    dm = decoder.kv_cache_manager
    for allocate in (dm.allocate_cache, dm.allocate_blocks_cache):
        with fails_with(LLMStatusCode.LLM_PARAM_INVALID):
            allocate(described(batch_dim_index=1))


@row("E11", "CacheKey", "CacheKeyByIdAndIndex", "BlocksCacheKey")
def test_keys_are_values():
    pairs = [
        (CacheKey(cluster_id=1, req_id=2), CacheKey(1, 2)),
        (CacheKey(prompt_cluster_id=1, req_id=2, model_id=0), CacheKey(1, 2, prefix_id=UINT64_MAX)),
        (CacheKeyByIdAndIndex(1, 2), CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=0)),
        (BlocksCacheKey(1), BlocksCacheKey(cluster_id=1, model_id=0)),
        (BlocksCacheKey(prompt_cluster_id=1), BlocksCacheKey(1, 0)),
    ]
    for one, same in pairs:
        assert one == same
        assert hash(one) == hash(same)
        assert one.cluster_id == 1
    different = [CacheKey(1, 2), CacheKey(2, 2), CacheKey(1, 3), CacheKey(1, 2, 1), CacheKey(1, 2, 0, 5)]
    different += [CacheKeyByIdAndIndex(1, 2), CacheKeyByIdAndIndex(1, 2, 1), BlocksCacheKey(1, 2)]
    assert len(set(different)) == len(different)


@row("E11")
def test_keys_refuse_what_they_do_not_know_and_changes():
    for call in (
        lambda: CacheKey(1, 2, unknown=3),
        lambda: CacheKey(1, 2, cluster_id=1),
        lambda: CacheKey(req_id=2),
        lambda: CacheKey(1),
        lambda: CacheKeyByIdAndIndex(1, 2, unknown=3),
        lambda: BlocksCacheKey(1, unknown=3),
        BlocksCacheKey,
    ):
        with pytest.raises(TypeError):
            call()
    for key in (CacheKey(1, 2), CacheKeyByIdAndIndex(1, 2), BlocksCacheKey(1)):
        with pytest.raises(AttributeError):
            key.cluster_id = 5


@row("LLMReq")
def test_a_request_is_empty_unless_told_otherwise():
    req = LLMReq()
    assert (req.req_id, req.prefix_id) == (UINT64_MAX, UINT64_MAX)
    assert (req.prompt_length, req.prompt_cluster_id, req.decoder_cluster_id) == (0, 0, 0)
    req.req_id, req.prompt_length, req.prompt_cluster_id = 1, 2, 3
    req.decoder_cluster_id, req.prefix_id = 4, 5
    values = req.req_id, req.prompt_length, req.prompt_cluster_id, req.decoder_cluster_id, req.prefix_id
    assert values == (1, 2, 3, 4, 5)


STATUS_CODES = {
    "LLM_SUCCESS": 0,
    "LLM_WAIT_PROCESS_TIMEOUT": 1,
    "LLM_KV_CACHE_NOT_EXIST": 2,
    "LLM_REPEAT_REQUEST": 3,
    "LLM_REQUEST_ALREADY_COMPLETED": 4,
    "LLM_PARAM_INVALID": 5,
    "LLM_ENGINE_FINALIZED": 6,
    "LLM_NOT_YET_LINK": 7,
    "LLM_ALREADY_LINK": 8,
    "LLM_LINK_FAILED": 9,
    "LLM_UNLINK_FAILED": 10,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": 11,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": 12,
    "LLM_PROCESSING_LINK": 13,
    "LLM_DEVICE_OUT_OF_MEMORY": 14,
    "LLM_PREFIX_ALREADY_EXIST": 15,
    "LLM_PREFIX_NOT_EXIST": 16,
    "LLM_SEQ_LEN_OVER_LIMIT": 17,
    "LLM_NO_FREE_BLOCK": 18,
    "LLM_BLOCKS_OUT_OF_MEMORY": 19,
    "LLM_EXIST_LINK": 24,
    "LLM_FEATURE_NOT_ENABLED": 25,
    "LLM_TIMEOUT": 26,
    "LLM_LINK_BUSY": 27,
    "LLM_OUT_OF_MEMORY": 28,
    "LLM_FAILED": 255,
}


@row("LLMStatusCode", "status codes print as their names")
def test_status_codes():
    assert {code.name: code.value for code in LLMStatusCode} == STATUS_CODES
    code = LLMStatusCode.LLM_LINK_FAILED
    assert str(code) == f"{code}" == "LLMStatusCode.LLM_LINK_FAILED"


@row("LLMException")
def test_an_exception_has_a_code():
    assert LLMException("text").status_code is LLMStatusCode.LLM_FAILED
    error = LLMException("text", 5, status_code=LLMStatusCode.LLM_ALREADY_LINK)
    assert isinstance(error, RuntimeError)
    assert error.args == ("text", 5)
    assert error.status_code is LLMStatusCode.LLM_ALREADY_LINK
    with pytest.raises(AttributeError):
        error.status_code = LLMStatusCode.LLM_FAILED


DATA_TYPES = {
    "DT_FLOAT": (0, 4, torch.float32, "float32"),
    "DT_FLOAT16": (1, 2, torch.float16, "float16"),
    "DT_INT8": (2, 1, torch.int8, "int8"),
    "DT_INT32": (3, 4, torch.int32, "int32"),
    "DT_UINT8": (4, 1, torch.uint8, "uint8"),
    "DT_INT16": (6, 2, torch.int16, "int16"),
    "DT_UINT16": (7, 2, torch.uint16, "uint16"),
    "DT_UINT32": (8, 4, torch.uint32, "uint32"),
    "DT_INT64": (9, 8, torch.int64, "int64"),
    "DT_UINT64": (10, 8, torch.uint64, "uint64"),
    "DT_DOUBLE": (11, 8, torch.float64, "float64"),
    "DT_BOOL": (12, 1, torch.bool, "bool"),
    "DT_BF16": (27, 2, torch.bfloat16, None),
}


@row("DataType", "Placement", "LLMRole")
def test_enumerations():
    assert {dtype.name: dtype.value for dtype in DataType} == {k: v[0] for k, v in DATA_TYPES.items()}
    assert [(one.name, one.value) for one in Placement] == [("HOST", 0), ("DEVICE", 1)]
    assert (LLMRole.PROMPT, LLMRole.DECODER) == (1, 2)


@row("DataType")
@pytest.mark.parametrize("name", DATA_TYPES)
def test_a_data_type_in_caches_and_tensors(decoder, name):
    _, num_bytes, torch_dtype, numpy_name = DATA_TYPES[name]
    dtype = DataType[name]
    dm = decoder.kv_cache_manager
    desc = CacheDesc(2, [2, 3], dtype)
    assert (desc.slot_bytes, desc.tensor_bytes) == (3 * num_bytes, 6 * num_bytes)
    cache = write_new_cache(dm, desc, seed=1) if name != "DT_BOOL" else dm.allocate_cache(desc)
    view = dm.get_cache_tensors(cache, 1)[0]
    assert view.torch().dtype == torch_dtype
    assert view.tensor_desc.dtype is dtype
    if numpy_name:
        assert view.numpy().dtype == np.dtype(numpy_name)
        assert Tensor(np.zeros(3, numpy_name)).tensor_desc.dtype is dtype


METHODS = {
    LLMDataDist: {
        "init": ["options"],
        "finalize": [],
        "add_model": ["model_options", "model_runner"],
        "link_clusters": ["clusters", "timeout"],
        "unlink_clusters": ["clusters", "timeout", "force"],
        "complete_request": ["llm_req"],
        "check_link_status": ["remote_cluster_id"],
        "switch_role": ["role", "switch_options"],
    },
    KvCacheManager: {
        "is_initialized": [],
        "allocate_cache": ["cache_desc", "cache_keys"],
        "deallocate_cache": ["cache"],
        "remove_cache_key": ["cache_key"],
        "pull_cache": ["cache_key", "kv_cache", "batch_index", "size"],
        "copy_cache": ["dst", "src", "dst_batch_index", "src_batch_index", "offset", "size", "req_id"],
        "get_cache_tensors": ["cache", "tensor_index"],
        "allocate_blocks_cache": ["cache_desc", "blocks_cache_key"],
        "copy_blocks": ["cache", "copy_block_info"],
        "register_cache": ["cache_desc", "addrs"],
        "register_blocks_cache": ["cache_desc", "addrs", "blocks_cache_key"],
        "unregister_cache": ["cache_id"],
        "deallocate_blocks_cache": ["cache"],
        "swap_blocks": ["src_cache", "dst_cache", "pairs"],
        "transfer_cache_async": [
            "src_cache",
            "layer_synchronizer",
            "transfer_configs",
            "src_block_indices",
            "dst_block_indices",
            "dst_block_memory_size",
        ],
        "push_blocks": [
            "dst_cache_key",
            "src_cache",
            "src_blocks",
            "dst_blocks",
            "src_layer_range",
            "dst_layer_range",
            "tensor_num_per_layer",
        ],
        "push_cache": [
            "dst_cache_key",
            "src_cache",
            "src_batch_index",
            "src_layer_range",
            "dst_layer_range",
            "size",
            "tensor_num_per_layer",
        ],
        "pull_blocks": [
            "src_cache_key",
            "dst_cache",
            "src_blocks",
            "dst_blocks",
            "src_layer_range",
            "dst_layer_range",
            "tensor_num_per_layer",
        ],
    },
    LLMModel: {
        "predict": ["llm_req", "inputs"],
        "pull_kv": ["llm_req"],
        "merge_kv": ["llm_req", "batch_index", "batch_id"],
        "preload_prompt_prefix": ["llm_req", "inputs"],
        "release_prompt_prefix": ["llm_req"],
        "pull_blocks": ["llm_req", "prompt_blocks", "decoder_blocks"],
    },
    ModelRunner: {
        "run_model": ["kv_cache", "input_tensors"],
        "on_cache_allocated": ["kv_cache"],
        "on_cache_deallocated": ["kv_cache"],
    },
}


@row("LLMDataDist", "KvCacheManager", "LLMModel", "ModelRunner")
@pytest.mark.parametrize("cls", METHODS)
def test_methods_take_what_the_interface_list_says(cls):
    for name, expected in METHODS[cls].items():
        names = list(inspect.signature(getattr(cls, name)).parameters)[1:]
        assert names[: len(expected)] == expected, name


@row("ModelRunner")
def test_a_runner_has_to_run_a_model():
    with pytest.raises(TypeError):
        ModelRunner()


@row("LLMConfig", "LlmConfig")
def test_another_name_of_the_configuration():
    assert quire.datadist.LlmConfig is LLMConfig


@row("KvCache")
def test_what_a_cache_says(decoder):
    desc = byte_desc(num_tensors=3)
    cache = decoder.kv_cache_manager.allocate_cache(desc)
    (addresses,) = cache.per_device_tensor_addrs
    assert isinstance(cache, KvCache)
    assert cache.cache_id == 1
    assert (cache.cache_desc.num_tensors, cache.cache_desc.slot_bytes) == (3, desc.slot_bytes)
    assert len(set(addresses)) == 3
    with pytest.raises(AttributeError):
        cache.cache_id = 5
