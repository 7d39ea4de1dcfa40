"""The links of a DECODER."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.loans.shared_blocks import SharedBlocks
from quire.datadist.peers import LLMClusterInfo, dotted
from quire.datadist.status import LLMStatusCode, failure
from quire.datadist.transports.interface import DestinationEnd, LinkTerms, Transport
from quire.datadist.wire import sockets
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting
from quire.datadist.wire.protocol import (
    BYTE_ORDER,
    NO_IDENTITY,
    LinkEstablished,
    LinkOffer,
    LinkRequest,
    OfferAccepted,
    OfferDeclined,
    ProtocolError,
    TransportOffer,
    decoder_channel,
)

logger = logging.getLogger(__name__)

MAX_LINKS = 512


class DecoderLinks:
    """Creates, finds and takes down links.

    Args:
        cluster_id: cluster id of this DECODER.
        token: that peers must have; empty: none.
        transports: that this side has.
        use_checksum: whether this side wants checksums.
        pool: PROMPTs may push into what is registered in it.
        shared: blocks that this side fills with those of PROMPTs; None: there are none.
    """

    def __init__(
        self,
        cluster_id: int,
        token: bytes,
        transports: Sequence[Transport],
        *,
        use_checksum: bool,
        pool: CachePool[CacheMemory],
        shared: SharedBlocks | None = None,
    ) -> None:
        self._pool = pool
        self._shared = shared
        self._cluster_id = cluster_id
        self._token = token
        self._transports = transports
        self._use_checksum = use_checksum
        self._links: dict[int, DecoderLink] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def transports(self) -> dict[int, str]:
        """Name of the transport to each linked PROMPT, including broken links."""
        with self._lock:
            return {cluster_id: link.transport for cluster_id, link in self._links.items()}

    def link_of(self, cluster_id: int) -> DecoderLink:
        """Return the link with a PROMPT.

        Raises:
            LLMException: LLM_NOT_YET_LINK.
        """
        with self._lock:
            link = self._links.get(cluster_id)
        if link is None:
            raise failure(
                LLMStatusCode.LLM_NOT_YET_LINK,
                f"this side has not linked to cluster {cluster_id}; call link_clusters (of a PROMPT and a "
                "DECODER, on the DECODER)",
            )
        return link

    def open(
        self, address: tuple[str, int], prompt_cluster_id: int, decoder_cluster_id: int, deadline: float
    ) -> DecoderLink:
        """Link to a PROMPT; the link is not added here. Cleans up if that fails.

        Blocks lent by the PROMPT are read into this side's shared blocks: both must have the same identity,
        and this side's block size must be a multiple of the PROMPT's.

        Raises:
            TimeoutError: the PROMPT does not answer in time.
            OSError: it cannot be reached, is not the expected peer, or refuses.
        """
        shared = self._shared
        identity = NO_IDENTITY if shared is None else shared.identity()
        block_size = 0 if shared is None else shared.block_size
        connection = sockets.connect(address, deadline)
        channel = decoder_channel(connection)
        destination_end: DestinationEnd | None = None
        try:
            key = greet(connection, self._token, new_greeting(ConnectionKind.CONTROL), deadline)
            offers = [TransportOffer(one.name, one.parameters) for one in self._transports]
            request = LinkRequest(
                prompt_cluster_id,
                decoder_cluster_id,
                BYTE_ORDER,
                dict(identity),
                self._use_checksum,
                offers,
                block_size,
            )
            channel.send(request, deadline)
            while destination_end is None:
                offer = channel.expect(LinkOffer, deadline)
                if offer.block_size and block_size % offer.block_size:
                    raise ProtocolError(
                        f"the peer offers blocks of {offer.block_size} tokens for {block_size}"
                    )
                terms = LinkTerms(offer.link_id, address, key, offer.use_checksum or self._use_checksum)
                try:
                    destination_end = _open_destination(self._transports, offer.transport, terms, deadline)
                except ProtocolError:
                    raise
                except OSError as error:
                    logger.info(
                        "PROMPT %s: %s cannot be used: %s", prompt_cluster_id, offer.transport.name, error
                    )
                    channel.send(OfferDeclined(str(error)[:1024]), deadline)
            channel.send(OfferAccepted(), deadline)
            channel.expect(LinkEstablished, deadline)
        except BaseException:
            channel.close()
            if destination_end is not None:
                destination_end.close()
            raise
        return DecoderLink(prompt_cluster_id, channel, destination_end, offer, terms)

    def link(self, clusters: Sequence[LLMClusterInfo], deadline: float) -> list[LLMStatusCode]:
        """Link to all PROMPTs concurrently, and return the result of each."""
        results = [LLMStatusCode.LLM_FAILED] * len(clusters)

        def link_one(index: int) -> None:
            try:
                results[index] = self._link(clusters[index], deadline)
            except Exception:
                logger.exception("cannot link to PROMPT %s", clusters[index].remote_cluster_id)

        threads = []
        for index, cluster in enumerate(clusters):
            earlier = [one.remote_cluster_id for one in clusters[:index]]
            if cluster.remote_cluster_id is not None and cluster.remote_cluster_id in earlier:
                results[index] = LLMStatusCode.LLM_REPEAT_REQUEST
            else:
                threads.append(
                    threading.Thread(target=link_one, args=(index,), name="datadist-linking", daemon=True)
                )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # each observes the deadline
        return results

    def take_pushes(self, deadline: float) -> None:
        """Allow all reachable PROMPTs to push into this side's caches."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            self._take_pushes(link, deadline)

    def unlink(self, cluster_id: int, deadline: float) -> LLMStatusCode:
        """Take down both ends of a link; returns as `DecoderLink.unlink`, or LLM_NOT_YET_LINK."""
        with self._lock:
            link = self._links.get(cluster_id)
        if link is None:
            return LLMStatusCode.LLM_NOT_YET_LINK
        result = link.unlink(deadline)
        if result is not LLMStatusCode.LLM_LINK_BUSY:
            self._forget(link)
        return result

    def drop(self, cluster_id: int) -> LLMStatusCode:
        """Take down this end of a link; return LLM_SUCCESS or LLM_NOT_YET_LINK."""
        with self._lock:
            link = self._links.pop(cluster_id, None)
        if link is None:
            return LLMStatusCode.LLM_NOT_YET_LINK
        link.drop()
        return LLMStatusCode.LLM_SUCCESS

    def close(self) -> None:
        """Take down this end of all links."""
        with self._lock:
            self._is_closed = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.drop()

    def _link(self, cluster: LLMClusterInfo, deadline: float) -> LLMStatusCode:
        cluster_id, addresses = cluster.remote_cluster_id, cluster.remote_ip_infos
        if cluster_id is None or len(addresses) != 1:
            logger.warning(
                "PROMPT %s has %d remote addresses; a link takes a remote_cluster_id and one address, as an "
                "LLMDataDist has one device: use one for each",
                cluster_id,
                len(addresses),
            )
            return LLMStatusCode.LLM_PARAM_INVALID
        with self._lock:
            if cluster_id in self._links:
                return LLMStatusCode.LLM_ALREADY_LINK
        ip, port = addresses[0]
        try:
            link = self.open((dotted(ip), port), cluster_id, self._cluster_id, deadline)
        except TimeoutError as error:
            logger.warning("PROMPT %s at %s:%d did not answer: %s", cluster_id, dotted(ip), port, error)
            return LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        except OSError as error:
            logger.warning("cannot link to PROMPT %s at %s:%d: %s", cluster_id, dotted(ip), port, error)
            return LLMStatusCode.LLM_LINK_FAILED
        result = self._keep(link)
        if result is LLMStatusCode.LLM_SUCCESS and self._pool.has_handed_out:
            self._take_pushes(link, deadline)  # only now, so that no cache is missed in between
        return result

    def _take_pushes(self, link: DecoderLink, deadline: float) -> None:
        try:
            link.take_pushes(self._pool, deadline)
        except OSError as error:
            logger.warning("PROMPT %s cannot push: %s", link.cluster_id, error)

    def _keep(self, link: DecoderLink) -> LLMStatusCode:
        with self._lock:
            if not self._is_closed and len(self._links) < MAX_LINKS:
                self._links[link.cluster_id] = link
                return LLMStatusCode.LLM_SUCCESS
        logger.warning("this DECODER has been finalized, or has %d links, which is the limit", MAX_LINKS)
        link.drop()
        return LLMStatusCode.LLM_LINK_FAILED

    def _forget(self, link: DecoderLink) -> None:
        with self._lock:
            if self._links.get(link.cluster_id) is link:
                del self._links[link.cluster_id]


def _open_destination(
    transports: Sequence[Transport], offer: TransportOffer, terms: LinkTerms, deadline: float
) -> DestinationEnd:
    chosen = next((one for one in transports if one.name == offer.name), None)
    if chosen is None:
        raise ProtocolError(f"the peer chose the transport {offer.name!r}, which was not offered")
    try:
        return chosen.open_destination(terms, offer.parameters, deadline)
    except ValueError as error:
        raise ProtocolError(f"the peer's parameters are malformed: {error}") from error
