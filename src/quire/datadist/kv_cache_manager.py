"""The caches of one side, and pulling into them."""

from __future__ import annotations

from typing import Any

import torch

from quire.datadist.argument_checks import U32, ArgumentChecks
from quire.datadist.cache_keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from quire.datadist.cache_pool import CachePool
from quire.datadist.decoder_links import DecoderLinks
from quire.datadist.enums import LLMRole
from quire.datadist.kv_cache import KvCache, pooled_cache
from quire.datadist.local_caches import LocalCaches
from quire.datadist.memory import CacheMemory
from quire.datadist.pulls import LAYER_OPTIONS, SLOT_OPTIONS, block_pulls, check_options, slot_pull


class KvCacheManager(LocalCaches):
    """The caches of one `LLMDataDist`, from its `init` to its `finalize`.

    Calls wait for each other, for at most `sync_kv_timeout`. Every method but `is_initialized` raises
    `LLMException`: LLM_ENGINE_FINALIZED after `finalize`; LLM_WAIT_PROCESS_TIMEOUT when that time is over;
    LLM_PARAM_INVALID on the wrong role, and for a cache of another manager or of the wrong kind;
    LLM_KV_CACHE_NOT_EXIST for a cache that was released.
    """

    def __init__(
        self,
        role: LLMRole,
        pool: CachePool[CacheMemory],
        links: DecoderLinks,
        *,
        device: torch.device,
        timeout: float,
    ) -> None:
        super().__init__(role, pool, device, timeout)
        self._links = links

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
