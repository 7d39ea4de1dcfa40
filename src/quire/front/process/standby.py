"""The spare: a process that has imported what an engine imports, and waits to become the next engine."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import weakref
from collections.abc import Callable

from quire.engine.exit_status import describe_end
from quire.front.process.launch import end_process, is_readable, start_process

logger = logging.getLogger(__name__)

START_DELAY = 1.0
"""Seconds between an engine's being ready and the start of a spare: its first requests come first."""


class SpareProcess:
    """A running spare, which ends when this process ends."""

    def __init__(self) -> None:
        self._process = start_process(is_spare=True)
        self._finalizer = weakref.finalize(self, end_process, os.getpid(), self._process)
        self._has_imported = False

    @property
    def event_fd(self) -> int:
        """Becomes readable when the process has imported everything, or has ended; then call `check`."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def check(self) -> bool:
        """Return whether the process lives."""
        if not is_readable(self.event_fd, 0):
            return True
        if not os.read(self.event_fd, 1):
            return False
        self._has_imported = True
        return self.check()

    def is_ready(self) -> bool:
        """Return whether the process lives and has imported everything."""
        return self.check() and self._has_imported

    def hand_over(self) -> subprocess.Popen[bytes]:
        """Return the process, which then is the caller's to end."""
        self._finalizer.detach()
        return self._process

    def close(self) -> str:
        """End the process, and return how it has ended."""
        self._finalizer()
        return describe_end(self._process.returncode)


class SpareKeeper:
    """Keeps one spare beside an engine that is ready. Not thread-safe.

    A spare that dies is not replaced before the next engine is ready: it makes one recovery slower.

    Args:
        events: has the spare's events while there is one.
        is_wanted: whether there is to be a spare at all.

    Attributes:
        start_at: when a spare is to be started, on the caller's clock; None: never.
    """

    def __init__(self, events: select.epoll, *, is_wanted: bool) -> None:
        self.start_at: float | None = None
        self._is_wanted = is_wanted
        self._events = events
        self._spare: SpareProcess | None = None

    def plan(self, now: float) -> None:
        """Note that an engine is ready."""
        if self._is_wanted and self._spare is None:
            self.start_at = now + START_DELAY

    def attend(self, read_clock: Callable[[], float]) -> None:
        """Start a spare if that is due, and clean up after one that has died."""
        if self.start_at is not None and read_clock() >= self.start_at:
            self._start()
        elif self._spare is not None and not self._spare.check():
            how = self._forget(self._spare)
            logger.warning("the spare engine process %s; the next recovery will take longer", how)

    def is_ready(self) -> bool:
        """Return whether there is a spare that has imported everything."""
        return self._spare is not None and self._spare.is_ready()

    def take(self) -> subprocess.Popen[bytes] | None:
        """Hand over a spare that is ready, and end any other; None: there is none that is ready.

        No other is started before the next `plan`.
        """
        self.start_at = None
        spare = self._spare
        if spare is None:
            return None
        if not spare.is_ready():  # with its low priority it may take longer than a new process
            self._forget(spare)
            return None
        self._release(spare)
        return spare.hand_over()

    def close(self) -> None:
        """End the spare, and start no other."""
        self.start_at = None
        self._is_wanted = False
        if self._spare is not None:
            self._forget(self._spare)

    def _start(self) -> None:
        self.start_at = None
        try:
            self._spare = SpareProcess()
        except OSError:  # no process, no memory, no descriptor
            logger.warning("no spare engine process can be started", exc_info=True)
        else:
            self._events.register(self._spare.event_fd, select.EPOLLIN)

    def _forget(self, spare: SpareProcess) -> str:
        self._release(spare)
        return spare.close()

    def _release(self, spare: SpareProcess) -> None:
        self._events.unregister(spare.event_fd)
        self._spare = None
