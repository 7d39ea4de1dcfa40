"""All link ends of a side: links that it has made, and a service for links from others."""

from __future__ import annotations

import ipaddress
import logging
import socket

from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.interface.options import InitOptions
from quire.datadist.interface.pushes import PushingLink
from quire.datadist.links.decoder_links import DecoderLinks
from quire.datadist.links.prompt_link import PromptLink
from quire.datadist.links.prompt_service import PromptService
from quire.datadist.loans.shared_blocks import SharedBlocks
from quire.datadist.status import LLMException, LLMStatusCode
from quire.datadist.transports.opening import open_transports

logger = logging.getLogger(__name__)


class LinkEnds:
    """The ends of all links of one side, made by it or by others.

    Args:
        options: options of `init`; with an address, it listens.
        cluster_id: cluster id of this side.
        epoch: epoch of this side's start.
        pool: the caches that peers may pull.
        takes_pushes: whether sides that link to this one from now on may push to it.
        shared: blocks that both sides of its links may share; None: there are none.

    Attributes:
        links: that this side has made, as a DECODER does.
        service: of the links that others have made, as to a PROMPT; None: it does not listen.
        shares_memory: whether peers on this host may map the caches.
        takes_pushes: the argument.

    Raises:
        LLMException: LLM_FAILED: it cannot listen; everything is cleaned up.
    """

    def __init__(
        self,
        options: InitOptions,
        *,
        cluster_id: int,
        epoch: int,
        pool: CachePool[CacheMemory],
        takes_pushes: bool,
        shared: SharedBlocks | None = None,
    ) -> None:
        self._options = options
        self._cluster_id = cluster_id
        self._epoch = epoch
        self._pool = pool
        self._shared = shared
        self.takes_pushes = takes_pushes
        self._transports = open_transports(
            options.transports, listens=options.address is not None, num_tcp_streams=options.num_tcp_streams
        )
        listeners = [one.listener for one in self._transports if one.listener is not None]
        self.shares_memory = bool(listeners)
        self.links = DecoderLinks(
            cluster_id,
            options.token,
            self._transports,
            use_checksum=options.use_checksum,
            pool=pool,
            shared=shared,
        )
        self.service: PromptService | None = None
        if options.address is None:
            return
        if not options.token and not ipaddress.IPv4Address(options.address[0]).is_loopback:
            logger.warning(
                "listening on %s without a token (quire.token, or kv_transfer_token of an engine): everyone "
                "who reaches it can read KV, and in role MIX write to caches that take pushes",
                options.address[0],
            )
        try:
            self.service = PromptService(options.address, options.token, self._new_link, listeners)
        except LLMException:
            self.close_transports()
            raise

    @property
    def has_links(self) -> bool:
        """Whether there is a link, even a broken one."""
        return bool(self.links.transports or (self.service is not None and self.service.transports))

    def link_to_push(self, cluster_id: int) -> PushingLink:
        """Return the link made by a peer, otherwise the one made by this side.

        Raises:
            LLMException: LLM_NOT_YET_LINK.
        """
        link = None if self.service is None else self.service.link_of(cluster_id)
        return self.links.link_of(cluster_id) if link is None else link

    def unlink(self, cluster_id: int, deadline: float) -> LLMStatusCode:
        """Take a link down, at both ends if this side has made it."""
        code = self.links.unlink(cluster_id, deadline)
        return self._dropped(code, cluster_id)

    def drop(self, cluster_id: int) -> LLMStatusCode:
        """Take down this side's end of a link."""
        return self._dropped(self.links.drop(cluster_id), cluster_id)

    def check(self, cluster_id: int, deadline: float) -> None:
        """Check that a link is usable; raises like `DecoderLink.check`, and LLM_NOT_YET_LINK."""
        if self.service is None or cluster_id not in self.service.transports:
            self.links.link_of(cluster_id).check(deadline)

    def close(self) -> None:
        """Stop listening, and drop all links."""
        if self.service is not None:
            self.service.close()
        self.links.close()

    def close_transports(self) -> None:
        """Close the transports, after the last transfer."""
        for transport in self._transports:
            transport.close()

    def _dropped(self, code: LLMStatusCode, cluster_id: int) -> LLMStatusCode:
        """Also drop the end of a link made by the other side; `code` is the result for this side's link."""
        if self.service is None:
            return code
        dropped = self.service.unlink(cluster_id)
        return dropped if code is LLMStatusCode.LLM_NOT_YET_LINK else code

    def _new_link(self, connection: socket.socket, link_id: int, key: bytes) -> PromptLink:
        return PromptLink(
            connection,
            link_id,
            key,
            cluster_id=self._cluster_id,
            epoch=self._epoch,
            pool=self._pool,
            transports=self._transports,
            use_checksum=self._options.use_checksum,
            shared=self._shared,
            takes_pushes=self.takes_pushes,
        )
