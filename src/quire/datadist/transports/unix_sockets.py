"""Unix sockets: both ends are on one host, the peer's user is known, and descriptors can be sent."""

from __future__ import annotations

import os
import secrets
import socket
import struct

from quire.datadist.wire import sockets

_CREDENTIALS = struct.Struct("iII")  # process, user and group


def listen(backlog: int) -> socket.socket:
    """Return a socket that listens under a random abstract name, in this network namespace only."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(b"\0quire-datadist-" + secrets.token_hex(16).encode())
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect(name: bytes, deadline: float) -> socket.socket:
    """Return a connection.

    Raises:
        OSError: no socket listens under this name here, or not in time.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(sockets.seconds_left(deadline))
        connection.connect(name)
        connection.setblocking(False)
    except OSError:
        connection.close()
        raise
    return connection


def require_same_user(connection: socket.socket) -> None:
    """Raise `PermissionError` unless the other end is of a process of this process's user."""
    user = _peer_user(connection)
    if user != os.geteuid():
        raise PermissionError(f"the peer's process is of user {user}, not {os.geteuid()}")


def send_descriptor(connection: socket.socket, descriptor: int, deadline: float) -> None:
    """Send a descriptor, which the peer must take with `receive_descriptor`.

    Raises:
        TimeoutError: the peer did not take what was sent before in time.
        OSError: the connection has ended.
    """
    sockets.wait_until_writable(connection, deadline)
    socket.send_fds(connection, [b"d"], [descriptor])


def receive_descriptor(connection: socket.socket, deadline: float) -> int:
    """Return a descriptor, which the caller closes.

    Raises:
        TimeoutError: nothing came in time.
        OSError: something else came, or the connection has ended.
    """
    if not sockets.is_readable(connection, sockets.seconds_left(deadline)):
        raise TimeoutError("timed out waiting for the peer")
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise ConnectionError("the peer has sent no descriptor")
    return descriptors[0]


def _peer_user(connection: socket.socket) -> int | None:
    if connection.family != socket.AF_UNIX:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user
