"""Time limits that are moved often and seldom pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


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
        """Let it pass this many seconds from now."""
        self._at = at = self._loop.time() + seconds
        if self._handle is not None:
            if self._fires_at <= at:
                return
            self._handle.cancel()
        self._start_timer(at)

    def clear(self) -> None:
        """Let it never pass, until it is set."""
        self._at = None

    def close(self) -> None:
        """Let it never pass, and forget the function."""
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
