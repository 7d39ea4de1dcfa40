"""The standby: a process that has imported the engine's modules and waits to become the next engine."""

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
"""Seconds after an engine is ready until a standby starts, so as not to slow its first requests."""


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
        """Return whether the process is alive."""
        if not is_readable(self.event_fd, 0):
            return True
        if not os.read(self.event_fd, 1):
            return False
        self._has_imported = True
        return self.check()

    def is_ready(self) -> bool:
        """Return whether the process is alive and has imported everything."""
        return self.check() and self._has_imported

    def hand_over(self) -> subprocess.Popen[bytes]:
        """Return the process; the caller must end it."""
        self._finalizer.detach()
        return self._process

    def close(self) -> str:
        """End the process, and return how it has ended."""
        self._finalizer()
        return describe_end(self._process.returncode)


class StandbyKeeper:
    """Keeps one standby beside an engine that is ready. Not thread-safe.

    A standby that dies is not replaced until the next engine is ready, which makes one recovery slower.

    Args:
        events: the standby is registered here while there is one.
        is_wanted: whether to keep a standby at all.

    Attributes:
        start_at: when to start a standby, on the caller's clock; None: never.
    """

    def __init__(self, events: select.epoll, *, is_wanted: bool) -> None:
        self.start_at: float | None = None
        self._is_wanted = is_wanted
        self._events = events
        self._standby: StandbyProcess | None = None

    def schedule_start(self, now: float) -> None:
        """Schedule the start of a standby, as an engine is ready."""
        if self._is_wanted and self._standby is None:
            self.start_at = now + START_DELAY

    def maintain(self, read_clock: Callable[[], float]) -> None:
        """Start a standby if one is due, and clean up after one that has died."""
        if self.start_at is not None and read_clock() >= self.start_at:
            self._start()
        elif self._standby is not None and not self._standby.check():
            how = self._forget(self._standby)
            logger.warning("the standby engine process %s; the next recovery will take longer", how)

    def is_ready(self) -> bool:
        """Return whether there is a standby that has imported everything."""
        return self._standby is not None and self._standby.is_ready()

    def take(self) -> subprocess.Popen[bytes] | None:
        """Hand over the standby if it is ready, otherwise end it and return None.

        No other is started before the next `schedule_start`.
        """
        self.start_at = None
        standby = self._standby
        if standby is None:
            return None
        if not standby.is_ready():  # at its low priority it may take longer than a new process
            self._forget(standby)
            return None
        self._release(standby)
        return standby.hand_over()

    def close(self) -> None:
        """End the standby, and do not start another."""
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
