"""A model on the decode side: one cache for all steps, into which requests are merged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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
from quire.datadist.interface.pulls import TransferOptions, block_pulls, slot_pull
from quire.datadist.links.decoder_links import DecoderLinks
from quire.datadist.peers import LLMReq
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid

logger = logging.getLogger(__name__)


class DecoderModel:
    """A model of a DECODER.

    Args:
        model_id: id of the model.
        options: options of the model.
        runner: computes it.
        manager: whose calls wait for each other.
        pool: pool of the caches.
        links: with PROMPTs.
    """

    def __init__(
        self,
        model_id: int,
        options: ModelOptions,
        runner: ModelRunner,
        *,
        manager: KvCacheManager,
        pool: CachePool[CacheMemory],
        links: DecoderLinks,
    ) -> None:
        self._model_id = model_id
        self._options = options
        self._runner = runner
        self._manager = manager
        self._pool = pool
        self._links = links
        self._merged: dict[int, int] = {}  # requests by slot
        self._staged_req_id: int | None = None
        self._staging: PooledCache[CacheMemory] | None = None
        self._kv_cache = self._allocate()

    def pull(self, request: LLMReq) -> None:
        """Pull a request's slot into the staging slot."""
        with self._manager.call() as deadline:
            if request.is_placeholder or self._staging is None:
                raise invalid(
                    "pull_kv needs a req_id, and a model without enable_page_attention; see pull_blocks"
                )
            pull = slot_pull(self._key(request), self._staging, 0, -1, TransferOptions())
            link = self._links.link_of(request.prompt_cluster_id)
            before, self._staged_req_id = self._staged_req_id, None
            try:
                pull.run(link, deadline)
            except LLMException as error:
                if error.status_code is not LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT:
                    self._staged_req_id = before  # nothing was written
                raise
            self._staged_req_id = request.req_id

    def merge(self, request: LLMReq, batch_index: int, batch_id: int) -> None:
        """Move the staged KV into a slot."""
        with self._manager.call():
            batch_size = self._options.desc.batch_size
            if self._staging is None:
                raise invalid("merge_kv needs a model without enable_page_attention")
            if batch_index >= batch_size or batch_id != 0:
                raise invalid(
                    f"batch_index {batch_index} of batch {batch_id}: there are {batch_size} slots, batch 0"
                )
            if request.is_placeholder or self._staged_req_id != request.req_id:
                raise failure(
                    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
                    f"request {request.req_id} is not staged, but {self._staged_req_id}; call pull_kv",
                )
            copy_slot(self._cache(), batch_index, self._staging, 0)
            self._merged[batch_index] = request.req_id
            self._staged_req_id = None

    def pull_blocks(
        self,
        request: LLMReq,
        prompt_blocks: npt.NDArray[np.uint64],
        decoder_blocks: npt.NDArray[np.uint64],
    ) -> None:
        """Pull blocks into blocks, or, without `prompt_blocks`, a request's slot into blocks."""
        with self._manager.call() as deadline:
            if not self._options.is_paged:
                raise failure(
                    LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                    "pull_blocks needs the model's option enable_page_attention",
                )
            key: BlocksCacheKey | CacheKey = self._key(request)
            if len(prompt_blocks) or not len(decoder_blocks):
                key = BlocksCacheKey(request.prompt_cluster_id, self._model_id)
            elif request.is_placeholder:
                raise invalid("without prompt_blocks, the request needs a req_id")
            pulls = list(block_pulls(key, self._cache(), prompt_blocks, decoder_blocks, TransferOptions()))
            for pull in pulls:
                pull.run(self._links.link_of(request.prompt_cluster_id), deadline)

    def predict(self, requests: Sequence[LLMReq], inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Compute one step of the merged requests."""
        with self._manager.call():
            self._check(requests)
        return self._runner.run_model(self._kv_cache, inputs, **kwargs)

    def complete(self, request: LLMReq) -> None:
        """Forget a request."""
        with self._manager.call():
            self._merged = {slot: one for slot, one in self._merged.items() if one != request.req_id}
            if self._staged_req_id == request.req_id:
                self._staged_req_id = None

    def close(self) -> None:
        """Tell the runner that its cache has been released."""
        try:
            self._runner.on_cache_deallocated(self._kv_cache)
        except Exception:
            logger.exception("on_cache_deallocated of model %d failed", self._model_id)

    def _allocate(self) -> KvCache:
        desc = self._options.desc
        with self._manager.call():
            if self._options.is_paged:
                kv_cache = kv_cache_of(self._pool, self._pool.allocate_blocks(desc, None, is_of_model=True))
            else:
                kv_cache = kv_cache_of(self._pool, self._pool.allocate(desc, is_of_model=True))
                one_slot = CacheDesc(desc.num_tensors, [1, *desc.shape[1:]], desc.data_type)
                try:
                    self._staging = self._pool.allocate(one_slot, is_of_model=True)
                except BaseException:
                    self._pool.release_handle(kv_cache.cache_id)
                    raise
        try:
            self._runner.on_cache_allocated(kv_cache)
        except BaseException:
            self._pool.release_handle(kv_cache.cache_id)
            if self._staging is not None:
                self._pool.release_handle(self._staging.cache_id)
            raise
        return kv_cache

    def _check(self, requests: Sequence[LLMReq]) -> None:
        batch_size = self._options.desc.batch_size
        if self._options.is_paged:
            if not requests:
                raise invalid("there is no request")
            return
        if len(requests) != batch_size:
            raise invalid(f"there are {len(requests)} requests, not {batch_size}: one for each slot")
        for slot, request in enumerate(requests):
            if not request.is_placeholder and self._merged.get(slot) != request.req_id:
                raise invalid(
                    f"request {request.req_id} is at slot {slot}, which has {self._merged.get(slot)}; "
                    "merge it, or pass a placeholder"
                )

    def _cache(self) -> PooledCache[CacheMemory]:
        return self._pool.cache(self._kv_cache.cache_id)

    def _key(self, request: LLMReq) -> CacheKey:
        return CacheKey(request.prompt_cluster_id, request.req_id, self._model_id)
