"""Sending and receiving within a deadline.

Sockets are non-blocking, except after `wait_in_calls`, where the system ends calls at the deadline. Deadlines
are in seconds on the monotonic clock; None: no deadline.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable

_TIMEVAL = struct.Struct("@ll")  # seconds and microseconds

MAX_PARTS = 1024  # IOV_MAX of Linux

MAX_WAIT = 1e6  # seconds; the system counts milliseconds in 32 bits

KEEPALIVE_IDLE = 10
KEEPALIVE_INTERVAL = 5
KEEPALIVE_PROBES = 3


class PeerClosedError(ConnectionError):
    """The peer has closed the connection."""


def configure(connection: socket.socket) -> None:
    """Set options for all connections: non-blocking, no delay of small messages, keep-alive."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def end_if_peer_vanishes(connection: socket.socket) -> None:
    """End a connection if the peer acknowledges nothing within the keep-alive timeout.

    Keep-alive only probes a connection without unacknowledged data, which is otherwise resent for a quarter
    of an hour. Not for data connections: a live peer that reads nothing for that long loses its connection.
    """
    if connection.family != socket.AF_UNIX:
        seconds = KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def wait_in_calls(connection: socket.socket) -> None:
    """Make send and receive calls block, so that each moves much data."""
    connection.setblocking(True)


def connect(address: tuple[str, int], deadline: float) -> socket.socket:
    """Return a connection.

    Raises:
        TimeoutError: no answer before the deadline.
        OSError: refused, or unreachable.
    """
    connection = socket.create_connection(address, timeout=seconds_left(deadline))
    try:
        configure(connection)
    except OSError:
        connection.close()
        raise
    return connection


def seconds_left(deadline: float) -> float:
    """Return the seconds before a deadline; raise `TimeoutError` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def send(connection: socket.socket, parts: Iterable[bytes | memoryview], deadline: float | None) -> None:
    """Send parts one after another, without joining them.

    Raises:
        TimeoutError: the peer did not receive them in time.
        OSError: the connection has ended.
    """
    left = deque(memoryview(part) for part in parts if len(part))
    while left:
        _limit(connection, socket.SO_SNDTIMEO, deadline)
        try:
            num_sent = connection.sendmsg([left[index] for index in range(min(len(left), MAX_PARTS))])
        except BlockingIOError:
            _wait(connection, select.POLLOUT, deadline)
        else:
            _advance(left, num_sent)


def receive_into(connection: socket.socket, parts: Iterable[memoryview], deadline: float | None) -> None:
    """Fill parts one after another.

    Raises:
        TimeoutError: they did not arrive in time.
        PeerClosedError: the peer has closed the connection.
        OSError: the connection has ended.
    """
    left = deque(part for part in parts if len(part))
    while left:
        _limit(connection, socket.SO_RCVTIMEO, deadline)
        try:
            if len(left) == 1:
                num_received = connection.recv_into(left[0], 0, socket.MSG_WAITALL)
            else:
                buffers = [left[index] for index in range(min(len(left), MAX_PARTS))]
                num_received = connection.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            _wait(connection, select.POLLIN, deadline)
        else:
            if not num_received:
                raise PeerClosedError("the peer has closed the connection")
            _advance(left, num_received)


def receive(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytearray:
    """Return exactly `num_bytes` bytes; raises like `receive_into`."""
    data = bytearray(num_bytes)
    receive_into(connection, [memoryview(data)], deadline)
    return data


def is_readable(connection: socket.socket, seconds: float = 0.0) -> bool:
    """Return whether data has arrived or the connection has ended, waiting at most `seconds`."""
    return _poll(connection, select.POLLIN, seconds)


def wait_until_readable(connection: socket.socket) -> None:
    """Wait until data has arrived or the connection has ended."""
    _wait(connection, select.POLLIN, None)


def wait_until_writable(connection: socket.socket, deadline: float) -> None:
    """Wait until something can be sent; raise `TimeoutError` at the deadline."""
    _wait(connection, select.POLLOUT, deadline)


def shut_down(connection: socket.socket) -> None:
    """Shut the connection down, which ends all waits at both ends."""
    with contextlib.suppress(OSError):  # it has already ended
        connection.shutdown(socket.SHUT_RDWR)


def _limit(connection: socket.socket, option: int, deadline: float | None) -> None:
    """Limit the next call to the deadline; raise `TimeoutError` if it has passed."""
    microseconds = 0  # no limit
    if deadline is not None:
        microseconds = max(1, int(min(seconds_left(deadline), MAX_WAIT) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(microseconds, 10**6)))


def _wait(connection: socket.socket, event: int, deadline: float | None) -> None:
    if not _poll(connection, event, None if deadline is None else seconds_left(deadline)):
        raise TimeoutError("timed out waiting for the peer")


def _poll(connection: socket.socket, event: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(None if seconds is None else min(seconds, MAX_WAIT) * 1e3))


def _advance(parts: deque[memoryview], num_bytes: int) -> None:
    """Drop the first `num_bytes`."""
    while num_bytes:
        part = parts.popleft()
        if len(part) > num_bytes:
            parts.appendleft(part[num_bytes:])
            return
        num_bytes -= len(part)
