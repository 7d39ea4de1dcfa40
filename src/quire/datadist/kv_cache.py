"""A cache as its user holds it."""

from __future__ import annotations

import weakref
from typing import Any

from typing_extensions import override

from quire.datadist.argument_checks import I64, U64, ArgumentChecks
from quire.datadist.cache_desc import CacheDesc
from quire.datadist.cache_holds import PooledCache
from quire.datadist.cache_pool import CachePool
from quire.datadist.memory import CacheMemory
from quire.datadist.status import LLMStatusCode, failure, invalid


class KvCache:
    """A cache that a `KvCacheManager` has allocated or registered; dropping the last reference gives it up.

    Args:
        cache_id: counts from 1 in the order of allocation and registration.
        cache_desc: what it consists of.
        per_device_tensor_addrs: address of each tensor, in a list for each device; there is one.
    """

    def __init__(
        self, cache_id: int, cache_desc: CacheDesc, per_device_tensor_addrs: list[list[int]]
    ) -> None:
        with ArgumentChecks() as check:
            self._cache_id = check.integer("cache_id", cache_id, I64)
            check.instance("cache_desc", cache_desc, CacheDesc)
            per_device = check.items("per_device_tensor_addrs", per_device_tensor_addrs, list)
            self._addresses = [check.integers("per_device_tensor_addrs", one, U64) for one in per_device]
        self._cache_desc = cache_desc
        self._pool: CachePool[CacheMemory] | None = None

    @property
    def cache_id(self) -> int:
        """Counts from 1 in the order of allocation and registration."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """What it consists of."""
        return self._cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """Address of each tensor, in a list for each device; there is one.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST, after it was released.
        """
        if self._pool is not None:
            self._pool.cache(self._cache_id)
        return [list(one) for one in self._addresses]

    @property
    def tensor_addrs(self) -> list[int]:
        """Address of each tensor; raises what `per_device_tensor_addrs` does."""
        return [address for one in self.per_device_tensor_addrs for address in one]

    @override
    def __repr__(self) -> str:
        return f"KvCache({self._cache_id}, {self._cache_desc})"


Cache = KvCache


def kv_cache_of(pool: CachePool[CacheMemory], cache: PooledCache[Any]) -> KvCache:
    """Return the handle of a cache in a pool."""
    kv_cache = KvCache(cache.cache_id, cache.desc, [cache.memory.addresses()])
    kv_cache._pool = pool
    weakref.finalize(kv_cache, pool.drop_handle, cache.cache_id).atexit = False
    return kv_cache


def pooled_cache(pool: CachePool[CacheMemory], kv_cache: KvCache) -> PooledCache[CacheMemory]:
    """Return the cache behind a handle.

    Raises:
        LLMException: LLM_KV_CACHE_NOT_EXIST (released, or not allocated by a manager), LLM_PARAM_INVALID
            (allocated by another manager).
    """
    if kv_cache._pool is None:
        raise failure(
            LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"{kv_cache} was not allocated by a KvCacheManager"
        )
    if kv_cache._pool is not pool:
        raise invalid(f"{kv_cache} belongs to another KvCacheManager")
    return pool.cache(kv_cache.cache_id)
