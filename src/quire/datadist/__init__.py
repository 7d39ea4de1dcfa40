"""Moving KV caches between machines: the LLMDataDist interface over Quire's own transports.

A PROMPT listens and serves the caches of the prefill side; a DECODER links to it and pulls. docs/datadist.md
is the user's guide. The public names are imported when first used, so that torch loads only where needed.

`datadist/` moves KV, independently of the engine. `CachePool` is bookkeeping without sockets: the caches, and
what holds each (a handle, keys, transfers). A PROMPT has one thread that accepts and authenticates
connections without blocking on any (`PromptService`), and one thread for each link (`PromptLink`).
`DecoderLink` runs in the caller's thread; only a DECODER with caches has a thread for each link, which
receives the PROMPT's pushes (`PushReceiver`; the other end is `PushSender`). Between two MIX, both ends of a
link have both, and the side that made the link pushes over a separate connection. A link has a control
connection, whose messages are in `protocol.py`, and a `DataEnd` of the agreed transport on each side. A
transport (`transports/interface.py`) moves `ByteSpans`, the same spans of bytes of several tensors, from one
`CacheMemory` to another. Each side computes and checks its own spans, and never writes to or sends from an
address given by the other. With shared memory, a DECODER reads the file of a PROMPT's cache
(`shared_host_memory.py`) at offsets that it checks. Over NIXL, it reads spans given by the PROMPT;
`NixlAgent` calls the library in a separate thread, since it may hang. Only `memory.py` and
`registered_memory.py` handle devices. docs/datadist.md has the states of a link and the meaning of failures
at each step.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

TYPE_CHECKING = False  # as in `quire.lazy_attributes`

if TYPE_CHECKING:
    from quire.datadist.caches.cache_desc import CacheDesc
    from quire.datadist.caches.cache_keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
    from quire.datadist.caches.tensor import Tensor, TensorDesc
    from quire.datadist.enums import DataType, LLMRole, Placement
    from quire.datadist.interface.cache_tasks import (
        CacheTask,
        LayerSynchronizer,
        TransferConfig,
        TransferWithCacheKeyConfig,
    )
    from quire.datadist.interface.configs import LLMConfig, ModelConfig
    from quire.datadist.interface.configs import LLMConfig as LlmConfig
    from quire.datadist.interface.kv_cache import Cache, KvCache
    from quire.datadist.interface.kv_cache_manager import KvCacheManager
    from quire.datadist.interface.llm_datadist import LLMDataDist
    from quire.datadist.interface.llm_model import LLMModel
    from quire.datadist.interface.model_runner import ModelRunner, set_default_runner_factory
    from quire.datadist.peers import LLMClusterInfo, LLMReq
    from quire.datadist.status import LLMException, LLMStatusCode

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
    "BlocksCacheKey": "quire.datadist.caches.cache_keys",
    "Cache": "quire.datadist.interface.kv_cache",
    "CacheDesc": "quire.datadist.caches.cache_desc",
    "CacheKey": "quire.datadist.caches.cache_keys",
    "CacheKeyByIdAndIndex": "quire.datadist.caches.cache_keys",
    "CacheTask": "quire.datadist.interface.cache_tasks",
    "DataType": "quire.datadist.enums",
    "KvCache": "quire.datadist.interface.kv_cache",
    "KvCacheManager": "quire.datadist.interface.kv_cache_manager",
    "LLMClusterInfo": "quire.datadist.peers",
    "LLMConfig": "quire.datadist.interface.configs",
    "LLMDataDist": "quire.datadist.interface.llm_datadist",
    "LLMException": "quire.datadist.status",
    "LLMModel": "quire.datadist.interface.llm_model",
    "LLMReq": "quire.datadist.peers",
    "LLMRole": "quire.datadist.enums",
    "LLMStatusCode": "quire.datadist.status",
    "LayerSynchronizer": "quire.datadist.interface.cache_tasks",
    "LlmConfig": "quire.datadist.interface.configs",
    "ModelConfig": "quire.datadist.interface.configs",
    "ModelRunner": "quire.datadist.interface.model_runner",
    "Placement": "quire.datadist.enums",
    "Tensor": "quire.datadist.caches.tensor",
    "TensorDesc": "quire.datadist.caches.tensor",
    "TransferConfig": "quire.datadist.interface.cache_tasks",
    "TransferWithCacheKeyConfig": "quire.datadist.interface.cache_tasks",
    "set_default_runner_factory": "quire.datadist.interface.model_runner",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
