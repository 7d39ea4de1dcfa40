"""Open connections: their number, fair reading, and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections import deque
from collections.abc import Callable
from typing import Protocol

MAX_BY_DEFAULT = 16_384
RESERVED_DESCRIPTORS = 256
"""Descriptors kept free for engine restarts, files, and connections being accepted."""


class Connection(Protocol):
    """An open connection."""

    def drop(self) -> None:
        """Close the connection at once, without an answer."""


class Connections:
    """The open connections; those that wait for their client can be closed to make room.

    A connection waits for its client until its request is complete, and again after its answer.

    Args:
        limit: the maximum number of open connections.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # longest wait first

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Add a new connection, which waits for its client."""
        self._open.add(connection)
        self._waiting[connection] = None

    def replace(self, connection: Connection, successor: Connection) -> None:
        """Replace a connection, or add the new one."""
        self.remove(connection)
        self.add(successor)

    def waits(self, connection: Connection) -> None:
        """Note that a connection now waits for its client."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def serves(self, connection: Connection) -> None:
        """Note that a connection's request is complete; it stays open until it is answered."""
        self._waiting.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def make_room(self) -> bool:
        """Return whether one more fits; closes the one that has waited longest if necessary."""
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
    """Raise the limit of open files for this process and its children as far as the system permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a container may forbid it; the soft limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def default_limit() -> int:
    """Return how many connections the descriptor limit leaves room for, besides open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_BY_DEFAULT
    num_open = len(os.listdir("/proc/self/fd"))
    reserved = min(RESERVED_DESCRIPTORS, soft // 4)
    return max(1, min(MAX_BY_DEFAULT, soft - num_open - reserved))


CALLS_PER_TURN = 32
"""Each takes tens of microseconds, or more if its client has sent a lot."""


class FairReads:
    """Runs calls in order, a few per turn of the event loop.

    Thousands of clients that send at the same moment then do not block the rest of the loop.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], object]] = deque()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedule a call for one of the next turns."""
        if not self._waiting:
            self._loop.call_soon(self._take_turn)
        self._waiting.append(call)

    def _take_turn(self) -> None:
        for _ in range(min(CALLS_PER_TURN, len(self._waiting))):
            self._loop.call_soon(self._waiting.popleft())  # an exception does not affect other calls
        if self._waiting:
            self._loop.call_soon(self._take_turn)


class Deadline:
    """Calls a function at a deadline, which can be moved or cleared cheaply.

    Moving it later is one assignment: the event loop's timer is only set again when it fires too early.

    Args:
        loop: the event loop, with its clock.
        passed: the function.
    """

    __slots__ = ("_at", "_fires_at", "_handle", "_loop", "_passed")

    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._at: float | None = None
        self._fires_at = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Set the deadline to this many seconds from now."""
        self._at = at = self._loop.time() + seconds
        if self._handle is not None:
            if self._fires_at <= at:
                return
            self._handle.cancel()
        self._start_timer(at)

    def clear(self) -> None:
        """Clear the deadline until it is set again."""
        self._at = None

    def close(self) -> None:
        """Clear the deadline and forget the function."""
        self._at = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _start_timer(self, at: float) -> None:
        self._fires_at = at
        self._handle = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        self._handle = None
        if self._at is None:
            return
        if self._loop.time() < self._at:
            self._start_timer(self._at)
            return
        self._at = None
        self._passed()
