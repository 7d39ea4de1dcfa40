"""Local operations on the caches of one side, without peers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch

from quire.datadist.argument_checks import ADDRESS, I64, OFFSET, U32, U64, ArgumentChecks
from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.cache_keys import BlocksCacheKey, CacheKey
from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.copies import check_blocks, copy_blocks_between, copy_slot
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.registered_memory import memory_at
from quire.datadist.caches.tensor import Tensor, view_of
from quire.datadist.enums import LLMRole
from quire.datadist.interface.kv_cache import KvCache, blocks_cache, kv_cache_of, pooled_cache
from quire.datadist.interface.link_ends import LinkEnds
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid


class LocalCaches:
    """Allocates caches, and copies within and between them; its calls wait for each other."""

    def __init__(
        self,
        role: LLMRole,
        pool: CachePool[CacheMemory],
        ends: LinkEnds,
        *,
        device: torch.device,
        timeout: float,
    ) -> None:
        self._role = role
        self._pool = pool
        self._ends = ends
        self._device = device
        self._timeout = timeout
        self._lock = threading.Lock()
        self._is_open = True

    def is_initialized(self) -> bool:
        """Return whether `finalize` has not been called yet."""
        return self._is_open

    def allocate_cache(
        self, cache_desc: CacheDesc, cache_keys: tuple[CacheKey, ...] | list[CacheKey] = ()
    ) -> KvCache:
        """Allocate a contiguous cache, zero-filled.

        Args:
            cache_desc: what it consists of; dimension 0 counts slots.
            cache_keys: on a PROMPT, key i is bound to slot i, and can be pulled from now on.

        Raises:
            LLMException: LLM_PARAM_INVALID, LLM_REPEAT_REQUEST (a key is live), LLM_DEVICE_OUT_OF_MEMORY.
        """
        with ArgumentChecks() as check:
            check.instance("cache_desc", cache_desc, CacheDesc)
            keys = check.items("cache_keys", cache_keys, CacheKey)
        with self.call(LLMRole.PROMPT if keys else None) as deadline:
            _require_batch_first(cache_desc)
            kv_cache = kv_cache_of(self._pool, self._pool.allocate(cache_desc, keys))
            self._ends.links.take_pushes(deadline)
        return kv_cache

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> KvCache:
        """Allocate a blocks cache, zero-filled.

        Args:
            cache_desc: what it consists of; dimension 0 counts blocks.
            blocks_cache_key: on a PROMPT, under which it can be pulled.

        Raises:
            LLMException: LLM_PARAM_INVALID, LLM_REPEAT_REQUEST (the model has one), LLM_DEVICE_OUT_OF_MEMORY.
        """
        with ArgumentChecks() as check:
            check.instance("cache_desc", cache_desc, CacheDesc)
            check.instance("blocks_cache_key", blocks_cache_key, BlocksCacheKey, type(None))
        with self.call(None if blocks_cache_key is None else LLMRole.PROMPT) as deadline:
            _require_batch_first(cache_desc)
            kv_cache = kv_cache_of(self._pool, self._pool.allocate_blocks(cache_desc, blocks_cache_key))
            self._ends.links.take_pushes(deadline)
        return kv_cache

    def register_cache(self, cache_desc: CacheDesc, addrs: list[int]) -> KvCache:
        """Create a contiguous cache from existing memory, which is neither copied nor zeroed.

        Args:
            cache_desc: what it consists of; dimension 0 counts slots.
            addrs: address of each tensor. The memory must be there until `unregister_cache` returns. PROMPTs
                that this side is linked to may push into it.

        Raises:
            LLMException: LLM_PARAM_INVALID (not one address for each tensor, tensors that overlap, or memory
                that this process does not have).
        """
        with ArgumentChecks() as check:
            check.instance("cache_desc", cache_desc, CacheDesc)
            addresses = check.integers("addrs", addrs, ADDRESS)
        with self.call() as deadline:
            _require_batch_first(cache_desc)
            memory = memory_at(cache_desc, addresses, self._device)
            kv_cache = kv_cache_of(self._pool, self._pool.register(cache_desc, memory))
            self._ends.links.take_pushes(deadline)
        return kv_cache

    def register_blocks_cache(
        self, cache_desc: CacheDesc, addrs: list[int], blocks_cache_key: BlocksCacheKey | None = None
    ) -> KvCache:
        """Create a blocks cache from existing memory, which is neither copied nor zeroed.

        Args:
            cache_desc: what it consists of; dimension 0 counts blocks.
            addrs: address of each tensor. The memory must be there until `unregister_cache` returns. PROMPTs
                that this side is linked to may push into it.
            blocks_cache_key: on any role, under which peers find it.

        Raises:
            LLMException: as from `register_cache`; LLM_REPEAT_REQUEST (the model has one).
        """
        with ArgumentChecks() as check:
            check.instance("cache_desc", cache_desc, CacheDesc)
            addresses = check.integers("addrs", addrs, ADDRESS)
            check.instance("blocks_cache_key", blocks_cache_key, BlocksCacheKey, type(None))
        with self.call() as deadline:
            _require_batch_first(cache_desc)
            memory = memory_at(cache_desc, addresses, self._device)
            cache = self._pool.register_blocks(cache_desc, memory, blocks_cache_key)
            kv_cache = kv_cache_of(self._pool, cache)
            self._ends.links.take_pushes(deadline)
        return kv_cache

    def unregister_cache(self, cache_id: int) -> None:
        """Unregister a cache, and wait until no transfer uses its memory. Unknown ids are ignored.

        Raises:
            LLMException: LLM_PARAM_INVALID (it was allocated), LLM_WAIT_PROCESS_TIMEOUT (a transfer has not
                ended in time: keep the memory, and call again), LLM_FAILED (one could not be ended: keep the
                memory until this process ends).
        """
        with ArgumentChecks() as check:
            checked = check.integer("cache_id", cache_id, I64)
        with self.call() as deadline:
            memory = self._pool.unregister(checked, deadline)
            if memory is not None:
                _take_back(memory, deadline)

    def deallocate_cache(self, cache: KvCache) -> None:
        """Release a cache. Its keys can still be pulled; a blocks cache is removed with its key.

        Raises:
            LLMException: LLM_PARAM_INVALID (owned by a model, or registered).
        """
        self._deallocate(cache)

    def deallocate_blocks_cache(self, cache: KvCache) -> None:
        """Release a blocks cache with its key, like `deallocate_cache`.

        Raises:
            LLMException: LLM_PARAM_INVALID (it is contiguous, owned by a model, or registered).
        """
        self._deallocate(cache, is_blocks=True)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Stop pulls by a key. Unknown keys and placeholders are ignored. On a PROMPT."""
        with ArgumentChecks() as check:
            check.instance("cache_key", cache_key, CacheKey)
        with self.call(LLMRole.PROMPT):
            self._pool.remove_key(cache_key)

    def copy_cache(  # noqa: PLR0917 - the interface's order
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy bytes of a slot into a slot of the same or another contiguous cache.

        Args:
            dst: destination.
            src: source, with as many tensors of the same data type.
            dst_batch_index: slot of the destination.
            src_batch_index: slot of the source.
            offset: first byte, in both slots.
            size: bytes of each tensor; -1: up to the end of the destination slot.
            req_id: whose KV it is; informational.

        Raises:
            LLMException: LLM_PARAM_INVALID.
        """
        with ArgumentChecks() as check:
            check.instance("dst", dst, KvCache)
            check.instance("src", src, KvCache)
            to_slot = check.integer("dst_batch_index", dst_batch_index, U32)
            from_slot = check.integer("src_batch_index", src_batch_index, U32)
            first = check.integer("offset", offset, OFFSET)
            num_bytes = check.size("size", size)
            if req_id is not None:
                check.integer("req_id", req_id, U64)
        with self.call():
            target, source = pooled_cache(self._pool, dst), pooled_cache(self._pool, src)
            copy_slot(target, to_slot, source, from_slot, offset=first, size=num_bytes)

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks within a blocks cache; all sources are read before anything is written.

        Args:
            cache: a blocks cache.
            copy_block_info: the destinations of each source; none twice.

        Raises:
            LLMException: LLM_PARAM_INVALID.
        """
        with ArgumentChecks() as check:
            check.instance("cache", cache, KvCache)
            check.instance("copy_block_info", copy_block_info, dict)
            sources = check.indices("copy_block_info", list(copy_block_info))
            targets = [check.indices("copy_block_info", blocks) for blocks in copy_block_info.values()]
        with self.call():
            from_blocks = np.repeat(sources, [len(blocks) for blocks in targets])
            to_blocks = np.concatenate([*targets, np.empty(0, dtype=np.uint64)])
            pooled = blocks_cache(self._pool, cache)
            check_blocks(pooled, sources)  # also those without a destination
            copy_blocks_between(pooled, from_blocks, pooled, to_blocks)

    def swap_blocks(
        self, src_cache: KvCache, dst_cache: KvCache, pairs: dict[int, int] | list[tuple[int, int]]
    ) -> None:
        """Copy blocks from one blocks cache to another, as between the device and the host.

        Args:
            src_cache: source; one of `create_cpu_cache`, too.
            dst_cache: destination, of either kind; as many tensors, blocks of the same size and data type.
            pairs: the destination of each source, or pairs of a source and a destination; none twice.

        Raises:
            LLMException: LLM_PARAM_INVALID.
        """
        with ArgumentChecks() as check:
            check.instance("src_cache", src_cache, KvCache)
            check.instance("dst_cache", dst_cache, KvCache)
            from_blocks, to_blocks = check.pairs("pairs", pairs)
        with self.call():
            source, target = blocks_cache(self._pool, src_cache), blocks_cache(self._pool, dst_cache)
            if source is target:
                raise invalid("src_cache is dst_cache; within a cache, use copy_blocks")
            copy_blocks_between(source, from_blocks, target, to_blocks)

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return a live view of a tensor, in a list with one entry for each device; there is one.

        Raises:
            LLMException: LLM_PARAM_INVALID (no such tensor).
        """
        with ArgumentChecks() as check:
            check.instance("cache", cache, KvCache)
            index = check.integer("tensor_index", tensor_index, U32)
        with self.call():
            pooled = pooled_cache(self._pool, cache)
            if index >= pooled.desc.num_tensors:
                raise invalid(f"tensor_index is {index}, but there are {pooled.desc.num_tensors} tensors")
            return [view_of(pooled.memory.tensors[index])]

    @contextlib.contextmanager
    def call(self, role: LLMRole | None = None) -> Iterator[float]:
        """Block other calls; yields this call's deadline on the monotonic clock.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED, LLM_PARAM_INVALID (another role than `role`),
                LLM_WAIT_PROCESS_TIMEOUT (other calls took too long).
        """
        deadline = time.monotonic() + self._timeout
        self._require(role)
        if not self._lock.acquire(timeout=self._timeout):
            raise failure(
                LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
                f"other calls took longer than sync_kv_timeout, {self._timeout * 1e3:g} ms",
            )
        try:
            self._require(role)
            yield deadline
        finally:
            self._lock.release()

    def close(self) -> None:
        """Make all later calls fail."""
        self._is_open = False

    def _deallocate(self, cache: KvCache, *, is_blocks: bool = False) -> None:
        with ArgumentChecks() as check:
            check.instance("cache", cache, KvCache)
        with self.call():
            try:
                pooled = pooled_cache(self._pool, cache)
            except LLMException as error:
                if error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                    return
                raise
            if is_blocks and not pooled.is_blocks:
                raise invalid(f"{cache} is contiguous; call deallocate_cache")
            if pooled.is_of_model:
                raise invalid(f"{cache} belongs to a model, which releases it in finalize")
            if pooled.is_registered:
                raise invalid(f"{cache} is registered memory; call unregister_cache")
            self._pool.release_handle(pooled.cache_id)

    def _require(self, role: LLMRole | None) -> None:
        if not self._is_open:
            raise failure(
                LLMStatusCode.LLM_ENGINE_FINALIZED, "finalized; call init and get kv_cache_manager again"
            )
        if role is not None and self._role not in (role, LLMRole.MIX):
            raise invalid(f"this is for a {role.name}, but the role is {self._role.name}")


def _require_batch_first(desc: CacheDesc) -> None:
    if desc.batch_dim_index != 0:
        raise invalid(f"batch_dim_index is {desc.batch_dim_index}; only caches with 0 can be allocated")


def _take_back(memory: CacheMemory, deadline: float) -> None:
    try:
        memory.be_forgotten(deadline)
    except OSError as error:
        raise _cannot_be_taken_back() from error
    if memory.is_lost:
        raise _cannot_be_taken_back()


def _cannot_be_taken_back() -> LLMException:
    return failure(
        LLMStatusCode.LLM_FAILED,
        "a transport may still use the memory; keep it until this process ends",
    )
