"""How many connections are open, and which one is closed when there is room for no other."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Protocol

MOST_BY_DEFAULT = 16_384
RESERVED_DESCRIPTORS = 256
"""Descriptors that connections leave free: for engines that restart, files, and what is being accepted."""


class Connection(Protocol):
    """An open connection."""

    def drop(self) -> None:
        """Close it at once, without an answer."""


class Connections:
    """The open connections, of which those that wait for their client can be closed for others.

    A connection waits for its client until its request is complete, and again after its answer.

    Args:
        limit: the maximum number of open connections.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # the one that has waited longest is first

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Count a new connection; it waits for its client."""
        self._open.add(connection)
        self._waiting[connection] = None

    def replace(self, connection: Connection, successor: Connection) -> None:
        """Let another connection take the place of one, or have its own if that one is gone."""
        self.remove(connection)
        self.add(successor)

    def waits(self, connection: Connection) -> None:
        """Note that a connection waits for its client from now on."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def serves(self, connection: Connection) -> None:
        """Note that a connection's request is complete: it stays until it is answered."""
        self._waiting.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def make_room(self) -> bool:
        """Return whether one more may be open; the one that has waited longest is closed if need be."""
        return len(self._open) < self.limit or self.drop_longest_waiting()

    def drop_longest_waiting(self) -> bool:
        """Close the connection that has waited longest for its client; return False if none waits."""
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        self.remove(longest)
        longest.drop()
        return True


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a container may forbid it; the soft limit counts then
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def default_limit() -> int:
    """Return how many connections the limit of descriptors leaves room for, beside what is open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_BY_DEFAULT
    num_open = len(os.listdir("/proc/self/fd"))
    reserved = min(RESERVED_DESCRIPTORS, soft // 4)
    return max(1, min(MOST_BY_DEFAULT, soft - num_open - reserved))
