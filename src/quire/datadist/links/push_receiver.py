"""The receiving end of a link's pushes: a thread that accepts pushes into caches of this side.

A push may name a cache's tensors by their addresses. These come from the peer, and are only looked up; the
written bytes follow from the cache itself.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from quire.datadist.caches.cache_holds import PooledCache, SourceHold
from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans, slot_spans
from quire.datadist.links.pull_sources import block_spans_of, hold_place, require_data_type, spans_of
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid
from quire.datadist.transports.interface import DestinationEnd
from quire.datadist.wire import sockets
from quire.datadist.wire.protocol import FRAME_LIMIT, ControlChannel, expected
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

WAITING_SHARE = 0.8  # of a push's time, so that a refusal arrives in time

UseLink = Callable[[float], contextlib.AbstractContextManager[None]]
"""Reserves the link for one transfer; raises `LLMException` if it is in use until the deadline."""


class PushReceiver:
    """Receives the pushes of one link, until it is shut down.

    Args:
        connection: an authenticated connection for pushes.
        pool: the caches; models' caches take no pushes, other allocated ones only by address.
        destination_end: receives the data.
        use_link: reserves `destination_end`.
        break_link: marks the link as broken, with a reason.
        deadline: for the peer to be ready; None: it is, as it has opened the connection.

    Raises:
        OSError: the peer is not ready in time.
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
        """Stop receiving pushes; the thread ends soon."""
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
            self._break_link(f"a push failed: {error}")  # before another transfer uses it
            raise

    @contextlib.contextmanager
    def _target(self, request: PushRequest) -> Iterator[tuple[CacheMemory, ByteSpans]]:
        """Hold the destination named in a request, and yield its memory and spans."""
        hold = hold_target(self._pool, request)
        try:
            yield hold.cache.memory, target_spans(hold, request)
        finally:
            hold.end(consume=False)


def hold_target(pool: CachePool[CacheMemory], request: PushRequest) -> SourceHold[CacheMemory]:
    """Hold the cache named in a push: a registered one, or, by address, any except models' caches.

    Raises:
        LLMException: LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID, LLM_FAILED; nothing is held.
    """
    target = request.target
    if isinstance(target, AddressedTarget):
        hold = pool.hold_handed_out(lambda cache: _addressed_place(cache, target) is not None)
    else:
        hold = hold_place(pool, target)
    cache = hold.cache
    takes_pushes = cache.is_registered or isinstance(target, AddressedTarget)
    if takes_pushes and not cache.memory.is_lost:
        return hold
    hold.end(consume=False)
    if takes_pushes:
        raise failure(
            LLMStatusCode.LLM_FAILED, f"cache {cache.cache_id} may still be written to by another transfer"
        )
    raise invalid(
        f"cache {cache.cache_id} was allocated; pushes by key need a registered cache, others go "
        "by address (transfer_cache_async)"
    )


def target_spans(hold: SourceHold[CacheMemory], request: PushRequest) -> ByteSpans:
    """Return the bytes that a push may write, given by its block numbers.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if isinstance(request.target, AddressedTarget):
        spans = _addressed_spans(hold.cache, request.target, request)
    else:
        spans = spans_of(hold, request.target, request, layer_argument="dst_layer_range")
    order = np.argsort(spans.offsets)
    if (np.diff(spans.offsets[order]) < spans.lengths[order][:-1]).any():
        raise invalid("two blocks have the same destination")
    return spans


def _addressed_place(cache: PooledCache[CacheMemory], target: AddressedTarget) -> tuple[range, int] | None:
    """Return the adjacent tensors of a cache that contain the addresses, and the byte offset in each."""
    mine, theirs = cache.memory.addresses(), target.addresses
    for first, base in enumerate(mine):
        offset = theirs[0] - base
        if 0 <= offset < cache.desc.tensor_bytes:
            tensors = range(first, first + len(theirs))
            expected = [one + offset for one in mine[first : tensors.stop]]
            return (tensors, offset) if expected == theirs else None
    return None


def _addressed_spans(
    cache: PooledCache[CacheMemory], target: AddressedTarget, request: PushRequest
) -> ByteSpans:
    """Return the bytes that a push may write.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    desc, place = cache.desc, _addressed_place(cache, target)
    assert place is not None  # else it would not be held
    tensors, offset = place
    require_data_type(desc, request)
    if request.layers is not None or len(tensors) != request.num_tensors:
        raise invalid(f"there are {len(tensors)} addresses for {request.num_tensors} tensors")
    if cache.is_blocks:
        if offset or not target.runs:
            raise invalid(f"blocks are addressed by index, not by byte offset {offset}")
        return block_spans_of(desc, tensors, target, request.num_bytes)
    left = desc.slot_bytes - offset % desc.slot_bytes
    if target.runs or not 1 <= request.num_bytes <= left:
        raise invalid(f"{request.num_bytes} bytes do not fit: the peer's slot has {left} left")
    return slot_spans(tensors, offset, request.num_bytes)


_decoder = msgspec.msgpack.Decoder(FromPushSender)
