"""The data plane over TCP: several connections, each of which carries its share of a transfer.

A share is a header (transfer, first byte, number of bytes), the bytes and their checksum. Both ends compute
from the size of the transfer which share travels on which connection, so the header is only compared. Bytes
are sent from and received into the memory of caches, a window at a time.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Callable

import msgspec
from typing_extensions import override

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans
from quire.datadist.transports.interface import (
    Checksum,
    ChecksumError,
    DestinationEnd,
    LinkTerms,
    SourceEnd,
    Transport,
)
from quire.datadist.wire import sockets
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting

MAX_STREAMS = 16
MIN_SHARE_BYTES = 1 << 20  # below that, a further thread costs more than it saves

_HEADER = struct.Struct("<QQQ")
_CHECKSUM = struct.Struct("<Q")

Share = tuple[int, int]
MoveShare = Callable[[socket.socket, int, int], None]


class TcpParameters(msgspec.Struct, array_like=True):
    """The parameters of an end: the maximum number of connections, or the number expected."""

    num_streams: int

    @classmethod
    def decode(cls, data: bytes) -> TcpParameters:
        """Decode the other end's parameters; raise `ValueError` if they are malformed."""
        parameters = msgspec.msgpack.decode(data, type=cls)  # msgspec's errors are ValueErrors
        if not 1 <= parameters.num_streams <= MAX_STREAMS:
            raise ValueError(f"the peer asks for {parameters.num_streams} streams, not 1..{MAX_STREAMS}")
        return parameters

    def encode(self) -> bytes:
        """Return the message."""
        return msgspec.msgpack.encode(self)


class TcpTransport(Transport):
    """Transport over TCP.

    Args:
        num_streams: maximum number of connections of a link, beside the control connection.
    """

    name = "tcp"

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams

    @property
    @override
    def parameters(self) -> bytes:
        return TcpParameters(self._num_streams).encode()

    @override
    def open_source(self, peer: bytes, *, use_checksum: bool) -> TcpSourceEnd:
        num_streams = min(self._num_streams, TcpParameters.decode(peer).num_streams)
        return TcpSourceEnd(num_streams, use_checksum=use_checksum)

    @override
    def open_destination(self, terms: LinkTerms, peer: bytes, deadline: float) -> TcpDestinationEnd:
        connections: list[socket.socket] = []
        try:
            for stream in range(TcpParameters.decode(peer).num_streams):
                connection = sockets.connect(terms.address, deadline)
                connections.append(connection)
                greeting = new_greeting(ConnectionKind.STREAM, stream, terms.link_id)
                greet(connection, terms.key, greeting, deadline)
        except BaseException:
            for connection in connections:
                connection.close()
            raise
        return TcpDestinationEnd(connections, use_checksum=terms.use_checksum)

    @override
    def close(self) -> None:
        pass


class TcpSourceEnd(SourceEnd):
    """The PROMPT's end: waits for the connections, and sends."""

    def __init__(self, num_streams: int, *, use_checksum: bool) -> None:
        super().__init__(num_streams)
        self._use_checksum = use_checksum

    @property
    @override
    def parameters(self) -> bytes:
        return TcpParameters(self._num_connections).encode()

    @override
    def _admit(self, connection: socket.socket) -> None:
        sockets.wait_in_calls(connection)

    @override
    def send(self, transfer_id: int, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        def send_share(connection: socket.socket, start: int, stop: int) -> None:
            checksum = Checksum()
            unsent: list[bytes | memoryview] = [_HEADER.pack(transfer_id, start, stop - start)]
            for number, window in enumerate(spans.windows(start, stop)):
                if number:
                    sockets.send(connection, unsent, deadline)
                    unsent = []
                views = memory.outgoing(window)
                if self._use_checksum:
                    checksum.extend(views)
                unsent += views
            unsent.append(_CHECKSUM.pack(checksum.value))
            sockets.send(connection, unsent, deadline)  # at best, all at once

        memory.synchronize()
        _move_shares(
            [self._connections[one] for one in sorted(self._connections)], spans.num_bytes, send_share
        )


class TcpDestinationEnd(DestinationEnd):
    """The DECODER's end: receives."""

    def __init__(self, connections: list[socket.socket], *, use_checksum: bool) -> None:
        for connection in connections:
            sockets.wait_in_calls(connection)
        self._connections = connections
        self._use_checksum = use_checksum

    @override
    def receive(self, transfer_id: int, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        def receive_share(connection: socket.socket, start: int, stop: int) -> None:
            header = _HEADER.unpack(sockets.receive(connection, _HEADER.size, deadline))
            if header != (transfer_id, start, stop - start):
                raise ConnectionError(f"the peer sends {header}, not {(transfer_id, start, stop - start)}")
            checksum = Checksum()
            for window in spans.windows(start, stop):
                views = memory.incoming(window)
                sockets.receive_into(connection, views, deadline)
                if self._use_checksum:
                    checksum.extend(views)
                memory.arrived(window, views)
            (expected,) = _CHECKSUM.unpack(sockets.receive(connection, _CHECKSUM.size, deadline))
            if checksum.value != expected:
                raise ChecksumError(f"bytes {start} to {stop} of a transfer have the wrong checksum")

        _move_shares(self._connections, spans.num_bytes, receive_share)
        memory.synchronize()

    @override
    def shut_down(self) -> None:
        for connection in self._connections:
            sockets.shut_down(connection)

    @override
    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def shares(num_bytes: int, num_streams: int) -> list[Share]:
    """Return first byte and end of the share of each connection that is used."""
    num_shares = max(1, min(num_streams, num_bytes // MIN_SHARE_BYTES))
    bounds = [num_bytes * number // num_shares for number in range(num_shares + 1)]
    return list(itertools.pairwise(bounds))


def _move_shares(connections: list[socket.socket], num_bytes: int, move: MoveShare) -> None:
    """Move all shares concurrently, the first in this thread; raise the first error when all have ended."""
    errors: list[BaseException] = []

    def fail(error: BaseException) -> None:
        errors.append(error)
        for connection in connections:  # the transfer has failed: no share may wait for its deadline
            sockets.shut_down(connection)

    def move_one(connection: socket.socket, share: Share) -> None:
        try:
            move(connection, *share)
        except BaseException as error:
            fail(error)

    jobs = list(zip(connections, shares(num_bytes, len(connections)), strict=False))
    threads = [
        threading.Thread(target=move_one, args=job, name="datadist-stream", daemon=True) for job in jobs[1:]
    ]
    try:
        for thread in threads:
            thread.start()
        move_one(*jobs[0])
        _join(threads)
    except BaseException as error:  # an interrupt, or no thread could be started
        fail(error)
        _join(threads)  # nothing may be written to the cache any more
    if errors:
        raise errors[0]


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join()
