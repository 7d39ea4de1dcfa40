"""Writing lines in a thread: who has a line never waits for who reads it."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable

MAX_WAITING = 4096
"""Lines that wait to be written at most; more are dropped and counted."""

CLOSE_TIMEOUT = 1.0
"""Seconds that the last lines have to be written."""

GATHERING_TIME = 0.05
"""Seconds for which lines are gathered before they are written: the thread wakes less often."""


class LineWriter:
    """Writes lines to a descriptor in a thread of its own.

    If nobody reads them, or they cannot be written, lines are dropped; the next line that can be written says
    how many were.

    Args:
        descriptor: to write to; stays open.
        dropped_line: returns the line that says how many were dropped.
    """

    def __init__(self, descriptor: int, dropped_line: Callable[[int], bytes]) -> None:
        self._descriptor = descriptor
        self._dropped_line = dropped_line
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_dropped = 0
        self._num_told = 0
        self._lock = threading.Lock()  # of the two numbers
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Number of lines that were not written."""
        return self._num_dropped

    def write(self, line: bytes) -> None:
        """Have a line written that ends with a line feed; never waits, and any thread may call it."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(line)
        else:
            self._drop(1)

    def close(self) -> None:
        """Return when all lines are written, but wait no longer than `CLOSE_TIMEOUT`."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        is_open = True
        while is_open:
            lines = [self._waiting.get()]
            self._closing.wait(GATHERING_TIME)
            with contextlib.suppress(queue.Empty):
                while lines[-1] is not None and len(lines) < MAX_WAITING:
                    lines.append(self._waiting.get_nowait())
            is_open = lines[-1] is not None
            self._write_all([line for line in lines if line is not None])

    def _write_all(self, lines: list[bytes]) -> None:
        with self._lock:
            num_dropped = self._num_dropped
        told = [self._dropped_line(num_dropped - self._num_told)] if num_dropped > self._num_told else []
        unwritten = memoryview(b"".join(itertools.chain(told, lines)))
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._descriptor, unwritten) :]
        except OSError:  # it is closed, or its disk is full
            self._drop(len(lines))
        else:
            self._num_told = num_dropped

    def _drop(self, num_lines: int) -> None:
        with self._lock:
            self._num_dropped += num_lines
