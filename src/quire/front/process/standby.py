"""The standby: a process that has imported what an engine imports, and waits to become the next engine."""

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
"""Seconds between an engine's being ready and the start of a standby: its first requests come first."""


class StandbyProcess:
    """A running standby, which ends when this process ends."""

    def __init__(self) -> None:
        self._process = start_process(is_standby=True)
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


class StandbyKeeper:
    """Keeps one standby beside an engine that is ready. Not thread-safe.

    A standby that dies is not replaced before the next engine is ready: it makes one recovery slower.

    Args:
        events: has the standby's events while there is one.
        is_wanted: whether there is to be a standby at all.

    Attributes:
        start_at: when a standby is to be started, on the caller's clock; None: never.
    """

    def __init__(self, events: select.epoll, *, is_wanted: bool) -> None:
        self.start_at: float | None = None
        self._is_wanted = is_wanted
        self._events = events
        self._standby: StandbyProcess | None = None

    def plan(self, now: float) -> None:
        """Note that an engine is ready."""
        if self._is_wanted and self._standby is None:
            self.start_at = now + START_DELAY

    def attend(self, read_clock: Callable[[], float]) -> None:
        """Start a standby if that is due, and clean up after one that has died."""
        if self.start_at is not None and read_clock() >= self.start_at:
            self._start()
        elif self._standby is not None and not self._standby.check():
            how = self._forget(self._standby)
            logger.warning("the standby engine process %s; the next recovery will take longer", how)

    def is_ready(self) -> bool:
        """Return whether there is a standby that has imported everything."""
        return self._standby is not None and self._standby.is_ready()

    def take(self) -> subprocess.Popen[bytes] | None:
        """Hand over a standby that is ready, and end any other; None: there is none that is ready.

        No other is started before the next `plan`.
        """
        self.start_at = None
        standby = self._standby
        if standby is None:
            return None
        if not standby.is_ready():  # with its low priority it may take longer than a new process
            self._forget(standby)
            return None
        self._release(standby)
        return standby.hand_over()

    def close(self) -> None:
        """End the standby, and start no other."""
        self.start_at = None
        self._is_wanted = False
        if self._standby is not None:
            self._forget(self._standby)

    def _start(self) -> None:
        self.start_at = None
        try:
            self._standby = StandbyProcess()
        except OSError:  # no process, no memory, no descriptor
            logger.warning("no standby engine process can be started", exc_info=True)
        else:
            self._events.register(self._standby.event_fd, select.EPOLLIN)

    def _forget(self, standby: StandbyProcess) -> str:
        self._release(standby)
        return standby.close()

    def _release(self, standby: StandbyProcess) -> None:
        self._events.unregister(standby.event_fd)
        self._standby = None
