"""A model on the prefill side: computes prompts, and publishes their KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.datadist.argument_checks import UINT64_MAX
from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.cache_holds import PooledCache
from quire.datadist.caches.cache_keys import BlocksCacheKey, CacheKey
from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.copies import copy_slot
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.interface.kv_cache import KvCache, kv_cache_of
from quire.datadist.interface.kv_cache_manager import KvCacheManager
from quire.datadist.interface.model_runner import ModelRunner
from quire.datadist.interface.options import ModelOptions
from quire.datadist.peers import LLMReq
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid


class PromptModel:
    """A model of a PROMPT. Without paging, each prediction has its own cache.

    Args:
        cluster_id: cluster id of the PROMPT.
        model_id: id of the model.
        options: options of the model.
        runner: computes it.
        manager: whose calls wait for each other.
        pool: pool of the caches.
    """

    def __init__(
        self,
        cluster_id: int,
        model_id: int,
        options: ModelOptions,
        runner: ModelRunner,
        *,
        manager: KvCacheManager,
        pool: CachePool[CacheMemory],
    ) -> None:
        self._cluster_id = cluster_id
        self._model_id = model_id
        self._options = options
        self._runner = runner
        self._manager = manager
        self._pool = pool
        self._paged_cache = self._allocate_blocks() if options.is_paged else None

    def predict(self, requests: Sequence[LLMReq], inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Compute prompts; their keys can be pulled afterwards."""
        if self._paged_cache is not None:
            if not requests:
                raise invalid("there is no request")
            return self._runner.run_model(self._paged_cache, inputs, **kwargs)
        with self._manager.call():
            self._check(requests)
            cache = self._pool.allocate(self._options.desc, is_of_model=True)
        try:
            with self._manager.call():
                self._copy_prefixes(cache, requests)
            result = self._run_and_bind(cache, [self._key(one) for one in requests], inputs, kwargs)
        finally:
            self._pool.release_handle(cache.cache_id)
        return result

    def preload_prefix(self, request: LLMReq, inputs: Any, kwargs: dict[str, Any]) -> None:
        """Compute a prefix, and keep it under `prefix_id`."""
        key = self._prefix_key(request)
        with self._manager.call():
            if not self._options.has_prefixes:
                raise _prefixes_are_off()
            if self._options.is_paged or request.prefix_id == UINT64_MAX:
                raise invalid("a prefix needs a prefix_id, and a model without enable_page_attention")
            if self._pool.is_bound(key):
                raise _prefix_exists(request.prefix_id)
            shape = [1, *self._options.desc.shape[1:]]
            desc = CacheDesc(self._options.desc.num_tensors, shape, self._options.desc.data_type)
            cache = self._pool.allocate(desc, is_of_model=True)
        try:
            self._run_and_bind(cache, [key], inputs, kwargs)
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_REPEAT_REQUEST:  # another call was faster
                raise _prefix_exists(request.prefix_id) from error
            raise
        finally:
            self._pool.release_handle(cache.cache_id)

    def release_prefix(self, request: LLMReq) -> None:
        """Release a prefix."""
        key = self._prefix_key(request)
        with self._manager.call():
            if not key.is_prefix_key or not self._pool.is_bound(key):
                raise _no_prefix(request.prefix_id)
            self._pool.remove_key(key)

    def close(self) -> None:
        """Nothing to do: the runner is not notified."""

    def _allocate_blocks(self) -> KvCache:
        key = BlocksCacheKey(self._cluster_id, self._model_id)
        with self._manager.call():
            cache = self._pool.allocate_blocks(self._options.desc, key, is_of_model=True)
            return kv_cache_of(self._pool, cache)

    def _run_and_bind(
        self, cache: PooledCache[CacheMemory], keys: list[CacheKey], inputs: Any, kwargs: dict[str, Any]
    ) -> Any:
        # Keep the handle: dropped before the keys hold the cache, it would release the cache.
        kv_cache = kv_cache_of(self._pool, cache)
        result = self._runner.run_model(kv_cache, inputs, **kwargs)
        self._pool.bind(cache, keys)
        return result

    def _check(self, requests: Sequence[LLMReq]) -> None:
        batch_size, limit = self._options.desc.batch_size, self._options.seq_len_limit
        if not 1 <= len(requests) <= batch_size:
            raise invalid(f"there are {len(requests)} requests, not 1..{batch_size}")
        req_ids = [one.req_id for one in requests if not one.is_placeholder]
        for request in requests:
            if request.is_placeholder:
                continue
            if req_ids.count(request.req_id) > 1 or self._pool.is_bound(self._key(request)):
                raise failure(
                    LLMStatusCode.LLM_REPEAT_REQUEST, f"request {request.req_id} is live, or a duplicate"
                )
            if limit is not None and request.prompt_length > limit:
                raise failure(
                    LLMStatusCode.LLM_SEQ_LEN_OVER_LIMIT,
                    f"prompt_length is {request.prompt_length}; the cache has room for {limit} tokens",
                )
            if request.prefix_id != UINT64_MAX and not self._options.has_prefixes:
                raise _prefixes_are_off()
            if request.prefix_id != UINT64_MAX and not self._pool.is_bound(self._prefix_key(request)):
                raise _no_prefix(request.prefix_id)

    def _copy_prefixes(self, cache: PooledCache[CacheMemory], requests: Sequence[LLMReq]) -> None:
        for slot, request in enumerate(requests):
            if request.is_placeholder or request.prefix_id == UINT64_MAX:
                continue
            try:
                prefix = self._pool.hold_key(self._prefix_key(request))
            except LLMException as error:
                raise _no_prefix(request.prefix_id) from error  # it was released in the meantime
            try:
                assert prefix.slot is not None
                copy_slot(cache, slot, prefix.cache, prefix.slot)
            finally:
                prefix.end(consume=False)

    def _key(self, request: LLMReq) -> CacheKey:
        return CacheKey(self._cluster_id, request.req_id, self._model_id)

    def _prefix_key(self, request: LLMReq) -> CacheKey:
        return CacheKey(self._cluster_id, UINT64_MAX, self._model_id, request.prefix_id)


def _prefixes_are_off() -> LLMException:
    return failure(
        LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "prefixes need the model's option enable_shared_system_prefix"
    )


def _prefix_exists(prefix_id: int) -> LLMException:
    return failure(LLMStatusCode.LLM_PREFIX_ALREADY_EXIST, f"prefix {prefix_id} is loaded; release it first")


def _no_prefix(prefix_id: int) -> LLMException:
    return failure(LLMStatusCode.LLM_PREFIX_NOT_EXIST, f"prefix {prefix_id} is not loaded; preload it first")
