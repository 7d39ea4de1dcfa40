"""A session: the state of an `LLMDataDist` from `init` to `finalize`, or of an engine that shares KV."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import CacheMemory, HostMemory, MemoryAllocator
from quire.datadist.caches.shared_host_memory import SharedHostMemory
from quire.datadist.enums import LLMRole
from quire.datadist.interface.decoder_model import DecoderModel
from quire.datadist.interface.kv_cache_manager import KvCacheManager
from quire.datadist.interface.link_ends import LinkEnds
from quire.datadist.interface.llm_model import LLMModel
from quire.datadist.interface.model_runner import ModelRunner, default_runner
from quire.datadist.interface.options import InitOptions, ModelOptions
from quire.datadist.interface.prompt_model import PromptModel
from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.links.decoder_links import DecoderLinks
from quire.datadist.links.prompt_service import PromptService
from quire.datadist.loans.shared_blocks import SharedBlocks
from quire.datadist.peers import LLMClusterInfo, LLMReq
from quire.datadist.status import LLMStatusCode, failure, invalid

logger = logging.getLogger(__name__)

LinkResult = tuple[LLMStatusCode, list[LLMStatusCode]]
"""Result of the whole call, and of each cluster."""


class Session:
    """One side of links: its caches and models, and blocks shared from an engine's KV cache.

    Args:
        role: PROMPT listens, DECODER links, MIX does both, and peers may push to it.
        cluster_id: this side's id for peers; all engines have the same.
        options: options of `LLMDataDist.init`.
        shared: blocks of an engine's KV cache, which peers read through their sessions' `open_link`; None:
            none. They are not a cache of this session: pulls and pushes do not reach them.

    Attributes:
        role: the current role.
        epoch: random number of this start, sent to peers when they link.
        manager: allocates and moves caches.

    Raises:
        LLMException: LLM_FAILED: it cannot listen on the address in the options.
    """

    def __init__(
        self, role: LLMRole, cluster_id: int, options: InitOptions, shared: SharedBlocks | None = None
    ) -> None:
        self.role = role
        self.epoch = secrets.randbits(64)
        self._cluster_id = cluster_id
        self._options = options
        self._shared = shared
        self._pool: CachePool[CacheMemory] = CachePool(self._allocate, options.pool_bytes)
        self._linking = threading.Lock()
        self._adding = threading.RLock()
        self._models: list[LLMModel] = []
        self._ends = self._new_ends(role, options)
        self.manager = KvCacheManager(
            role, self._pool, self._ends, device=options.device, timeout=options.timeout
        )

    @property
    def links(self) -> DecoderLinks:
        """Links that this side has made."""
        return self._ends.links

    @property
    def service(self) -> PromptService | None:
        """The service for links from others, if this side listens."""
        return self._ends.service

    def open_link(self, address: tuple[str, int], deadline: float) -> DecoderLink:
        """Open a new link to a session with the same cluster id, to read its shared blocks.

        There may be any number to one address. Drop them before `close`.

        Args:
            address: ip and port that the peer listens on.
            deadline: in seconds on the monotonic clock.

        Raises:
            TimeoutError: the peer does not answer in time.
            OSError: it cannot be reached, has other KV, or refuses.
        """
        return self.links.open(address, self._cluster_id, secrets.randbits(63), deadline)

    def add_model(self, options: dict[str, str], runner: ModelRunner | None) -> LLMModel:
        """Add a model of this side."""
        model_options = ModelOptions.read(options)
        chosen = default_runner(options) if runner is None else runner
        with self._adding:
            model_id = len(self._models)
            model: PromptModel | DecoderModel
            if self.role is LLMRole.MIX:
                raise invalid("role is MIX; a model is on one side, PROMPT or DECODER")
            if self.role is LLMRole.PROMPT:
                model = PromptModel(
                    self._cluster_id, model_id, model_options, chosen, manager=self.manager, pool=self._pool
                )
            else:
                model = DecoderModel(
                    model_id, model_options, chosen, manager=self.manager, pool=self._pool, links=self.links
                )
            added = LLMModel(model_id, model, takes_tensors=runner is None)
            self._models.append(added)
        return added

    def with_links(
        self, clusters: Sequence[LLMClusterInfo], deadline: float, act: Callable[[], list[LLMStatusCode]]
    ) -> LinkResult:
        """Run a function that changes links, one call at a time."""
        if not self._linking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return one_for_all(LLMStatusCode.LLM_PROCESSING_LINK, clusters)
        try:
            return overall(act())
        finally:
            self._linking.release()

    def unlink(self, cluster_id: int | None, deadline: float) -> LLMStatusCode:
        """Take a link down, at both ends if this side has made it."""
        if cluster_id is None:
            return LLMStatusCode.LLM_PARAM_INVALID
        return self._ends.unlink(cluster_id, deadline)

    def drop(self, cluster_id: int | None) -> LLMStatusCode:
        """Take down this side's end of a link."""
        return LLMStatusCode.LLM_PARAM_INVALID if cluster_id is None else self._ends.drop(cluster_id)

    def check_link(self, cluster_id: int) -> None:
        """Check that a link is usable."""
        self._ends.check(cluster_id, time.monotonic() + self._options.timeout)

    def switch_role(self, role: LLMRole, address: tuple[str, int] | None) -> None:
        """Switch to another role, listening only on this address."""
        if not self._linking.acquire(timeout=self._options.timeout):
            raise failure(
                LLMStatusCode.LLM_PROCESSING_LINK, "timed out waiting for another call that links or unlinks"
            )
        try:
            self._switch(role, dataclasses.replace(self._options, address=address))
        finally:
            self._linking.release()

    def complete_request(self, request: LLMReq) -> None:
        """Release a request."""
        if self.role is not LLMRole.DECODER:
            self._pool.remove_request(request.req_id)
        for model in self._models:
            model.complete(request)

    def close(self) -> None:
        """Close links, models and caches."""
        self.manager.close()
        self._ends.close()
        self._pool.close()
        for model in self._models:
            model.close()
        self._ends.close_transports()

    def _switch(self, role: LLMRole, options: InitOptions) -> None:
        with self._adding:
            if self._models:
                raise invalid("there are models, which belong to a role; finalize instead")
            before = self._ends
            if before.has_links:
                raise failure(LLMStatusCode.LLM_EXIST_LINK, "there are links; unlink them first")
            is_same = before.service is not None and before.service.address == options.address
            ends = before if is_same else self._new_ends(role, options)
            try:
                with self.manager.switching(role, ends):
                    self.role, self._ends = role, ends
                    ends.takes_pushes = role is LLMRole.MIX
            except BaseException:
                if ends is not before:
                    ends.close()
                    ends.close_transports()
                raise
            if ends is not before:
                before.close()
                before.close_transports()

    def _new_ends(self, role: LLMRole, options: InitOptions) -> LinkEnds:
        return LinkEnds(
            options,
            cluster_id=self._cluster_id,
            epoch=self.epoch,
            pool=self._pool,
            shared=self._shared,
            takes_pushes=role is LLMRole.MIX,
        )

    def _allocate(self, desc: CacheDesc) -> CacheMemory:
        host_memory = SharedHostMemory if self._ends.shares_memory else HostMemory
        return MemoryAllocator(self._options.device, host_memory).allocate(desc)


def one_for_all(code: LLMStatusCode, clusters: Sequence[LLMClusterInfo]) -> LinkResult:
    """Return one code for a call and each of its clusters."""
    return code, [code] * len(clusters)


def overall(codes: list[LLMStatusCode]) -> LinkResult:
    """Return the first failure among the codes, and the codes."""
    linked = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
    return next((one for one in codes if one not in linked), LLMStatusCode.LLM_SUCCESS), codes
