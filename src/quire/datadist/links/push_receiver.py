"""The taking end of a link's pushes: a thread that takes what fits a cache of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from quire.datadist.caches.cache_holds import SourceHold
from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans
from quire.datadist.links.addressed_targets import addressed_place, addressed_spans
from quire.datadist.links.pull_sources import spans_of
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid
from quire.datadist.transports.interface import DestinationEnd
from quire.datadist.wire import sockets
from quire.datadist.wire.protocol import (
    FRAME_LIMIT,
    BlocksSource,
    ControlChannel,
    NumberedBlocksSource,
    expected,
)
from quire.datadist.wire.push_protocol import (
    AddressedTarget,
    FromPushSender,
    PushAccepted,
    PushCompleted,
    PushesReady,
    PushRefused,
    PushRequest,
)

logger = logging.getLogger(__name__)

WAITING_SHARE = 0.8  # of the time for a push, so that a refusal is heard in time

UseLink = Callable[[float], contextlib.AbstractContextManager[None]]
"""Keeps the link for one transfer; raises `LLMException` if it is in use until the deadline."""


class PushReceiver:
    """Takes the pushes of one link, until it is shut down.

    Args:
        connection: that was opened for it, proved.
        pool: the caches; those of models take no pushes, others that were allocated only by their addresses.
        destination_end: gets their data.
        use_link: lets nothing else use `destination_end`.
        break_link: marks the link as broken, with a reason.
        deadline: for the peer to be ready; None: it has opened the connection, so it is.

    Raises:
        OSError: the peer is not, in time.
        RuntimeError: there are too many threads.
    """

    def __init__(
        self,
        connection: socket.socket,
        pool: CachePool[CacheMemory],
        destination_end: DestinationEnd,
        *,
        use_link: UseLink,
        break_link: Callable[[str], None],
        deadline: float | None,
    ) -> None:
        self._channel = ControlChannel(connection, _decoder)
        self._pool = pool
        self._destination_end = destination_end
        self._use_link = use_link
        self._break_link = break_link
        self._is_wanted = True
        if deadline is not None:
            self._channel.expect(PushesReady, deadline)
        sockets.end_if_peer_vanishes(connection)
        thread = threading.Thread(target=self._run, name="datadist-pushes", daemon=True)
        thread.start()

    def shut_down(self) -> None:
        """Take no more pushes; the thread ends soon."""
        self._is_wanted = False
        self._channel.shut_down()

    def _run(self) -> None:
        try:
            while True:
                self._serve(expected(PushRequest, self._channel.receive_when_it_comes()))
        except Exception as error:
            if self._is_wanted:
                self._break_link(f"pushes have ended: {error}")
        finally:
            self._channel.close()

    def _serve(self, request: PushRequest) -> None:
        now, seconds = time.monotonic(), request.timeout_ms / 1e3
        deadline, patience = now + seconds, now + WAITING_SHARE * seconds
        try:
            with self._target(request) as (memory, spans), self._use_link(patience):
                self._take(request, memory, spans, deadline)
        except LLMException as error:
            refusal = PushRefused(request.transfer_id, error.status_code, str(error)[:1024])
            self._channel.send(refusal, time.monotonic() + FRAME_LIMIT)
        else:
            self._channel.send(PushCompleted(request.transfer_id), time.monotonic() + FRAME_LIMIT)

    def _take(self, request: PushRequest, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        try:
            self._channel.send(PushAccepted(request.transfer_id), deadline)
            self._destination_end.receive(request.transfer_id, memory, spans, deadline)
        except BaseException as error:
            self._break_link(f"a push failed: {error}")  # before anything else uses it
            raise

    @contextlib.contextmanager
    def _target(self, request: PushRequest) -> Iterator[tuple[CacheMemory, ByteSpans]]:
        """Hold what a request names, and say which bytes of it."""
        hold = hold_target(self._pool, request)
        try:
            yield hold.cache.memory, target_spans(hold, request)
        finally:
            hold.end(consume=False)


def hold_target(pool: CachePool[CacheMemory], request: PushRequest) -> SourceHold[CacheMemory]:
    """Hold the cache that a push names: a registered one, or any that is not a model's by its addresses.

    Raises:
        LLMException: LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID, LLM_FAILED; nothing is held.
    """
    target = request.target
    if isinstance(target, AddressedTarget):
        hold = pool.hold_handed_out(lambda cache: addressed_place(cache, target) is not None)
    elif isinstance(target, BlocksSource):
        hold = pool.hold_blocks(target.model_id)
    elif isinstance(target, NumberedBlocksSource):
        hold = pool.hold_numbered_blocks(target.cache_id)
    else:
        hold = pool.hold_slot(target.cache_id, target.batch_index)
    cache = hold.cache
    takes_pushes = cache.is_registered or isinstance(target, AddressedTarget)
    if takes_pushes and not cache.memory.is_lost:
        return hold
    hold.end(consume=False)
    if takes_pushes:
        raise failure(LLMStatusCode.LLM_FAILED, f"cache {cache.cache_id} may still be written to otherwise")
    raise invalid(
        f"cache {cache.cache_id} was allocated; by keys only registered caches take pushes, others "
        "by their addresses (transfer_cache_async)"
    )


def target_spans(hold: SourceHold[CacheMemory], request: PushRequest) -> ByteSpans:
    """Return the bytes that a push may write, which are those of its own block numbers.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if isinstance(request.target, AddressedTarget):
        spans = addressed_spans(hold.cache, request.target, request)
    else:
        spans = spans_of(hold, request.target, request, layer_argument="dst_layer_range")
    order = np.argsort(spans.offsets)
    if (np.diff(spans.offsets[order]) < spans.lengths[order][:-1]).any():
        raise invalid("a block is a destination twice")
    return spans


_decoder = msgspec.msgpack.Decoder(FromPushSender)
