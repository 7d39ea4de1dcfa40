"""Stopping a server by signals: gracefully at first, then at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Counts SIGTERM and Ctrl-C: the first asks for a graceful stop, the second for an immediate one."""

    def __init__(self) -> None:
        self.graceful = asyncio.Event()
        self.immediate = asyncio.Event()

    def _received(self) -> None:
        if self.graceful.is_set():
            self.immediate.set()
        self.graceful.set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals for the duration of the context, in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._received)
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)


async def finished_unless_set(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Return True when `work` is done, or cancel it and return False when `event` is set first."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for pending in (task, waiting):
            pending.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


@contextlib.asynccontextmanager
async def cancelled_at_end(work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run `work`, which never ends by itself, for the duration of the context."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
