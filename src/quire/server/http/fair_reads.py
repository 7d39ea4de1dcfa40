"""Work of many connections, a bounded number of calls in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

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
