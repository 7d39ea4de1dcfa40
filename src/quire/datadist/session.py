"""What an `LLMDataDist` has from `init` to `finalize`."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

from quire.datadist.cache_pool import CachePool
from quire.datadist.decoder_links import DecoderLinks
from quire.datadist.decoder_model import DecoderModel
from quire.datadist.enums import LLMRole
from quire.datadist.kv_cache_manager import KvCacheManager
from quire.datadist.llm_model import LLMModel
from quire.datadist.memory import CacheMemory, HostMemory, MemoryAllocator
from quire.datadist.model_runner import ModelRunner, default_runner
from quire.datadist.options import InitOptions, ModelOptions
from quire.datadist.prompt_link import PromptLink
from quire.datadist.prompt_model import PromptModel
from quire.datadist.prompt_service import PromptService
from quire.datadist.requests import LLMClusterInfo, LLMReq
from quire.datadist.shared_host_memory import SharedHostMemory
from quire.datadist.status import LLMException, LLMStatusCode
from quire.datadist.transports.interface import Transport
from quire.datadist.transports.nixl import NixlTransport
from quire.datadist.transports.shared_memory import SharedMemoryTransport
from quire.datadist.transports.tcp import TcpTransport

logger = logging.getLogger(__name__)

LinkResult = tuple[LLMStatusCode, list[LLMStatusCode]]
"""Of the whole call, and of each cluster."""


class Session:
    """What an `LLMDataDist` has from `init` to `finalize`."""

    def __init__(self, role: LLMRole, cluster_id: int, options: InitOptions) -> None:
        self._role = role
        self._cluster_id = cluster_id
        self._epoch = secrets.randbits(64)
        self._use_checksum = options.use_checksum
        self._transports = _open_transports(role, options)
        listeners = [one.listener for one in self._transports if one.listener is not None]
        host_memory = SharedHostMemory if listeners else HostMemory
        allocator = MemoryAllocator(options.device, host_memory)
        self._pool: CachePool[CacheMemory] = CachePool(allocator.allocate, options.pool_bytes)
        self._linking = threading.Lock()
        self._adding = threading.RLock()
        self._models: list[LLMModel] = []
        self.links = DecoderLinks(
            cluster_id, options.token, self._transports, use_checksum=options.use_checksum
        )
        self.manager = KvCacheManager(
            role, self._pool, self.links, device=options.device, timeout=options.timeout
        )
        self.service: PromptService | None = None
        if options.address is not None:
            if not options.token and not ipaddress.IPv4Address(options.address[0]).is_loopback:
                logger.warning(
                    "listening on %s without quire.token: everyone who reaches it can read KV",
                    options.address[0],
                )
            try:
                self.service = PromptService(options.address, options.token, self._new_link, listeners)
            except LLMException:
                self._close_transports()
                raise

    def add_model(self, options: dict[str, str], runner: ModelRunner | None) -> LLMModel:
        """Add a model of this side."""
        model_options = ModelOptions.read(options)
        chosen = default_runner(options) if runner is None else runner
        with self._adding:
            model_id = len(self._models)
            model: PromptModel | DecoderModel
            if self._role is LLMRole.PROMPT:
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
        """Do what changes links, one call at a time."""
        if not self._linking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return one_for_all(LLMStatusCode.LLM_PROCESSING_LINK, clusters)
        try:
            return overall(act())
        finally:
            self._linking.release()

    def unlink(self, cluster_id: int | None, deadline: float) -> LLMStatusCode:
        """Take a link down, at both ends if this side has made it."""
        if cluster_id is None or self.service is not None:
            return self.drop(cluster_id)
        return self.links.unlink(cluster_id, deadline)

    def drop(self, cluster_id: int | None) -> LLMStatusCode:
        """Take this side's end of a link down."""
        if cluster_id is None:
            return LLMStatusCode.LLM_PARAM_INVALID
        return self.links.drop(cluster_id) if self.service is None else self.service.unlink(cluster_id)

    def complete_request(self, request: LLMReq) -> None:
        """Forget a request."""
        if self._role is LLMRole.PROMPT:
            self._pool.remove_request(request.req_id)
        for model in self._models:
            model.complete(request)

    def close(self) -> None:
        """End everything."""
        self.manager.close()
        if self.service is not None:
            self.service.close()
        self.links.close()
        self._pool.close()
        for model in self._models:
            model.close()
        self._close_transports()

    def _close_transports(self) -> None:
        for transport in self._transports:
            transport.close()

    def _new_link(self, connection: socket.socket, link_id: int, key: bytes) -> PromptLink:
        return PromptLink(
            connection,
            link_id,
            key,
            cluster_id=self._cluster_id,
            epoch=self._epoch,
            pool=self._pool,
            transports=self._transports,
            use_checksum=self._use_checksum,
        )


def one_for_all(code: LLMStatusCode, clusters: Sequence[LLMClusterInfo]) -> LinkResult:
    """Return one code for a call and each of its clusters."""
    return code, [code] * len(clusters)


def overall(codes: list[LLMStatusCode]) -> LinkResult:
    """Return the codes with the first that is a failure."""
    linked = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
    return next((one for one in codes if one not in linked), LLMStatusCode.LLM_SUCCESS), codes


def _open_transports(role: LLMRole, options: InitOptions) -> list[Transport]:
    opened = []
    for name in options.transports:
        try:
            opened.append(_transport(name, role, options))
        except OSError as error:
            logger.warning("%s cannot be used: %s", name, error)
    return opened


def _transport(name: str, role: LLMRole, options: InitOptions) -> Transport:
    if name == "shared_memory":
        return SharedMemoryTransport(listens=role is LLMRole.PROMPT)
    return NixlTransport() if name == "nixl" else TcpTransport(options.num_tcp_streams)
