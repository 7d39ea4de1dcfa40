"""The PROMPT's end of one link: a thread that answers a DECODER's messages, one after another."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans
from quire.datadist.links.pull_sources import PullSource, open_pull_source, require_epoch
from quire.datadist.links.push_receiver import PushReceiver
from quire.datadist.links.push_sender import PushSender
from quire.datadist.loans.cached_blocks import CachedReading
from quire.datadist.loans.loans import LoanReading
from quire.datadist.loans.shared_blocks import SharedBlocks
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid
from quire.datadist.transports.interface import SourceEnd, Transport
from quire.datadist.transports.tcp import TcpDestinationEnd
from quire.datadist.wire import sockets
from quire.datadist.wire.protocol import (
    BYTE_ORDER,
    FRAME_LIMIT,
    NO_IDENTITY,
    CheckLink,
    LinkChecked,
    LinkDropped,
    LinkEstablished,
    LinkOffer,
    LinkRequest,
    LoanNews,
    LoanReport,
    LoanRequest,
    OfferAccepted,
    OfferDeclined,
    PartReady,
    PartTaken,
    PrefixFound,
    PrefixQuery,
    PrefixRequest,
    ProtocolError,
    PullAccepted,
    PullCompleted,
    PullConfirmed,
    PullRefused,
    PullRequest,
    TransportOffer,
    Unlink,
    Unlinked,
    decode_digests,
    expected,
    prompt_channel,
    require_transfer,
)
from quire.datadist.wire.push_protocol import (
    PushRequest,
)

logger = logging.getLogger(__name__)


class LinkRefusedError(Exception):
    """A requested link is refused; the message is the reason."""


class PromptLink:
    """One link, from its authenticated control connection to its end.

    Attributes:
        decoder_cluster_id: cluster id of the other side; None until it has said so.
        source_end: source end of the data plane; None until the transport is chosen.
        transport: name of the transport that was chosen.

    Args:
        connection: the control connection, proved.
        link_id: unique among the links of this PROMPT.
        key: key of the control connection.
        cluster_id: cluster id of this PROMPT.
        epoch: epoch of this start of the PROMPT.
        pool: the caches that may be pulled.
        transports: that this side has, the best first.
        use_checksum: whether this side wants checksums.
        shared: blocks that this side lends or has cached; None: there are none.
        takes_pushes: whether this side is MIX, and the other may push into its caches.
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
        shared: SharedBlocks | None = None,
        takes_pushes: bool = False,
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
        self._use_checksum = use_checksum  # after `establish`: if either side wants them
        self._shared = shared
        self._takes_pushes = takes_pushes
        sockets.end_if_peer_vanishes(connection)  # the link reads it without a deadline
        self._channel = prompt_channel(connection)
        self._is_established = False
        self._pushes: PushSender | None = None
        self._back_pushes: PushReceiver | None = None
        self._changing = threading.Lock()
        self._sending = threading.Lock()  # uncontended if the DECODER follows the protocol

    def establish(self, deadline: float, register: Callable[[PromptLink], None]) -> None:
        """Agree on the link's terms; `register` adds it to the PROMPT's links.

        Raises:
            LinkRefusedError: the link is refused, and the DECODER has received the reason.
            OSError: the DECODER did not continue in time, or its connection has ended.
        """
        try:
            request = self._channel.expect(LinkRequest, deadline)
            self.decoder_cluster_id = request.decoder_cluster_id
            self._agree_on_transport(request, deadline).wait_until_complete(deadline)
            register(self)
            self._is_established = True
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
                unregister(self)  # before the DECODER learns that both ends are down
                if self._back_pushes is not None:
                    self._back_pushes.shut_down()  # its end does not break the link
                self._channel.send(Unlinked(), time.monotonic() + FRAME_LIMIT)
                return
            if isinstance(message, CheckLink):
                self._channel.send(LinkChecked(), time.monotonic() + FRAME_LIMIT)
            elif isinstance(message, PullRequest):
                self._serve_pull(message)
            elif isinstance(message, LoanRequest | PrefixRequest):
                self._serve_parts(message)
            elif isinstance(message, LoanNews):
                self._update_loans(message)
            elif isinstance(message, PrefixQuery):
                self._look_up(message)
            else:
                raise ProtocolError(f"the peer sent {type(message).__name__} outside of a pull")

    def attach_pushes(self, connection: socket.socket) -> bool:
        """Take over an authenticated connection for pushes; if this returns False, the caller keeps it."""
        with self._changing:
            if not self._is_established or self._pushes is not None:
                return False
            try:
                pushes = PushSender(connection, self._peer, self._send, self.drop)
                pushes.announce()
            except OSError as error:
                logger.info("%s takes no pushes after all: %s", self._peer, error)
                return False
            self._pushes = pushes
        return True

    def attach_back_pushes(self, connection: socket.socket) -> bool:
        """Take over an authenticated connection for the peer's pushes; return False if not wanted."""
        with self._changing:
            if not self._takes_pushes or not self._is_established or self._back_pushes is not None:
                return False
            try:
                self._back_pushes = PushReceiver(
                    connection,
                    self._pool,
                    TcpDestinationEnd([connection], use_checksum=self._use_checksum),
                    use_link=lambda _: contextlib.nullcontext(),  # nothing else is received over this link
                    break_link=self._break,
                    deadline=None,
                )
            except (OSError, RuntimeError) as error:  # ended, or too many threads
                logger.warning("%s cannot push: %s", self._peer, error)
                return False
        return True

    def push(self, request: PushRequest, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        """Push `spans` to the DECODER; raises like `PushSender.push`, and LLM_PARAM_INVALID."""
        with self._changing:  # waits if the DECODER has just allowed pushes
            pushes = self._pushes
        if pushes is None:
            raise invalid(f"{self._peer} takes no pushes: it has neither registered nor allocated a cache")
        pushes.push(request, memory, spans, deadline)

    def drop(self, reason: str) -> None:
        """End the link from another thread, and notify the DECODER if that does not block."""
        if self.source_end is not None:
            self.source_end.shut_down()  # before a transfer's source may be released
        if self._pushes is not None:
            self._pushes.shut_down()
        if self._back_pushes is not None:
            self._back_pushes.shut_down()
        self._channel.send_last(LinkDropped(reason))

    def close(self) -> None:
        """Release the connections; called at the end of the thread that serves the link."""
        self._channel.shut_down()
        self._channel.close()
        with self._changing:
            self._is_established = False
        if self._back_pushes is not None:
            self._back_pushes.shut_down()
        if self.source_end is not None:
            self.source_end.shut_down()
        if self._pushes is not None:
            self._pushes.close()  # waits for a push
        if self.source_end is not None:
            self.source_end.close()

    @property
    def _block_size(self) -> int:
        return 0 if self._shared is None else self._shared.block_size

    @property
    def _peer(self) -> str:
        return f"DECODER {self.decoder_cluster_id}"

    def _break(self, reason: str) -> None:
        logger.warning("the link with %s is broken: %s", self._peer, reason)
        self.drop(reason)

    def _send(self, transfer_id: int, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        assert self.source_end is not None
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("another transfer over the link has not ended")
        try:
            self.source_end.send(transfer_id, memory, spans, deadline)
        finally:
            self._sending.release()

    def _agree_on_transport(self, request: LinkRequest, deadline: float) -> SourceEnd:
        """Offer common transports, the best first, until the DECODER accepts one."""
        self._require_fitting(request)
        self._use_checksum = use_checksum = self._use_checksum or request.use_checksum
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
            message = LinkOffer(
                self._epoch, self.link_id, use_checksum, offer, self._block_size, self._takes_pushes
            )
            self._channel.send(message, deadline)
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
        mine = NO_IDENTITY if self._shared is None else self._shared.identity()
        for name in sorted(mine.keys() | request.identity.keys()):
            here, there = mine.get(name, "nothing"), request.identity.get(name, "nothing")
            if here != there:
                raise LinkRefusedError(f"the KV differs in {name}: PROMPT {here}, DECODER {there}")
        if self._block_size and request.block_size % self._block_size:
            raise LinkRefusedError(
                f"blocks of {self._block_size} tokens cannot be combined into the DECODER's of "
                f"{request.block_size}: its block_size must be a multiple of the PROMPT's"
            )

    def _serve_pull(self, request: PullRequest) -> None:
        deadline = time.monotonic() + request.timeout_ms / 1e3
        try:
            source = open_pull_source(self._pool, self._epoch, request)
        except LLMException as error:
            self._channel.send(_refusal(request.transfer_id, error), time.monotonic() + FRAME_LIMIT)
            return
        try:
            self._transfer(request, source, deadline)
        except BaseException:
            self._end_transport()
            raise
        finally:
            source.hold.end(consume=False)
        self._channel.send(PullConfirmed(request.transfer_id), time.monotonic() + FRAME_LIMIT)

    def _serve_parts(self, request: LoanRequest | PrefixRequest) -> None:
        """Send lent or cached blocks; confirm only if they stayed valid to the end."""
        deadline = time.monotonic() + request.timeout_ms / 1e3
        try:
            reading = self._open_reading(request)
            try:
                self._transfer_parts(request.transfer_id, reading, deadline)
                reading.require_held()
            finally:
                reading.close()
        except LLMException as error:
            answer: PullConfirmed | PullRefused = _refusal(request.transfer_id, error)
        else:
            answer = PullConfirmed(request.transfer_id)
        self._channel.send(answer, time.monotonic() + FRAME_LIMIT)

    def _open_reading(self, request: LoanRequest | PrefixRequest) -> LoanReading | CachedReading:
        if self._shared is None:
            raise failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "the PROMPT lends no blocks")
        require_epoch(self._epoch, request.epoch)
        if isinstance(request, PrefixRequest):
            digests = decode_digests(request.digests)
            return self._shared.cached.open(digests, self._shared.loans.block_bytes)
        patience = request.patience_ms / 1e3
        wanted = (request.loan, request.first_block, request.num_blocks, request.digest)
        return self._shared.loans.open(*wanted, patience=patience, is_wanted=self._awaits_answer)

    def _transfer_parts(
        self, transfer_id: int, reading: LoanReading | CachedReading, deadline: float
    ) -> None:
        assert self.source_end is not None
        assert self._shared is not None
        shared = self._shared
        for ready in reading.parts(deadline, self._awaits_answer):
            for part in ready.split(shared.max_sent_blocks):
                fields = (part.first_block, part.num_blocks, part.offset, part.num_bytes)
                self._channel.send(PartReady(transfer_id, *fields), deadline)
                spans = shared.spans_of(reading.block_ids(part), part.offset, part.num_bytes)
                if spans.num_bytes:
                    self._send(transfer_id, shared.memory, spans, deadline)
                taken = self._channel.expect(PartTaken, deadline + FRAME_LIMIT)
                require_transfer(taken.transfer_id, transfer_id)

    def _awaits_answer(self) -> bool:
        """Whether the DECODER is waiting: connected, and without having sent anything."""
        return not self._channel.has_something()

    def _update_loans(self, news: LoanNews) -> None:
        report = LoanReport(ended=news.renewed, ready=[])
        if self._shared is not None:
            self._shared.loans.release(news.released)
            report = LoanReport(*self._shared.loans.renew(news.renewed))
        self._channel.send(report, time.monotonic() + FRAME_LIMIT)

    def _look_up(self, query: PrefixQuery) -> None:
        digests = decode_digests(query.digests)
        num_found = 0 if self._shared is None else self._shared.cached.count_leading(digests)
        self._channel.send(PrefixFound(num_found), time.monotonic() + FRAME_LIMIT)

    def _end_transport(self) -> None:
        """End the data plane before releasing the source of a failed transfer, which may still be read."""
        assert self.source_end is not None
        self.source_end.shut_down()

    def _transfer(self, request: PullRequest, source: PullSource, deadline: float) -> None:
        assert self.source_end is not None
        self._channel.send(PullAccepted(request.transfer_id), deadline)
        memory = source.hold.cache.memory
        self._send(request.transfer_id, memory, source.spans, deadline)
        completed = self._channel.expect(PullCompleted, deadline + FRAME_LIMIT)
        require_transfer(completed.transfer_id, request.transfer_id)
        source.hold.end(consume=request.consume)


def _refusal(transfer_id: int, error: LLMException) -> PullRefused:
    return PullRefused(transfer_id, error.status_code, str(error)[:1024])
