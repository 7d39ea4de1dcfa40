"""Allocating caches, copying within them, and pulling into them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from quire.datadist.argument_checks import OFFSET, U32, U64, ArgumentChecks
from quire.datadist.cache_desc import CacheDesc
from quire.datadist.cache_keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from quire.datadist.cache_pool import CachePool, PooledCache
from quire.datadist.decoder_links import DecoderLinks
from quire.datadist.enums import LLMRole
from quire.datadist.kv_cache import KvCache, kv_cache_of, pooled_cache
from quire.datadist.memory import CacheMemory
from quire.datadist.pulls import LAYER_OPTIONS, SLOT_OPTIONS, block_pulls, check_options, slot_pull
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid
from quire.datadist.tensor import Tensor, view_of


class KvCacheManager:
    """The caches of one `LLMDataDist`, from its `init` to its `finalize`.

    Calls wait for each other, for at most `sync_kv_timeout`. Every method but `is_initialized` raises
    `LLMException`: LLM_ENGINE_FINALIZED after `finalize`; LLM_WAIT_PROCESS_TIMEOUT when that time is over;
    LLM_PARAM_INVALID on the wrong role, and for a cache of another manager or of the wrong kind;
    LLM_KV_CACHE_NOT_EXIST for a cache that was released.
    """

    def __init__(
        self, role: LLMRole, pool: CachePool[CacheMemory], links: DecoderLinks, timeout: float
    ) -> None:
        self._role = role
        self._pool = pool
        self._links = links
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
        with self.call(LLMRole.PROMPT if keys else None):
            _require_batch_first(cache_desc)
            return kv_cache_of(self._pool, self._pool.allocate(cache_desc, keys))

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
        with self.call(None if blocks_cache_key is None else LLMRole.PROMPT):
            _require_batch_first(cache_desc)
            return kv_cache_of(self._pool, self._pool.allocate_blocks(cache_desc, blocks_cache_key))

    def deallocate_cache(self, cache: KvCache) -> None:
        """Give up a cache. Its keys can still be pulled; a blocks cache goes with its key.

        Raises:
            LLMException: LLM_PARAM_INVALID (owned by a model).
        """
        with ArgumentChecks() as check:
            check.instance("cache", cache, KvCache)
        with self.call():
            try:
                pooled = pooled_cache(self._pool, cache)
            except LLMException as error:
                if error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                    return
                raise
            if pooled.is_of_model:
                raise invalid(f"{cache} belongs to a model, which releases it in finalize")
            self._pool.release_handle(pooled.cache_id)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Let a key be pulled no more. Unknown keys and placeholders are ignored. On a PROMPT."""
        with ArgumentChecks() as check:
            check.instance("cache_key", cache_key, CacheKey)
        with self.call(LLMRole.PROMPT):
            self._pool.remove_key(cache_key)

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Copy a slot of a PROMPT into a slot of this DECODER. A request key is consumed by a whole pull.

        Args:
            cache_key: the source slot.
            kv_cache: the destination, a contiguous cache.
            batch_index: of the destination slot.
            size: bytes of each tensor; -1: the whole destination slot, or the rest after `dst_cache_offset`.
            kwargs: `src_cache_offset`, `dst_cache_offset`: first byte in the slot; `src_layer_range`,
                `dst_layer_range`: `range` of layers; `tensor_num_per_layer`: 2 by default. With an offset or
                a range, the key is not consumed.

        Raises:
            LLMException: LLM_NOT_YET_LINK, LLM_KV_CACHE_NOT_EXIST (the key is not bound), LLM_PARAM_INVALID.
        """
        with ArgumentChecks() as check:
            check.instance("cache_key", cache_key, CacheKey, CacheKeyByIdAndIndex)
            check.instance("kv_cache", kv_cache, KvCache)
            slot = check.integer("batch_index", batch_index, U32)
            num_bytes = check.size("size", size)
            options = check_options(check, kwargs, SLOT_OPTIONS)
        with self.call(LLMRole.DECODER) as deadline:
            pull = slot_pull(cache_key, pooled_cache(self._pool, kv_cache), slot, num_bytes, options)
            pull.run(self._links.link_of(cache_key.cluster_id), deadline)

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: list[int],
        decoder_blocks: list[int],
        **kwargs: Any,
    ) -> None:
        """Copy block `prompt_blocks[i]` of a PROMPT into block `decoder_blocks[i]` of this DECODER.

        Args:
            prompt_cache_key: the source.
            decoder_kv_cache: the destination, a blocks cache with blocks of the same size.
            prompt_blocks: a sequence or one-dimensional array.
            decoder_blocks: likewise, as long; no block twice.
            kwargs: the layer keywords of `pull_cache`.

        Raises:
            LLMException: LLM_NOT_YET_LINK, LLM_KV_CACHE_NOT_EXIST (no such blocks cache), LLM_PARAM_INVALID.
        """
        with ArgumentChecks() as check:
            check.instance("prompt_cache_key", prompt_cache_key, BlocksCacheKey)
            check.instance("decoder_kv_cache", decoder_kv_cache, KvCache)
            sources = check.indices("prompt_blocks", prompt_blocks)
            targets = check.indices("decoder_blocks", decoder_blocks)
            options = check_options(check, kwargs, LAYER_OPTIONS)
        with self.call(LLMRole.DECODER) as deadline:
            cache = pooled_cache(self._pool, decoder_kv_cache)
            for pull in block_pulls(prompt_cache_key, cache, sources, targets, options):
                pull.run(self._links.link_of(prompt_cache_key.cluster_id), deadline)

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
            pooled = pooled_cache(self._pool, cache)
            if not pooled.is_blocks:
                raise invalid(f"{cache} is contiguous; blocks are copied in a blocks cache")
            counts = [len(blocks) for blocks in targets]
            to_blocks = np.concatenate([*targets, np.empty(0, dtype=np.uint64)])
            if len(np.unique(to_blocks)) != len(to_blocks):
                raise invalid("copy_block_info names a destination twice")
            if any(int(blocks.max(initial=0)) >= pooled.desc.batch_size for blocks in (sources, to_blocks)):
                raise invalid(f"copy_block_info names a block that is not among {pooled.desc.batch_size}")
            from_blocks = np.repeat(sources, counts)
            pooled.memory.copy_blocks(pooled.desc.slot_bytes, from_blocks.tolist(), to_blocks.tolist())

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
        """Let other calls wait; gives the deadline of this one on the monotonic clock.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED, LLM_PARAM_INVALID (another role than `role`),
                LLM_WAIT_PROCESS_TIMEOUT (other calls took too long).
        """
        deadline = time.monotonic() + self._timeout
        self._require_open()
        if role is not None and role is not self._role:
            raise invalid(f"this is for a {role.name}, but the role is {self._role.name}")
        if not self._lock.acquire(timeout=self._timeout):
            raise failure(
                LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
                f"other calls took longer than sync_kv_timeout, {self._timeout * 1e3:g} ms",
            )
        try:
            self._require_open()
            yield deadline
        finally:
            self._lock.release()

    def close(self) -> None:
        """Let every further call fail."""
        self._is_open = False

    def _require_open(self) -> None:
        if not self._is_open:
            raise failure(
                LLMStatusCode.LLM_ENGINE_FINALIZED, "finalized; call init and get kv_cache_manager anew"
            )


def copy_slot(
    target: PooledCache[CacheMemory],
    to_slot: int,
    source: PooledCache[CacheMemory],
    from_slot: int,
    *,
    offset: int = 0,
    size: int = -1,
) -> None:
    """Copy bytes of a slot; size -1: up to the end of the target slot.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    to_desc, from_desc = target.desc, source.desc
    if target.is_blocks or source.is_blocks:
        raise invalid("slots are copied between contiguous caches, not blocks caches")
    if (to_desc.num_tensors, to_desc.data_type) != (from_desc.num_tensors, from_desc.data_type):
        raise invalid(f"{from_desc} cannot be copied to {to_desc}: tensors or data type differ")
    if to_slot >= to_desc.batch_size or from_slot >= from_desc.batch_size:
        raise invalid(
            f"slot {from_slot} of {from_desc.batch_size} cannot be copied to slot {to_slot} of "
            f"{to_desc.batch_size}"
        )
    num_bytes = to_desc.slot_bytes - offset if size == -1 else size
    if num_bytes < 1 or offset + num_bytes > min(to_desc.slot_bytes, from_desc.slot_bytes):
        raise invalid(
            f"{num_bytes} bytes from byte {offset} are not within both slots, which have "
            f"{from_desc.slot_bytes} and {to_desc.slot_bytes}"
        )
    if (target, to_slot) != (source, from_slot):
        to_offset = to_slot * to_desc.slot_bytes + offset
        from_offset = from_slot * from_desc.slot_bytes + offset
        target.memory.copy_from(source.memory, to_offset, from_offset, num_bytes)


def _require_batch_first(desc: CacheDesc) -> None:
    if desc.batch_dim_index != 0:
        raise invalid(f"batch_dim_index is {desc.batch_dim_index}; only caches with 0 can be allocated")
