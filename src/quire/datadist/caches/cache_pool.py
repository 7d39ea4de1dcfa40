"""The pool of caches and their holders: pure bookkeeping, without sockets.

A cache is held by its handle, by the keys bound to its slots, and by transfers that read it. When the last of
them is released, its memory is no longer counted. A blocks cache is held by its handle and by transfers.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.cache_holds import (
    Binding,
    M,
    PooledCache,
    SlotName,
    SourceHold,
    slot_name,
    slot_names,
)
from quire.datadist.caches.cache_keys import BlocksCacheKey, CacheKey
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid


class CachePool(Generic[M]):
    """The caches of one `LLMDataDist`. Thread-safe.

    Args:
        allocate: returns zero-filled memory, or raises.
        limit_bytes: maximum number of bytes of all caches; None: what `allocate` can get.
    """

    def __init__(self, allocate: Callable[[CacheDesc], M], limit_bytes: int | None = None) -> None:
        self._allocate = allocate
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._has_handed_out = False
        self._has_freed = threading.Condition(self._lock)
        self._is_closed = False
        self._num_allocated = 0
        self._used_bytes = 0
        self._caches: dict[int, PooledCache[M]] = {}
        self._bindings: dict[SlotName, Binding[M]] = {}
        self._blocks_caches: dict[int, PooledCache[M]] = {}  # by model
        self._dropped_handles: collections.deque[int] = collections.deque()

    @property
    def used_bytes(self) -> int:
        """Bytes of all held caches."""
        return self._used_bytes

    @property
    def num_caches(self) -> int:
        """Number of held caches."""
        return len(self._caches)

    @property
    def has_handed_out(self) -> bool:
        """Whether there has ever been a cache that peers may push into, which excludes models' caches."""
        return self._has_handed_out

    def allocate(
        self, desc: CacheDesc, keys: Sequence[CacheKey] = (), *, is_of_model: bool = False
    ) -> PooledCache[M]:
        """Allocate a contiguous cache, with its handle, and bind `keys[i]` to slot i.

        Raises:
            LLMException: LLM_PARAM_INVALID (more keys than slots), LLM_REPEAT_REQUEST (a key is live),
                LLM_DEVICE_OUT_OF_MEMORY; nothing has changed.
        """
        names = slot_names(desc, keys)
        with self._exclusive():
            self._require_unbound(names)
        cache = self._new_cache(desc, is_blocks=False, is_of_model=is_of_model)
        try:
            self._bind(cache, names)
        except LLMException:
            self.release_handle(cache.cache_id)
            raise
        return cache

    def allocate_blocks(
        self, desc: CacheDesc, key: BlocksCacheKey | None, *, is_of_model: bool = False
    ) -> PooledCache[M]:
        """Allocate a blocks cache, with its handle, under a key.

        Raises:
            LLMException: LLM_REPEAT_REQUEST (the model has one), LLM_DEVICE_OUT_OF_MEMORY; nothing has
                changed.
        """
        with self._exclusive():
            self._require_no_blocks_cache(key)
        cache = self._new_cache(desc, is_blocks=True, is_of_model=is_of_model)
        try:
            with self._exclusive():
                self._bind_blocks(cache, key)
        except LLMException:
            self.release_handle(cache.cache_id)
            raise
        return cache

    def register(self, desc: CacheDesc, memory: M) -> PooledCache[M]:
        """Register memory owned by the caller as a contiguous cache, with its handle."""
        with self._exclusive():
            return self._added(desc, memory, is_blocks=False, is_registered=True)

    def register_blocks(self, desc: CacheDesc, memory: M, key: BlocksCacheKey | None) -> PooledCache[M]:
        """Register memory owned by the caller as a blocks cache, with its handle, under a key.

        Raises:
            LLMException: LLM_REPEAT_REQUEST (the model has one); nothing has changed.
        """
        with self._exclusive():
            self._require_no_blocks_cache(key)
            cache = self._added(desc, memory, is_blocks=True, is_registered=True)
            self._bind_blocks(cache, key)
        return cache

    def unregister(self, cache_id: int, deadline: float) -> M | None:
        """Unregister a cache with all keys, and wait until no transfer uses its memory.

        Returns:
            Its memory; None if there is no such cache.

        Raises:
            LLMException: LLM_PARAM_INVALID (it was allocated), LLM_WAIT_PROCESS_TIMEOUT (a transfer has not
                ended by `deadline`; the cache can be used by no further one).
        """
        with self._exclusive():
            cache = self._caches.get(cache_id)
            if cache is None:
                return None
            if not cache.is_registered:
                raise invalid(f"cache {cache_id} was allocated, not registered; deallocate it")
            for name in [name for name, one in self._bindings.items() if one.cache is cache]:
                self._unbind(name)
            self._release_handle(cache_id)
            time_left = max(0.0, deadline - time.monotonic())
            if not self._has_freed.wait_for(lambda: cache_id not in self._caches, time_left):
                raise failure(
                    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
                    f"{cache.num_transfers} transfers still use cache {cache_id}; keep its memory, and call "
                    "again, or unlink their peers first",
                )
        return cache.memory

    def bind(self, cache: PooledCache[M], keys: Sequence[CacheKey]) -> None:
        """Bind `keys[i]` to slot i of a cache that still has its handle.

        Raises:
            LLMException: LLM_PARAM_INVALID, LLM_REPEAT_REQUEST as from `allocate`; no key is bound.
        """
        self._bind(cache, slot_names(cache.desc, keys))

    def is_bound(self, key: CacheKey) -> bool:
        """Return whether a key can be pulled."""
        with self._exclusive():
            return slot_name(key) in self._bindings

    def cache(self, cache_id: int) -> PooledCache[M]:
        """Return a cache that still has its handle.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST.
        """
        with self._exclusive():
            return self._with_handle(cache_id)

    def release_handle(self, cache_id: int) -> None:
        """Release the handle of a cache, if it has one."""
        with self._exclusive():
            self._release_handle(cache_id)

    def drop_handle(self, cache_id: int) -> None:
        """Give up a handle from a finalizer, which may run at any point of any thread."""
        self._dropped_handles.append(cache_id)
        self._release_dropped()

    def remove_key(self, key: CacheKey) -> None:
        """Remove a key, so that it can no longer be pulled; unknown keys and placeholders are ignored."""
        with self._exclusive():
            self._unbind(slot_name(key))

    def remove_request(self, req_id: int) -> None:
        """Remove the keys of a request, of every model."""
        with self._exclusive():
            for name in [name for name in self._bindings if name[:2] == (False, req_id)]:
                self._unbind(name)

    def hold_key(self, key: CacheKey) -> SourceHold[M]:
        """Keep the slot that a key names for a transfer.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST.
        """
        with self._exclusive():
            binding = self._bindings.get(slot_name(key))
            if binding is None:
                raise _no_cache(f"{key} is not bound: it was never, or has been pulled or removed")
            return self._hold(binding.cache, binding.slot, None if key.is_prefix_key else binding)

    def hold_slot(self, cache_id: int, slot: int) -> SourceHold[M]:
        """Keep a slot of a cache whose handle lives for a transfer.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST; LLM_PARAM_INVALID (a blocks cache, or no such slot).
        """
        with self._exclusive():
            cache = self._with_handle(cache_id)
            if cache.is_blocks or slot >= cache.desc.batch_size:
                what = "a blocks cache" if cache.is_blocks else f"{cache.desc.batch_size} slots"
                raise invalid(f"batch_index {slot} names no slot of cache {cache_id}, which has {what}")
            return self._hold(cache, slot, None)

    def hold_blocks(self, model_id: int) -> SourceHold[M]:
        """Keep the blocks cache of a model for a transfer.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST.
        """
        with self._exclusive():
            cache = self._blocks_caches.get(model_id)
            if cache is None:
                raise _no_cache(f"model {model_id} has no blocks cache")
            return self._hold(cache, None, None)

    def hold_numbered_blocks(self, cache_id: int) -> SourceHold[M]:
        """Hold a blocks cache that still has its handle for a transfer.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST; LLM_PARAM_INVALID (it is contiguous).
        """
        with self._exclusive():
            cache = self._with_handle(cache_id)
            if not cache.is_blocks:
                raise invalid(f"cache {cache_id} is contiguous; it has no blocks")
            return self._hold(cache, None, None)

    def hold_handed_out(self, is_wanted: Callable[[PooledCache[M]], bool]) -> SourceHold[M]:
        """Hold a cache that `is_wanted` accepts, other than models' caches, for a transfer.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST.
        """
        with self._exclusive():
            for cache in self._caches.values():
                if not cache.is_of_model and cache.has_handle and is_wanted(cache):
                    return self._hold(cache, None, None)
        raise _no_cache("no cache of this side has these addresses")

    def close(self) -> None:
        """Forget every cache and key, even if held."""
        with self._exclusive():
            self._is_closed = True
            self._used_bytes -= sum(cache.num_bytes for cache in self._caches.values())
            self._caches.clear()
            self._bindings.clear()
            self._blocks_caches.clear()
            self._has_freed.notify_all()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._release_dropped()

    def _release_dropped(self) -> None:
        """Release dropped handles; if the lock is held, its holder does that after releasing it."""
        while self._dropped_handles and self._lock.acquire(blocking=False):
            try:
                while self._dropped_handles:
                    self._release_handle(self._dropped_handles.popleft())
            finally:
                self._lock.release()

    def _new_cache(self, desc: CacheDesc, *, is_blocks: bool, is_of_model: bool) -> PooledCache[M]:
        """Allocate outside the lock, as zeroing may take long, after reserving the bytes."""
        num_bytes = desc.num_tensors * desc.tensor_bytes
        with self._exclusive():
            self._reserve(num_bytes)
        try:
            memory = self._allocate(desc)
        except BaseException:
            with self._exclusive():
                self._used_bytes -= num_bytes
            raise
        with self._exclusive():
            return self._added(desc, memory, is_blocks=is_blocks, is_of_model=is_of_model)

    def _added(
        self,
        desc: CacheDesc,
        memory: M,
        *,
        is_blocks: bool,
        is_of_model: bool = False,
        is_registered: bool = False,
    ) -> PooledCache[M]:
        self._require_open()
        self._has_handed_out |= not is_of_model
        self._num_allocated += 1
        cache = PooledCache(self._num_allocated, desc, memory, is_blocks, is_of_model, is_registered)
        self._caches[cache.cache_id] = cache
        return cache

    def _reserve(self, num_bytes: int) -> None:
        self._require_open()
        if self._limit_bytes is not None and self._used_bytes + num_bytes > self._limit_bytes:
            raise failure(
                LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
                f"a cache of {num_bytes} bytes does not fit beside {self._used_bytes} bytes of others into "
                f"{self._limit_bytes} bytes; release caches and keys, or raise ge.flowGraphMemMaxSize",
            )
        self._used_bytes += num_bytes

    def _require_open(self) -> None:
        if self._is_closed:
            raise failure(LLMStatusCode.LLM_ENGINE_FINALIZED, "finalized; call init")

    def _bind(self, cache: PooledCache[M], names: dict[SlotName, int]) -> None:
        with self._exclusive():
            self._require_unbound(names)
            for name, slot in names.items():
                self._bindings[name] = Binding(name, cache, slot)
            cache.num_keys += len(names)

    def _require_unbound(self, names: dict[SlotName, int]) -> None:
        for is_prefix, one_id, model_id in names:
            if (is_prefix, one_id, model_id) in self._bindings:
                what = "prefix" if is_prefix else "request"
                raise failure(
                    LLMStatusCode.LLM_REPEAT_REQUEST,
                    f"the key of {what} {one_id} of model {model_id} is live until it is pulled or removed",
                )

    def _require_no_blocks_cache(self, key: BlocksCacheKey | None) -> None:
        if key is not None and key.model_id in self._blocks_caches:
            raise failure(
                LLMStatusCode.LLM_REPEAT_REQUEST,
                f"model {key.model_id} has a blocks cache already; deallocate it first",
            )

    def _bind_blocks(self, cache: PooledCache[M], key: BlocksCacheKey | None) -> None:
        self._require_no_blocks_cache(key)
        if key is not None:
            self._blocks_caches[key.model_id] = cache

    def _with_handle(self, cache_id: int) -> PooledCache[M]:
        cache = self._caches.get(cache_id)
        if cache is None or not cache.has_handle:
            raise _no_cache(f"there is no cache {cache_id}, or it has been released")
        return cache

    def _release_handle(self, cache_id: int) -> None:
        cache = self._caches.get(cache_id)
        if cache is not None and cache.has_handle:
            cache.has_handle = False
            for model_id in [one for one, blocks in self._blocks_caches.items() if blocks is cache]:
                del self._blocks_caches[model_id]
            self._free_if_unheld(cache)

    def _unbind(self, name: SlotName) -> None:
        binding = self._bindings.pop(name, None)
        if binding is not None:
            binding.cache.num_keys -= 1
            self._free_if_unheld(binding.cache)

    def _hold(self, cache: PooledCache[M], slot: int | None, binding: Binding[M] | None) -> SourceHold[M]:
        cache.num_transfers += 1
        return SourceHold(self._end_transfer, cache, slot, binding)

    def _end_transfer(self, cache: PooledCache[M], consumed: Binding[M] | None) -> None:
        with self._exclusive():
            cache.num_transfers -= 1
            if consumed is not None and self._bindings.get(consumed.name) is consumed:
                self._unbind(consumed.name)
            self._free_if_unheld(cache)

    def _free_if_unheld(self, cache: PooledCache[M]) -> None:
        is_held = cache.has_handle or cache.num_keys or cache.num_transfers
        if not is_held and self._caches.pop(cache.cache_id, None) is not None:
            self._used_bytes -= cache.num_bytes
            self._has_freed.notify_all()


def _no_cache(message: str) -> LLMException:
    return failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, message)
