"""Authentication of incoming connections, within a time limit.

Until it is authenticated, a connection takes a descriptor and less than 100 bytes, for at most
`HALF_OPEN_LIMIT` seconds if the peer is silent; nothing waits for it.
"""

from __future__ import annotations

import collections
import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from quire.datadist.wire import sockets
from quire.datadist.wire.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    Greeting,
    HandshakeError,
    connecting_proof,
    connection_key,
    decode_greeting,
    is_proof,
    listening_proof,
    new_greeting,
    require_version,
)

logger = logging.getLogger(__name__)

HALF_OPEN_LIMIT = 10.0  # seconds from a connection to its link
MAX_UNPROVED = 256  # connections; a new one replaces the oldest


class _Unproved:
    """A connection that is not authenticated yet."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self.greeting: Greeting | None = None
        self.key = b""
        self.received = bytearray()

    @property
    def num_missing(self) -> int:
        return (GREETING_BYTES if self.greeting is None else PROOF_BYTES) - len(self.received)


class Door:
    """Authenticates connections without blocking on any of them.

    Args:
        listeners: listening sockets.
        wake: readable when the door shall close.
        secret_of: returns what a greeting must prove to have, or None.
        admit: takes a proved connection with its greeting, key and deadline, or returns False.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        wake: socket.socket,
        secret_of: Callable[[Greeting], bytes | None],
        admit: Callable[[socket.socket, Greeting, bytes, float], bool],
    ) -> None:
        self._listeners = listeners
        self._wake = wake
        self._secret_of = secret_of
        self._admit = admit
        self._unproved: collections.OrderedDict[socket.socket, _Unproved] = collections.OrderedDict()
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Run until `wake` is readable."""
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, listener)
        self._selector.register(self._wake, selectors.EVENT_READ, self._wake)
        try:
            while True:
                ready = [key.data for key, _ in self._selector.select(self._seconds_to_expiry())]
                if self._wake in ready:
                    return
                self._expire()
                for connection in ready:
                    if connection in self._listeners:
                        self._accept(connection)
                    elif connection in self._unproved:  # it may have been replaced
                        self._advance(self._unproved[connection])
        finally:
            for connection in list(self._unproved):
                self._turn_away(connection)
            self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if self._unproved:  # descriptors may have run out
                self._turn_away(next(iter(self._unproved)))
            elif not isinstance(error, (BlockingIOError, ConnectionError)):
                logger.warning("cannot accept a connection: %s", error)
                time.sleep(0.1)  # avoids a busy loop
            return
        if len(self._unproved) >= MAX_UNPROVED:
            self._turn_away(next(iter(self._unproved)))
        try:
            sockets.configure(connection)
        except OSError:
            connection.close()  # it has already ended
            return
        self._unproved[connection] = _Unproved(connection, time.monotonic() + HALF_OPEN_LIMIT)
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _advance(self, peer: _Unproved) -> None:
        try:
            data = peer.connection.recv(peer.num_missing)
            if not data:
                raise HandshakeError("the peer has closed the connection")
            peer.received += data
            if not peer.num_missing:
                self._answer(peer)
        except BlockingIOError:
            return
        except OSError as error:
            logger.info("turned a peer away: %s", error)
            self._turn_away(peer.connection)

    def _answer(self, peer: _Unproved) -> None:
        message, peer.received = bytes(peer.received), bytearray()
        if peer.greeting is None:
            self._greet(peer, decode_greeting(message))
        elif not is_proof(message, connecting_proof(peer.key)):
            raise HandshakeError("it does not have the token; quire.token must be the same on both")
        else:
            self._send(peer, listening_proof(peer.key))
            self._let_go(peer.connection)
            if not self._admit(peer.connection, peer.greeting, peer.key, peer.deadline):
                peer.connection.close()

    def _greet(self, peer: _Unproved, greeting: Greeting) -> None:
        mine = new_greeting(greeting.kind, greeting.stream, greeting.link_id)
        self._send(peer, mine.encode())
        require_version(greeting)
        secret = self._secret_of(greeting)
        if secret is None:
            raise HandshakeError(f"there is no link {greeting.link_id}")
        peer.key = connection_key(secret, greeting, mine)
        peer.greeting = greeting

    def _send(self, peer: _Unproved, message: bytes) -> None:
        if peer.connection.send(message) < len(message):  # there is room, as this is the first message
            raise HandshakeError("the peer takes no data")

    def _seconds_to_expiry(self) -> float | None:
        if not self._unproved:
            return None
        return max(0.0, next(iter(self._unproved.values())).deadline - time.monotonic())

    def _expire(self) -> None:
        now = time.monotonic()
        while self._unproved and next(iter(self._unproved.values())).deadline <= now:
            self._turn_away(next(iter(self._unproved)))

    def _turn_away(self, connection: socket.socket) -> None:
        self._let_go(connection)
        connection.close()

    def _let_go(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._unproved[connection]
