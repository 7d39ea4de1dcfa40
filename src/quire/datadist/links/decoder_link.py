"""The DECODER's end of one link."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans
from quire.datadist.links.push_receiver import PushReceiver
from quire.datadist.links.push_sender import PushSender
from quire.datadist.loans.arriving_blocks import ArrivingBlocks
from quire.datadist.loans.loans import BlockPart
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid
from quire.datadist.transports.interface import DestinationEnd, LinkTerms
from quire.datadist.transports.tcp import TcpSourceEnd
from quire.datadist.wire import sockets
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting
from quire.datadist.wire.protocol import (
    DIGEST_BYTES,
    CheckLink,
    ControlChannel,
    FromPrompt,
    LinkChecked,
    LinkDroppedError,
    LinkOffer,
    LoanNews,
    LoanReport,
    LoanRequest,
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
    Unlink,
    Unlinked,
    expected,
    require_transfer,
)
from quire.datadist.wire.push_protocol import PushRequest

logger = logging.getLogger(__name__)

REFUSALS = (
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    LLMStatusCode.LLM_NOT_YET_LINK,
    LLMStatusCode.LLM_PARAM_INVALID,
)
"""Status codes of a refused pull."""


class DecoderLink:
    """An established link. The first pull that fails in transit breaks it for good.

    Attributes:
        cluster_id: cluster id of the PROMPT.
        transport: name of the transport that was chosen.
        epoch: epoch of the PROMPT's start.
        block_size: tokens per block lent by the PROMPT; 0: it lends none.
    """

    def __init__(
        self,
        cluster_id: int,
        channel: ControlChannel[FromPrompt],
        destination_end: DestinationEnd,
        offer: LinkOffer,
        terms: LinkTerms,
    ) -> None:
        self.cluster_id = cluster_id
        self.transport = offer.transport.name
        self.epoch = offer.epoch
        self.block_size = offer.block_size
        self._channel = channel
        self._destination_end = destination_end
        self._terms = terms
        self._can_push = offer.takes_pushes
        self._pushes: PushReceiver | None = None
        self._back_pushes: PushSender | None = None
        self._opening = threading.Lock()
        self._busy = threading.Lock()
        self._num_transfers = 0
        self._is_broken = False

    @property
    def stands(self) -> bool:
        """Whether the link is neither broken nor dropped by the PROMPT."""
        return not self._is_broken and not self._channel.has_something()

    def pull(self, request: PullRequest, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        """Pull the bytes named in `request` into `spans`.

        `transfer_id`, `epoch` and `timeout_ms` of the request are filled in.

        Raises:
            LLMException: LLM_NOT_YET_LINK (the link is broken, or was dropped), LLM_WAIT_PROCESS_TIMEOUT (it
                broke, or was busy until the deadline), or why the PROMPT refused.
        """
        with self._transfer(deadline) as transfer_id:
            self._ask(request, transfer_id, deadline)
            answer = expected(PullAccepted, self._answer(transfer_id, deadline))
            require_transfer(answer.transfer_id, transfer_id)
            self._destination_end.receive(transfer_id, memory, spans, deadline)
            if request.consume:
                self._destination_end.forget_source()
            self._acknowledge(transfer_id, deadline)

    def pull_parts(
        self,
        request: LoanRequest | PrefixRequest,
        memory: CacheMemory,
        blocks: ArrivingBlocks,
        deadline: float,
    ) -> None:
        """Pull blocks of a loan as they become ready, or cached blocks.

        `transfer_id`, `epoch` and `timeout_ms` of the request are filled in. `memory` has one tensor.

        Raises:
            LLMException: as `pull`; received data must not be used then.
        """
        with self._transfer(deadline) as transfer_id:
            self._ask(request, transfer_id, deadline)
            while not blocks.is_complete:
                self._receive_part(transfer_id, memory, blocks, deadline)
            confirmed = expected(PullConfirmed, self._answer(transfer_id, deadline))
            require_transfer(confirmed.transfer_id, transfer_id)

    def update_loans(self, renewed: list[str], released: list[str], deadline: float) -> LoanReport:
        """Send the PROMPT awaited and released loans; return the state of the awaited ones.

        Raises:
            LLMException: as `pull`.
        """
        with self._transfer(deadline):
            self._channel.send(LoanNews(renewed, released), deadline)
            return self._channel.expect(LoanReport, deadline)

    def find_prefix(self, digests: bytes, deadline: float) -> int:
        """Return how many of these blocks, from the first on, the PROMPT has cached, see `PrefixQuery`.

        Raises:
            LLMException: as `pull`.
        """
        with self._transfer(deadline):
            self._channel.send(PrefixQuery(digests), deadline)
            num_found = self._channel.expect(PrefixFound, deadline).num_blocks
            if num_found * DIGEST_BYTES > len(digests):
                raise ProtocolError(f"the peer has found {num_found} blocks, more than it was asked for")
            return num_found

    @contextlib.contextmanager
    def _transfer(self, deadline: float) -> Iterator[int]:
        """Use the link for one transfer, yielding its number; a failure in transit breaks the link."""
        with self._use(deadline):
            self._require_intact()
            self._num_transfers += 1
            try:
                yield self._num_transfers
            except LLMException:
                raise
            except LinkDroppedError as error:
                self._break(str(error))
                raise self._not_linked() from error
            except Exception as error:
                self._break(str(error))
                raise failure(
                    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
                    f"the link with PROMPT {self.cluster_id} broke in a pull: {error}; unlink and link again",
                ) from error
            except BaseException:
                self._break("the pull was interrupted")
                raise

    def take_pushes(self, pool: CachePool[CacheMemory], deadline: float) -> None:
        """Allow the PROMPT to push into caches of this side from now on.

        Raises:
            OSError: it cannot be reached, does not answer in time, or has dropped the link.
        """
        with self._opening:
            if self._pushes is not None or self._is_broken:
                return
            connection = sockets.connect(self._terms.address, deadline)
            try:
                greeting = new_greeting(ConnectionKind.PUSHES, 0, self._terms.link_id)
                greet(connection, self._terms.key, greeting, deadline)
                self._pushes = PushReceiver(
                    connection,
                    pool,
                    self._destination_end,
                    use_link=self._use,
                    break_link=self._break,
                    deadline=deadline,
                )
            except BaseException:
                connection.close()
                raise
            if self._is_broken:
                self._pushes.shut_down()

    def push(self, request: PushRequest, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        """Push `spans` to the destination in `request`; both sides must be MIX.

        Raises:
            LLMException: as `PushSender.push`, and LLM_PARAM_INVALID (the peer is not MIX).
        """
        if not self._can_push:
            raise invalid(
                f"PROMPT {self.cluster_id} takes no pushes; over a link that this side has made, it pushes "
                "only to a peer whose role is MIX"
            )
        with self._use(deadline):
            self._require_intact()
        pushes = self._opened_back_pushes(deadline)
        with self._use(deadline):
            pushes.push(request, memory, spans, deadline)

    def check(self, deadline: float) -> None:
        """Check that the PROMPT answers.

        Raises:
            LLMException: LLM_LINK_BUSY (a pull is running), LLM_NOT_YET_LINK (the link is broken, or was
                dropped), LLM_WAIT_PROCESS_TIMEOUT (there was no answer, and it is broken now).
        """
        if not self._busy.acquire(blocking=False):
            raise failure(LLMStatusCode.LLM_LINK_BUSY, f"the link with PROMPT {self.cluster_id} is in use")
        try:
            self._require_intact()
            self._channel.send(CheckLink(), deadline)
            self._channel.expect(LinkChecked, deadline)
        except TimeoutError as error:
            self._break("the PROMPT does not answer")
            raise failure(
                LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
                f"PROMPT {self.cluster_id} does not answer; unlink and link again",
            ) from error
        except OSError as error:
            self._break(str(error))
            raise self._not_linked() from error
        finally:
            self._busy.release()

    def _opened_back_pushes(self, deadline: float) -> PushSender:
        """Return the push sender, connecting it if necessary; the link may be ended meanwhile."""
        with self._holding(self._opening, deadline):
            if self._back_pushes is None:
                try:
                    self._back_pushes = self._new_back_pushes(deadline)
                except OSError as error:
                    self._break(f"no connection to push over: {error}")
                    raise failure(
                        LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
                        f"cannot push to PROMPT {self.cluster_id}: {error}; unlink and link again",
                    ) from error
                if self._is_broken:
                    self._back_pushes.close()
            return self._back_pushes

    def _new_back_pushes(self, deadline: float) -> PushSender:
        """Return a push sender over a new connection, which carries both messages and data."""
        connection = sockets.connect(self._terms.address, deadline)
        try:
            greeting = new_greeting(ConnectionKind.BACK_PUSHES, 0, self._terms.link_id)
            greet(connection, self._terms.key, greeting, deadline)
            source_end = TcpSourceEnd(1, use_checksum=self._terms.use_checksum)
            source_end.attach(0, connection)
            return PushSender(connection, f"PROMPT {self.cluster_id}", source_end.send, self._break)
        except BaseException:
            connection.close()
            raise

    def _require_intact(self) -> None:
        if not self.stands:
            self._break("it was dropped by the PROMPT")
            raise self._not_linked()

    def _use(self, deadline: float) -> contextlib.AbstractContextManager[None]:
        return self._holding(self._busy, deadline)

    @contextlib.contextmanager
    def _holding(self, lock: threading.Lock, deadline: float) -> Iterator[None]:
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise failure(
                LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, f"the link with PROMPT {self.cluster_id} is in use"
            )
        try:
            yield
        finally:
            lock.release()

    def unlink(self, deadline: float) -> LLMStatusCode:
        """Take both ends down.

        Returns:
            LLM_SUCCESS; LLM_NOTIFY_PROMPT_UNLINK_FAILED if only this end is down; LLM_LINK_BUSY if a pull did
            not end in time, and the link stands.
        """
        if not self._busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return LLMStatusCode.LLM_LINK_BUSY
        try:
            if self._pushes is not None:
                self._pushes.shut_down()  # its end does not break the link
            return self._notify_unlinked(deadline)
        finally:
            self._busy.release()
            self.drop()

    def drop(self) -> None:
        """Take down this end; a running pull fails. Thread-safe."""
        self._is_broken = True
        self._shut_down()
        with self._busy:
            self._channel.close()
            self._destination_end.close()
        if self._back_pushes is not None:
            self._back_pushes.close()

    def _ask(
        self, request: PullRequest | LoanRequest | PrefixRequest, transfer_id: int, deadline: float
    ) -> None:
        """Send a request for a transfer."""
        request.transfer_id, request.epoch = transfer_id, self.epoch
        request.timeout_ms = int(sockets.seconds_left(deadline) * 1e3)
        self._channel.send(request, deadline)

    def _answer(self, transfer_id: int, deadline: float) -> FromPrompt:
        """Return the PROMPT's next message about a transfer; raises `LLMException` if it is a refusal."""
        answer = self._channel.receive(deadline)
        if isinstance(answer, PullRefused):
            require_transfer(answer.transfer_id, transfer_id)
            if answer.status_code not in REFUSALS:
                raise ProtocolError(f"the peer refused a pull with status {answer.status_code}")
            raise failure(LLMStatusCode(answer.status_code), answer.reason)
        return answer

    def _receive_part(
        self, transfer_id: int, memory: CacheMemory, blocks: ArrivingBlocks, deadline: float
    ) -> None:
        ready = expected(PartReady, self._answer(transfer_id, deadline))
        require_transfer(ready.transfer_id, transfer_id)
        part = BlockPart(ready.first_block, ready.num_blocks, ready.offset, ready.num_bytes)
        spans = blocks.spans_for(part)
        if spans.num_bytes:  # both sides know which parts of blocks are not moved
            self._destination_end.receive(transfer_id, memory, spans, deadline)
        self._channel.send(PartTaken(transfer_id), deadline)

    def _acknowledge(self, transfer_id: int, deadline: float) -> None:
        """Let the PROMPT release the source. The data is complete, so a failure does not fail the pull."""
        try:
            self._channel.send(PullCompleted(transfer_id), deadline)
            confirmed = self._channel.expect(PullConfirmed, deadline)
            require_transfer(confirmed.transfer_id, transfer_id)
        except OSError as error:
            self._break(f"a pull succeeded, but was not confirmed: {error}")
        except BaseException:
            self._break("a pull succeeded, but waiting for its confirmation was interrupted")
            raise

    def _notify_unlinked(self, deadline: float) -> LLMStatusCode:
        if self._is_broken:
            return LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
        try:
            self._channel.send(Unlink(), deadline)
            self._channel.expect(Unlinked, deadline)
        except OSError as error:
            logger.warning("could not tell PROMPT %s about the unlinking: %s", self.cluster_id, error)
            return LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
        return LLMStatusCode.LLM_SUCCESS

    def _break(self, reason: str) -> None:
        if not self._is_broken:
            logger.warning("the link with PROMPT %s is broken: %s", self.cluster_id, reason)
        self._is_broken = True
        self._shut_down()

    def _shut_down(self) -> None:
        self._channel.shut_down()
        self._destination_end.shut_down()
        if self._pushes is not None:
            self._pushes.shut_down()
        if self._back_pushes is not None:
            self._back_pushes.shut_down()

    def _not_linked(self) -> LLMException:
        return failure(
            LLMStatusCode.LLM_NOT_YET_LINK,
            f"the link with PROMPT {self.cluster_id} is broken or was dropped; unlink and link again",
        )
