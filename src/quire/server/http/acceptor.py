"""Accepts connections: a few per turn of the event loop, up to the maximum."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from quire.server.http.connections import Connection, Connections
from quire.server.wire.errors import UNAVAILABLE, ApiError

log = logging.getLogger(__name__)

ACCEPTED_PER_TURN = 8
RETRY_INTERVAL = 0.1  # seconds; between attempts to accept while the system lacks descriptors or memory
_BACKLOG = 4096  # connections queued by the system until accepted; its own limit may be lower
_READ_BEFORE_REFUSAL = 65_536  # bytes
_UNSENT_BYTES = 131_072  # of an answer, buffered by the system per connection

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts connections of one listening socket, in the running event loop, until it is closed.

    When there is room for no more, the connection that has waited longest for its client is closed; if none
    waits, the new one is answered with 503. When the system lacks descriptors or memory, accepting pauses.

    Args:
        listener: a bound socket.
        make_protocol: makes a connection's protocol, which replaces its argument in `connections` once it is
            connected.
        connections: the open connections of all sockets.
        tls: TLS context of connections; None: plain text.
        handshake_timeout: seconds for a client's TLS handshake.
        write_timeout: seconds after which the system closes a connection whose client acknowledges nothing.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Connection], asyncio.Protocol],
        connections: Connections,
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout: float,
        write_timeout: float,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._connections = connections
        self._tls = tls
        self._handshake_timeout = handshake_timeout if tls is not None else None
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[_Handshake] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_refusing = self._lacks_resources = False
        if listener.family in (socket.AF_INET, socket.AF_INET6):  # accepted sockets inherit these
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_timeout * 1000))
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
        for handshake in list(self._handshakes):
            handshake.drop()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._pause(error)
                    return
                continue  # the client has already left
            accepted.setblocking(False)
            self._lacks_resources = False
            if self._connections.make_room():
                self._is_refusing = False
                handshake = _Handshake(self._connections)
                self._handshakes.add(handshake)
                handshake.task = self._loop.create_task(self._connect(accepted, handshake))
            else:
                self._refuse(accepted)

    async def _connect(self, accepted: socket.socket, handshake: _Handshake) -> None:
        """Hand an accepted socket to a protocol, after its TLS handshake if any."""
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(handshake),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout,
            )
        except (OSError, asyncio.CancelledError) as error:  # a client's fault, not worth a log line
            log.debug("a connection was not established: %s", error)
        finally:
            self._handshakes.discard(handshake)
            self._connections.remove(handshake)

    def _refuse(self, accepted: socket.socket) -> None:
        """Answer a connection for which there is no room with 503."""
        num_open = len(self._connections)
        if not self._is_refusing:
            self._is_refusing = True
            log.warning("new connections are refused: all %d have requests in progress", num_open)
        message = f"all {num_open} connections have requests in progress (the server's max_connections)"
        answer = ApiError(
            503, message, kind=UNAVAILABLE, code="too_many_connections", headers={"Retry-After": "1"}
        ).closing_response()
        with accepted:
            if self._tls is None:
                with contextlib.suppress(OSError):
                    accepted.recv(_READ_BEFORE_REFUSAL)  # with unread data, the system would drop the answer
                with contextlib.suppress(OSError):
                    accepted.send(answer)

    def _pause(self, error: OSError) -> None:
        """Pause accepting, because an immediate retry would fail again."""
        if not self._lacks_resources:
            self._lacks_resources = True
            log.warning(
                "cannot accept connections (%s) with %d open; retrying every %g s",
                error,
                len(self._connections),
                RETRY_INTERVAL,
            )
        self._connections.drop_longest_waiting()
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(RETRY_INTERVAL, self._resume)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._accept)


class _Handshake:
    """A connection until its protocol takes over."""

    def __init__(self, connections: Connections) -> None:
        self.task: asyncio.Task[None] | None = None
        connections.add(self)

    def drop(self) -> None:
        """Close the connection at once."""
        if self.task is not None:
            self.task.cancel()
