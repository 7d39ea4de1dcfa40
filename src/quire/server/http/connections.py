"""Open connections: how many there are, when they are read, and how long they may take."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections import deque
from collections.abc import Callable
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
        """Replace a connection, or add the new one."""
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


CALLS_PER_TURN = 32
"""Each takes tens of microseconds, unless its client has sent much."""


class LoopTurns:
    """Runs calls in the order in which they are handed in, a few in each turn of the event loop.

    So thousands of clients that send at the same moment do not hold up whatever else the loop does.

    Args:
        loop: which runs them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], object]] = deque()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have something called in one of the next turns."""
        if not self._waiting:
            self._loop.call_soon(self._take_turn)
        self._waiting.append(call)

    def _take_turn(self) -> None:
        for _ in range(min(CALLS_PER_TURN, len(self._waiting))):
            self._loop.call_soon(self._waiting.popleft())  # what one raises is nothing to the others
        if self._waiting:
            self._loop.call_soon(self._take_turn)


class Deadline:
    """Calls a function when a time has passed, unless the time is moved or taken away before.

    To move it later costs an assignment: the event loop's timer is set again only when it fires too early.

    Args:
        loop: whose clock counts.
        passed: what is called.
    """

    __slots__ = ("_at", "_fires_at", "_handle", "_loop", "_passed")

    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._at: float | None = None
        self._fires_at = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Set the timer to this many seconds from now."""
        self._at = at = self._loop.time() + seconds
        if self._handle is not None:
            if self._fires_at <= at:
                return
            self._handle.cancel()
        self._start_timer(at)

    def clear(self) -> None:
        """Disable the timer until it is set."""
        self._at = None

    def close(self) -> None:
        """Disable the timer and forget the function."""
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
