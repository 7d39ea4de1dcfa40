"""Stopping a server by signals: gracefully, then at once, even if the event loop is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

STOP_GRACE = 1.8
"""Seconds after the drain time until the process exits forcibly."""

IMMEDIATE_GRACE = 1.0
"""Seconds after the second signal until the process exits forcibly."""

_STANDARD_ERROR = 2


class StopSignals:
    """Counts SIGTERM and Ctrl-C: the first asks for a graceful stop, the second for an immediate one.

    If the event loop does not stop in time, the stacks of all threads are written to standard error, and the
    process ends with status 1.

    Args:
        drain_timeout: seconds that a graceful stop may wait for what runs.
        takes_hangup: whether SIGHUP sets `hangup`; otherwise, its handling is unchanged.
    """

    def __init__(self, drain_timeout: float, *, takes_hangup: bool = False) -> None:
        self.graceful = asyncio.Event()
        self.immediate = asyncio.Event()
        self.hangup = asyncio.Event()
        self._numbers = (*_STOP_SIGNALS, signal.SIGHUP) if takes_hangup else _STOP_SIGNALS
        self._drain_timeout = drain_timeout
        self._num_received = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals for the duration of the context, in the main thread's running event loop."""
        loop = asyncio.get_running_loop()
        with _in_thread(self._numbers, lambda number: self._received(number, loop)):
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()

    def _received(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        """Set the deadline for a forced exit, and notify the event loop."""
        if number == signal.SIGHUP:
            loop.call_soon_threadsafe(self.hangup.set)
            return
        self._num_received += 1
        is_first = self._num_received == 1
        limit = self._drain_timeout + STOP_GRACE if is_first else IMMEDIATE_GRACE
        if self._num_received <= 2:
            faulthandler.dump_traceback_later(limit, exit=True, file=_STANDARD_ERROR)
        loop.call_soon_threadsafe((self.graceful if is_first else self.immediate).set)


@contextlib.contextmanager
def _in_thread(numbers: Sequence[int], on_signal: Callable[[int], None]) -> Iterator[None]:
    """Call `on_signal` in a thread for each of these signals: the main thread may be blocked.

    The interpreter's C handler writes each signal's number to a socket at once, whichever thread runs.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while received := reader.recv(64):
            for number in received:
                if number in numbers:
                    on_signal(number)

    thread = threading.Thread(target=watch, name="stop-signals", daemon=True)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()


def announce_stop(num_running: int, timeout: float) -> None:
    """Print how many requests a graceful stop waits for, and for how many seconds."""
    with contextlib.suppress(OSError):  # the log's reader may have ended by the same signal
        print(
            f"Stopping: {num_running} still running, for at most {timeout:g} s.", file=sys.stderr, flush=True
        )


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
