"""The caches of one side, with pulls into them and pushes from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any

from quire.datadist.argument_checks import DIMENSION, U32, ArgumentChecks, one_of
from quire.datadist.caches.cache_holds import PooledCache
from quire.datadist.caches.cache_keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.enums import LLMRole
from quire.datadist.interface.cache_tasks import (
    CacheTask,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from quire.datadist.interface.kv_cache import KvCache, pooled_cache
from quire.datadist.interface.link_ends import LinkEnds
from quire.datadist.interface.local_caches import LocalCaches
from quire.datadist.interface.pulls import LAYER_OPTIONS, SLOT_OPTIONS, block_pulls, check_options, slot_pull
from quire.datadist.interface.pushes import Config, Push, block_pushes, layer_transfers, slot_push


class KvCacheManager(LocalCaches):
    """The caches of one `LLMDataDist`, from its `init` to its `finalize`.

    Calls wait for each other, for at most `sync_kv_timeout`. Every method but `is_initialized` raises
    `LLMException`: LLM_ENGINE_FINALIZED after `finalize`; LLM_WAIT_PROCESS_TIMEOUT when that time is over;
    LLM_PARAM_INVALID on the wrong role, and for a cache of another manager or of the wrong kind;
    LLM_KV_CACHE_NOT_EXIST for a cache that was released.
    """

    @contextlib.contextmanager
    def switching(self, role: LLMRole, ends: LinkEnds) -> Iterator[None]:
        """Block calls meanwhile, then switch to another role and other links, unless that fails."""
        with self.call():
            yield
            self._role = role
            self._ends = ends

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
            batch_index: index of the destination slot.
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
            pull.run(self._ends.links.link_of(cache_key.cluster_id), deadline)

    def pull_blocks(  # noqa: PLR0917 - the interface's order
        self,
        src_cache_key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex | EllipsisType = ...,
        dst_cache: KvCache | EllipsisType = ...,
        src_blocks: list[int] | EllipsisType = ...,
        dst_blocks: list[int] | EllipsisType = ...,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        *,
        prompt_cache_key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex | EllipsisType = ...,
        decoder_kv_cache: KvCache | EllipsisType = ...,
        prompt_blocks: list[int] | EllipsisType = ...,
        decoder_blocks: list[int] | EllipsisType = ...,
    ) -> None:
        """Copy block `src_blocks[i]` of a PROMPT into block `dst_blocks[i]` of this DECODER; its key stays.

        Args:
            src_cache_key: key of a blocks cache, or its `cache_id`; or of a slot, whose first bytes go to
                `dst_blocks` in their order.
            dst_cache: a blocks cache; its blocks must have the size of the source's.
            src_blocks: a sequence or one-dimensional array; empty or left out for a slot.
            dst_blocks: the same; no block twice.
            src_layer_range: `range` of layers, step 1, that are copied; all if None.
            dst_layer_range: the same, as long, of the destination.
            tensor_num_per_layer: looked at only with a range.
            prompt_cache_key: another name of `src_cache_key`.
            decoder_kv_cache: another name of `dst_cache`.
            prompt_blocks: another name of `src_blocks`.
            decoder_blocks: another name of `dst_blocks`.

        Raises:
            LLMException: LLM_NOT_YET_LINK, LLM_KV_CACHE_NOT_EXIST (no such cache or key), LLM_PARAM_INVALID.
        """
        call = "pull_blocks"
        key = one_of(call, src_cache_key=src_cache_key, prompt_cache_key=prompt_cache_key)
        target = one_of(call, dst_cache=dst_cache, decoder_kv_cache=decoder_kv_cache)
        has_sources = src_blocks is not ... or prompt_blocks is not ...
        from_blocks = one_of(call, src_blocks=src_blocks, prompt_blocks=prompt_blocks) if has_sources else []
        to_blocks = one_of(call, dst_blocks=dst_blocks, decoder_blocks=decoder_blocks)
        layers = {"src_layer_range": src_layer_range, "dst_layer_range": dst_layer_range}
        with ArgumentChecks() as check:
            check.instance("src_cache_key", key, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex)
            check.instance("dst_cache", target, KvCache)
            sources = check.indices("src_blocks", from_blocks)
            targets = check.indices("dst_blocks", to_blocks)
            options = check_options(
                check, {**layers, "tensor_num_per_layer": tensor_num_per_layer}, LAYER_OPTIONS
            )
        with self.call(LLMRole.DECODER) as deadline:
            cache = pooled_cache(self._pool, target)
            for pull in block_pulls(key, cache, sources, targets, options):
                pull.run(self._ends.links.link_of(key.cluster_id), deadline)

    def push_cache(  # noqa: PLR0917 - the interface's order
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: KvCache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Copy a slot of this PROMPT into a slot of a registered cache of a DECODER.

        Args:
            dst_cache_key: the destination slot.
            src_cache: the source, a contiguous cache.
            src_batch_index: index of the source slot.
            src_layer_range: `range` of layers, step 1, that are copied; all if None.
            dst_layer_range: the same, as long, of the destination.
            size: bytes of each tensor, from the start of both slots; -1: the whole source slot.
            tensor_num_per_layer: looked at only with a range.

        Raises:
            LLMException: LLM_NOT_YET_LINK, LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID.
        """
        layers = {"src_layer_range": src_layer_range, "dst_layer_range": dst_layer_range}
        with ArgumentChecks() as check:
            check.instance("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex)
            check.instance("src_cache", src_cache, KvCache)
            slot = check.integer("src_batch_index", src_batch_index, U32)
            num_bytes = check.size("size", size)
            options = check_options(
                check, {**layers, "tensor_num_per_layer": tensor_num_per_layer}, LAYER_OPTIONS
            )
        with self.call(LLMRole.PROMPT) as deadline:
            push = slot_push(dst_cache_key, pooled_cache(self._pool, src_cache), slot, num_bytes, options)
            push.run(self._ends.link_to_push(dst_cache_key.cluster_id), deadline)

    def push_blocks(  # noqa: PLR0917 - the interface's order
        self,
        dst_cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_cache: KvCache,
        src_blocks: list[int],
        dst_blocks: list[int],
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Copy blocks of this PROMPT into those of a registered cache of a DECODER, one by one.

        Args:
            dst_cache_key: the destination, a blocks cache.
            src_cache: the source, a blocks cache with blocks of the same size.
            src_blocks: a sequence or one-dimensional array; block `src_blocks[i]` goes to `dst_blocks[i]`.
            dst_blocks: the same, as long; no block twice.
            src_layer_range: `range` of layers, step 1, that are copied; all if None.
            dst_layer_range: the same, as long, of the destination.
            tensor_num_per_layer: looked at only with a range.

        Raises:
            LLMException: LLM_NOT_YET_LINK, LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID.
        """
        layers = {"src_layer_range": src_layer_range, "dst_layer_range": dst_layer_range}
        with ArgumentChecks() as check:
            check.instance("dst_cache_key", dst_cache_key, BlocksCacheKey, CacheKeyByIdAndIndex)
            check.instance("src_cache", src_cache, KvCache)
            sources = check.indices("src_blocks", src_blocks)
            targets = check.indices("dst_blocks", dst_blocks)
            options = check_options(
                check, {**layers, "tensor_num_per_layer": tensor_num_per_layer}, LAYER_OPTIONS
            )
        with self.call(LLMRole.PROMPT) as deadline:
            cache = pooled_cache(self._pool, src_cache)
            for push in block_pushes(dst_cache_key, cache, sources, targets, options):
                push.run(self._ends.link_to_push(dst_cache_key.cluster_id), deadline)

    def transfer_cache_async(  # noqa: PLR0917 - the interface's order
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: list[Config] | tuple[Config, ...],
        src_block_indices: list[int] | None = None,
        dst_block_indices: list[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Push a cache of this PROMPT in a thread, each layer as soon as it is computed.

        Args:
            src_cache: the source. Two tensors are a layer, or one if their number is odd.
            layer_synchronizer: called once per layer, with `sync_kv_timeout`.
            transfer_configs: the destinations, at least one.
            src_block_indices: blocks of a blocks cache; block i goes to block i of `dst_block_indices`.
            dst_block_indices: the same, as long; no block twice.
            dst_block_memory_size: bytes of a block of the destination; those of the source if None.

        Raises:
            LLMException: LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST. What goes wrong later is in the task's
                results, and so is a destination that is not linked.
        """
        with ArgumentChecks() as check:
            check.instance("src_cache", src_cache, KvCache)
            check.instance("layer_synchronizer", layer_synchronizer, LayerSynchronizer)
            check.instance("transfer_configs", transfer_configs, list, tuple)
            for one in transfer_configs:
                check.instance("transfer_configs", one, TransferConfig, TransferWithCacheKeyConfig)
            check.require(bool(transfer_configs), "transfer_configs is empty")
            given = src_block_indices is not None or dst_block_indices is not None
            sources = check.indices("src_block_indices", src_block_indices) if given else None
            targets = check.indices("dst_block_indices", dst_block_indices) if given else None
            if dst_block_memory_size is not None:
                check.integer("dst_block_memory_size", dst_block_memory_size, DIMENSION)

        def move(cluster_id: int, pushes: Callable[[PooledCache[CacheMemory]], list[Push]]) -> None:
            with self.call(LLMRole.PROMPT) as deadline:
                for push in pushes(pooled_cache(self._pool, src_cache)):
                    push.run(self._ends.link_to_push(cluster_id), deadline)

        with self.call(LLMRole.PROMPT):
            blocks = None if sources is None or targets is None else (sources, targets)
            cache = pooled_cache(self._pool, src_cache)
            transfers = layer_transfers(cache, transfer_configs, blocks, dst_block_memory_size, move)
        timeout_ms = int(self._timeout * 1e3)
        return CacheTask(layer_synchronizer, transfers, len(transfer_configs), timeout_ms)
