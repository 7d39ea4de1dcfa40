"""Moving KV caches between machines: the LLMDataDist interface over transports of Quire's own.

A PROMPT listens and serves the caches of the prefill side; a DECODER links to it and pulls. docs/datadist.md
tells users how. The public names are imported when first used, so that torch loads only where tensors are.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

TYPE_CHECKING = False  # as in `quire.lazy_attributes`

if TYPE_CHECKING:
    from quire.datadist.cache_desc import CacheDesc
    from quire.datadist.cache_keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
    from quire.datadist.cache_tasks import (
        CacheTask,
        LayerSynchronizer,
        TransferConfig,
        TransferWithCacheKeyConfig,
    )
    from quire.datadist.configs import LLMConfig, ModelConfig
    from quire.datadist.configs import LLMConfig as LlmConfig
    from quire.datadist.enums import DataType, LLMRole, Placement
    from quire.datadist.kv_cache import Cache, KvCache
    from quire.datadist.kv_cache_manager import KvCacheManager
    from quire.datadist.llm_datadist import LLMDataDist
    from quire.datadist.llm_model import LLMModel
    from quire.datadist.model_runner import ModelRunner, set_default_runner_factory
    from quire.datadist.requests import LLMClusterInfo, LLMReq
    from quire.datadist.status import LLMException, LLMStatusCode
    from quire.datadist.tensor import Tensor, TensorDesc

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "KvCache",
    "KvCacheManager",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMModel",
    "LLMReq",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LlmConfig",
    "ModelConfig",
    "ModelRunner",
    "Placement",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "set_default_runner_factory",
]

_HOMES = {
    "BlocksCacheKey": "quire.datadist.cache_keys",
    "Cache": "quire.datadist.kv_cache",
    "CacheDesc": "quire.datadist.cache_desc",
    "CacheKey": "quire.datadist.cache_keys",
    "CacheKeyByIdAndIndex": "quire.datadist.cache_keys",
    "CacheTask": "quire.datadist.cache_tasks",
    "DataType": "quire.datadist.enums",
    "KvCache": "quire.datadist.kv_cache",
    "KvCacheManager": "quire.datadist.kv_cache_manager",
    "LLMClusterInfo": "quire.datadist.requests",
    "LLMConfig": "quire.datadist.configs",
    "LLMDataDist": "quire.datadist.llm_datadist",
    "LLMException": "quire.datadist.status",
    "LLMModel": "quire.datadist.llm_model",
    "LLMReq": "quire.datadist.requests",
    "LLMRole": "quire.datadist.enums",
    "LLMStatusCode": "quire.datadist.status",
    "LayerSynchronizer": "quire.datadist.cache_tasks",
    "LlmConfig": "quire.datadist.configs",
    "ModelConfig": "quire.datadist.configs",
    "ModelRunner": "quire.datadist.model_runner",
    "Placement": "quire.datadist.enums",
    "Tensor": "quire.datadist.tensor",
    "TensorDesc": "quire.datadist.tensor",
    "TransferConfig": "quire.datadist.cache_tasks",
    "TransferWithCacheKeyConfig": "quire.datadist.cache_tasks",
    "set_default_runner_factory": "quire.datadist.model_runner",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
