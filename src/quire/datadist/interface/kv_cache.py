"""The user's handle of a cache."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from typing_extensions import override

from quire.datadist.argument_checks import ADDRESS, I64, U64, ArgumentChecks
from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.cache_holds import PooledCache
from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.registered_memory import memory_at
from quire.datadist.enums import Placement
from quire.datadist.status import LLMStatusCode, failure, invalid


class KvCache:
    """A cache from a `KvCacheManager`; dropping the last reference releases it.

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
        self._blocks_on_host: PooledCache[CacheMemory] | None = None

    @staticmethod
    def create_cpu_cache(cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Create a blocks cache from existing host memory, to swap or copy blocks.

        It does not belong to a manager, and is neither copied nor zeroed.

        Args:
            cache_desc: what it consists of, with `Placement.HOST`; dimension 0 counts blocks.
            addrs: address of each tensor, or a list that holds them alone. The memory must be there as long
                as the cache is used.

        Raises:
            LLMException: LLM_PARAM_INVALID, as from `KvCacheManager.register_blocks_cache`, or it has another
                placement.
        """
        with ArgumentChecks() as check:
            check.instance("cache_desc", cache_desc, CacheDesc)
            check.instance("addrs", addrs, list, tuple)
            is_nested = len(addrs) == 1 and isinstance(addrs[0], (list, tuple))
            addresses = check.integers("addrs", addrs[0] if is_nested else addrs, ADDRESS)
        if cache_desc.placement is not Placement.HOST or cache_desc.batch_dim_index != 0:
            raise invalid(
                f"{cache_desc} cannot be a cache of the host: it needs Placement.HOST, batch_dim_index 0"
            )
        memory = memory_at(cache_desc, addresses, torch.device("cpu"))
        kv_cache = KvCache(-1, cache_desc, [addresses])
        kv_cache._blocks_on_host = PooledCache(-1, cache_desc, memory, is_blocks=True, is_registered=True)
        return kv_cache

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
        """Address of each tensor; raises like `per_device_tensor_addrs`."""
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


def blocks_cache(pool: CachePool[CacheMemory], kv_cache: KvCache) -> PooledCache[CacheMemory]:
    """Return the blocks cache behind a handle, or one that `create_cpu_cache` made.

    Raises:
        LLMException: as from `pooled_cache`; LLM_PARAM_INVALID (it is contiguous).
    """
    pooled = kv_cache._blocks_on_host or pooled_cache(pool, kv_cache)
    if not pooled.is_blocks:
        raise invalid(f"{kv_cache} is contiguous; this is for blocks caches")
    return pooled
