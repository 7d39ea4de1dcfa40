"""The interface of transports: each link has two ends, which move spans of bytes between caches.

A `deadline` is in seconds on the monotonic clock (`time.monotonic`).
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from abc import ABC, abstractmethod

import xxhash
from typing_extensions import override

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans
from quire.datadist.wire import sockets

logger = logging.getLogger(__name__)


class ChecksumError(ConnectionError):
    """The checksum of received bytes is wrong."""


class Checksum:
    """XXH3 (64 bits) of bytes, added in parts. It detects damage, not forgery."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def extend(self, views: list[memoryview]) -> None:
        """Add the next bytes."""
        for view in views:
            self._state.update(view)

    @property
    def value(self) -> int:
        """Checksum of all bytes so far."""
        return self._state.intdigest()


@dataclasses.dataclass(frozen=True)
class LinkTerms:
    """The terms of a link for the DECODER's end of the transport.

    Attributes:
        link_id: id of the link, unique on the PROMPT.
        address: that the PROMPT listens on, as the DECODER sees it.
        key: that proves further connections of the link.
        use_checksum: whether to verify transfers by checksums.
    """

    link_id: int
    address: tuple[str, int]
    key: bytes
    use_checksum: bool


class DataEnd(ABC):
    """One end of a link's data plane. One thread moves data; others may `shut_down`."""

    @abstractmethod
    def shut_down(self) -> None:
        """Make the current transfer fail soon, and all later ones."""

    @abstractmethod
    def close(self) -> None:
        """Release resources; the end must not be used afterwards."""


class SourceEnd(DataEnd):
    """The PROMPT's end, which sends over connections opened by the DECODER.

    Args:
        num_connections: number of connections of the link, besides the control connection.
    """

    def __init__(self, num_connections: int = 1) -> None:
        self._num_connections = num_connections
        self._changed = threading.Condition()
        self._connections: dict[int, socket.socket] = {}  # by number
        self._has_ended = False

    @property
    @abstractmethod
    def parameters(self) -> bytes:
        """Parameters for the DECODER to set up its end."""

    def attach(self, stream: int, connection: socket.socket) -> bool:
        """Take over an authenticated connection; if this returns False, the caller keeps it.

        Args:
            stream: number of the connection, from 0, as the DECODER has said in its greeting.
            connection: a connection accepted by the listening socket; closed by this end.
        """
        with self._changed:
            if self._has_ended or stream >= self._num_connections or stream in self._connections:
                return False
            try:
                self._admit(connection)
            except OSError as error:
                logger.warning("turned a peer away: %s", error)
                return False
            self._connections[stream] = connection
            self._changed.notify_all()
        return True

    def _admit(self, connection: socket.socket) -> None:
        """Prepare a connection; raise `OSError` to refuse it."""

    def wait_until_complete(self, deadline: float) -> None:
        """Wait for the DECODER to set up its end; raise `OSError` if it does not in time."""
        wanted = self._num_connections
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_ended or len(self._connections) == wanted, sockets.seconds_left(deadline)
            )
            if self._has_ended or len(self._connections) < wanted:
                raise TimeoutError(f"the peer has opened {len(self._connections)} of {wanted} connections")

    @override
    def shut_down(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            for connection in self._connections.values():
                sockets.shut_down(connection)

    @override
    def close(self) -> None:
        self.shut_down()
        for connection in self._connections.values():
            connection.close()

    @abstractmethod
    def send(self, transfer_id: int, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        """Send spans of a cache.

        Args:
            transfer_id: id of the transfer, unique in the link; both ends have the same.
            memory: memory of the cache.
            spans: which bytes of it, in the order in which they are moved.
            deadline: until when the other end must have received them.

        Raises:
            OSError: it did not receive them in time, or the connection has ended.
        """


class DestinationEnd(DataEnd):
    """The DECODER's end, which receives bytes."""

    @abstractmethod
    def receive(self, transfer_id: int, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        """Receive bytes into `spans`, in order; they are in place on return.

        Args:
            transfer_id: id of the transfer, as the other end has it.
            memory: memory of the cache that gets them.
            spans: which bytes of it.
            deadline: until when they must have arrived.

        Raises:
            ChecksumError: the checksum is wrong.
            OSError: they did not arrive in time, or the connection has ended.
        """

    def forget_source(self) -> None:
        """Release state kept for the last source cache, which is not pulled again."""


class Transport(ABC):
    """A transport for the data plane.

    Attributes:
        name: name that both ends agree on.
        listener: a listening socket of the PROMPT, whose connections are attached to their links; or None.
    """

    name: str
    listener: socket.socket | None = None

    @property
    @abstractmethod
    def parameters(self) -> bytes:
        """The parameters of this side's ends, for the other side."""

    @abstractmethod
    def open_source(self, peer: bytes, *, use_checksum: bool) -> SourceEnd:
        """Return the PROMPT's end of a link, given the other side's parameters.

        Raises:
            ValueError: the parameters are malformed.
            OSError: it cannot be set up; the PROMPT then offers its next transport.
        """

    @abstractmethod
    def open_destination(self, terms: LinkTerms, peer: bytes, deadline: float) -> DestinationEnd:
        """Return the DECODER's end of a link, given the parameters of the PROMPT's end.

        Raises:
            ValueError: the parameters are malformed.
            OSError: it cannot be set up; the PROMPT then offers its next transport.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the shared state of this side's ends, after all are closed."""
