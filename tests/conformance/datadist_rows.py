"""The rows of LLMDataDist: its names, the edge cases of its specification, and what its users rely on."""

from __future__ import annotations

_EDGE_CASES = {
    "Edge cases: types and configuration": range(1, 12),
    "Edge cases: life cycle and linking": range(12, 30),
    "Edge cases: contiguous caches": range(30, 57),
    "Edge cases: blocks": range(57, 63),
    "Edge cases: models": range(63, 79),
}

ROWS: dict[str, list[str]] = {
    "Names": [
        "LLMDataDist",
        "LLMRole",
        "LLMConfig",
        "LLMClusterInfo",
        "LLMStatusCode",
        "LLMException",
        "LLMReq",
        "LLMModel",
        "ModelConfig",
        "ModelRunner",
        "KvCacheManager",
        "KvCache",
        "Cache",
        "CacheDesc",
        "CacheKey",
        "CacheKeyByIdAndIndex",
        "BlocksCacheKey",
        "DataType",
        "Placement",
        "Tensor",
        "TensorDesc",
        "set_default_runner_factory",
        "LlmConfig",
    ],
    **{title: [f"E{number}" for number in numbers] for title, numbers in _EDGE_CASES.items()},
    "The second interface": [
        "register_cache",
        "register_blocks_cache",
        "unregister_cache",
        "create_cpu_cache",
        "swap_blocks",
        "deallocate_blocks_cache",
        "pull_blocks by any key",
        "LLMConfig of the second interface",
        "LLMDataDist.cache_manager",
        "switch_role",
        "check_link_status",
        "role MIX",
        "push_blocks",
        "push_cache",
        "transfer_cache_async",
        "CacheTask",
        "LayerSynchronizer",
        "TransferConfig",
        "TransferWithCacheKeyConfig",
    ],
    "What users rely on": [
        "a side may have the cluster id of its peer",
        "dropping the last reference to a KvCache deallocates it",
        "linking what is linked is no failure overall",
        "status codes print as their names",
        "any sequence or integer array is a list of blocks",
        "several addresses in one LLMClusterInfo are refused",
        "a forced unlink takes any number of clusters",
        "a PROMPT that restarts binds its port at once",
        "a pull after the PROMPT dropped the link",
    ],
}

ELSEWHERE: dict[str, str] = {}

NOT_YET: dict[str, str] = {}
