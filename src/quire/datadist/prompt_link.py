"""The PROMPT's end of one link: a thread that answers a DECODER's messages, one after another."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence

from quire.datadist import sockets
from quire.datadist.cache_pool import CachePool
from quire.datadist.memory import CacheMemory
from quire.datadist.protocol import (
    BYTE_ORDER,
    FRAME_LIMIT,
    CheckLink,
    LinkChecked,
    LinkDropped,
    LinkEstablished,
    LinkOffer,
    LinkRequest,
    OfferAccepted,
    OfferDeclined,
    ProtocolError,
    PullAccepted,
    PullCompleted,
    PullConfirmed,
    PullRefused,
    PullRequest,
    TransportOffer,
    Unlink,
    Unlinked,
    expected,
    prompt_channel,
    require_transfer,
)
from quire.datadist.pull_sources import PullSource, open_pull_source
from quire.datadist.status import LLMException
from quire.datadist.transports.interface import SourceEnd, Transport

logger = logging.getLogger(__name__)


class LinkRefusedError(Exception):
    """A DECODER asks for a link that it cannot have; the message says why."""


class PromptLink:
    """One link, from the proof of its control connection to its end.

    Attributes:
        decoder_cluster_id: of the other side; None until it has said so.
        source_end: of the data plane; None until the transport is chosen.
        transport: name of the transport that was chosen.

    Args:
        connection: the control connection, proved.
        link_id: unique among the links of this PROMPT.
        key: of the control connection.
        cluster_id: of this PROMPT.
        epoch: of this start of the PROMPT.
        pool: the caches that may be pulled.
        transports: that this side has, the best first.
        use_checksum: whether this side wants checksums.
    """

    def __init__(
        self,
        connection: socket.socket,
        link_id: int,
        key: bytes,
        *,
        cluster_id: int,
        epoch: int,
        pool: CachePool[CacheMemory],
        transports: Sequence[Transport],
        use_checksum: bool,
    ) -> None:
        self.link_id = link_id
        self.key = key
        self.decoder_cluster_id: int | None = None
        self.source_end: SourceEnd | None = None
        self.transport = ""
        self._cluster_id = cluster_id
        self._epoch = epoch
        self._pool = pool
        self._transports = transports
        self._use_checksum = use_checksum
        sockets.end_if_peer_vanishes(connection)  # the link waits on it without a deadline
        self._channel = prompt_channel(connection)

    def establish(self, deadline: float, register: Callable[[PromptLink], None]) -> None:
        """Agree on the link; `register` makes it one of this PROMPT's.

        Raises:
            LinkRefusedError: the DECODER cannot have it, and has been told why.
            OSError: the DECODER did not go on in time, or its connection has ended.
        """
        try:
            request = self._channel.expect(LinkRequest, deadline)
            self.decoder_cluster_id = request.decoder_cluster_id
            self._agree_on_transport(request, deadline).wait_until_complete(deadline)
            register(self)
            self._channel.send(LinkEstablished(), deadline)
        except LinkRefusedError as error:
            self._channel.send_last(LinkDropped(str(error)))
            raise

    def serve(self, unregister: Callable[[PromptLink], None]) -> None:
        """Answer messages until the DECODER unlinks; `unregister` undoes `register`.

        Raises:
            OSError: the connection has ended, or the DECODER broke the protocol.
        """
        while True:
            message = self._channel.receive_when_it_comes()
            if isinstance(message, Unlink):
                unregister(self)  # before the DECODER hears that both ends are gone
                self._channel.send(Unlinked(), time.monotonic() + FRAME_LIMIT)
                return
            if isinstance(message, CheckLink):
                self._channel.send(LinkChecked(), time.monotonic() + FRAME_LIMIT)
                continue
            if not isinstance(message, PullRequest):
                raise ProtocolError(f"the peer sent {type(message).__name__} outside of a pull")
            self._serve_pull(message)

    def drop(self, reason: str) -> None:
        """End the link from another thread, and tell the DECODER if that can be done at once."""
        if self.source_end is not None:
            self.source_end.shut_down()  # before the source of a transfer may be released
        self._channel.send_last(LinkDropped(reason))

    def close(self) -> None:
        """Release the connections; for the thread that serves the link, at its end."""
        self._channel.shut_down()
        self._channel.close()
        if self.source_end is not None:
            self.source_end.close()

    def _agree_on_transport(self, request: LinkRequest, deadline: float) -> SourceEnd:
        """Offer what both sides have, the best first, until the DECODER can use one."""
        self._require_fitting(request)
        use_checksum = self._use_checksum or request.use_checksum
        peers = {one.name: one.parameters for one in request.transports}
        for transport in self._transports:
            if transport.name not in peers:
                continue
            try:
                source_end = transport.open_source(peers[transport.name], use_checksum=use_checksum)
            except ValueError as error:
                raise LinkRefusedError(f"{transport.name}: {error}") from error
            except OSError as error:
                logger.warning("%s cannot be used: %s", transport.name, error)
                continue
            self.source_end = source_end
            offer = TransportOffer(transport.name, source_end.parameters)
            self._channel.send(LinkOffer(self._epoch, self.link_id, use_checksum, offer), deadline)
            answer = self._channel.receive(deadline)
            if not isinstance(answer, OfferDeclined):
                expected(OfferAccepted, answer)
                self.transport = transport.name
                return source_end
            logger.info("DECODER %s declined %s: %s", self.decoder_cluster_id, transport.name, answer.reason)
            self.source_end = None
            source_end.close()
        mine = [one.name for one in self._transports]
        raise LinkRefusedError(f"no transport in common that works: PROMPT {mine}, DECODER {sorted(peers)}")

    def _require_fitting(self, request: LinkRequest) -> None:
        if request.prompt_cluster_id != self._cluster_id:
            raise LinkRefusedError(
                f"remote_cluster_id is {request.prompt_cluster_id}, but the PROMPT at this address is "
                f"{self._cluster_id}"
            )
        if request.byte_order != BYTE_ORDER:
            raise LinkRefusedError(f"byte order: PROMPT {BYTE_ORDER}, DECODER {request.byte_order}")

    def _serve_pull(self, request: PullRequest) -> None:
        deadline = time.monotonic() + request.timeout_ms / 1e3
        try:
            source = open_pull_source(self._pool, self._epoch, request)
        except LLMException as error:
            refusal = PullRefused(request.transfer_id, error.status_code, str(error)[:1024])
            self._channel.send(refusal, time.monotonic() + FRAME_LIMIT)
            return
        try:
            self._transfer(request, source, deadline)
        except BaseException:
            self._end_transport()
            raise
        finally:
            source.hold.end(consume=False)
        self._channel.send(PullConfirmed(request.transfer_id), time.monotonic() + FRAME_LIMIT)

    def _end_transport(self) -> None:
        """Before a source is released whose transfer has failed: the DECODER may be reading it still."""
        assert self.source_end is not None
        self.source_end.shut_down()

    def _transfer(self, request: PullRequest, source: PullSource, deadline: float) -> None:
        assert self.source_end is not None
        self._channel.send(PullAccepted(request.transfer_id), deadline)
        memory = source.hold.cache.memory
        self.source_end.send(request.transfer_id, memory, source.spans, deadline)
        completed = self._channel.expect(PullCompleted, deadline + FRAME_LIMIT)
        require_transfer(completed.transfer_id, request.transfer_id)
        source.hold.end(consume=request.consume)
