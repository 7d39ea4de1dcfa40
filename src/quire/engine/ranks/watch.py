"""Watches the other ranks: their reports, and that they are alive."""

from __future__ import annotations

import logging
import selectors
import socket
import subprocess
import threading
import time
from typing import Protocol, runtime_checkable

from quire.engine.exit_status import describe_end
from quire.engine.ranks.messages import Channel, FromRank, RankConnecting, RankFailed
from quire.errors import EngineDeadError

logger = logging.getLogger(__name__)

EXIT_WAIT = 2.0
"""Seconds to wait for a process that has closed its channel to end."""

IMPORT_LIMIT = 60.0
"""Seconds of silence that a rank may need, at most, while it imports what it needs."""

LAP = 1.0
"""Seconds after which a wait for reports is repeated."""


@runtime_checkable
class Exchanges(Protocol):
    """Exchanges of ranks on devices, which no process waits for."""

    def seconds_waiting(self) -> float:
        """Return how long ago the oldest exchange was asked for that has not ended; 0: all have ended."""

    def abort(self) -> None:
        """Begin to end all exchanges of this rank, so that everything that waits for its device goes on."""


class RankWatch:
    """Receives what ranks 1 and up report, in a thread of its own, and keeps why the first of them failed.

    Args:
        processes: of the ranks, complete before `begin`.
        channels: to the ranks, likewise.
        timeout: seconds after which a rank that is silent has failed.
    """

    def __init__(
        self, processes: list[subprocess.Popen[bytes]], channels: list[Channel], timeout: float
    ) -> None:
        self._timeout = timeout
        self._silences: dict[int, float] = {}  # seconds, of the ranks that live
        self.failure: str | None = None
        self._cause_is_known = False  # else the failure may be another's consequence
        self._is_ending = False
        self._exchanges: Exchanges | None = None
        self._processes = processes
        self._channels = channels
        self._reports: dict[type[FromRank], int] = {}
        self._changed = threading.Condition()
        self._signal, self._failure_end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    @property
    def failure_fd(self) -> int:
        """Becomes readable when a rank has failed."""
        return self._failure_end.fileno()

    def begin(self) -> None:
        """Start to watch."""
        self._thread.start()

    def watch_exchanges(self, exchanges: Exchanges) -> None:
        """Count exchanges that take too long as a failure, and abort them after any."""
        with self._changed:
            self._exchanges = exchanges
            if self.failure is not None:
                exchanges.abort()

    def expect_end(self) -> None:
        """Note that the processes end now because they shall."""
        self._is_ending = True

    def join(self) -> None:
        """Wait until all channels have ended, and stop; exchanges with ranks that have ended end, too."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._exchanges is not None:
            self._exchanges.abort()
            self._exchanges = None
        self._signal.close()
        self._failure_end.close()

    def wait_for_all(self, report: type[FromRank], times: int = 1) -> None:
        """Wait until each rank has sent a report so often; raise `EngineDeadError` if one fails instead."""
        wanted = len(self._channels) * times
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._reports.get(report, 0) == wanted)
            if self.failure is not None:
                raise EngineDeadError(self.failure)

    def wait_for_cause(self, deadline: float) -> None:
        """Wait until it is known why a rank failed, or until `deadline` on the monotonic clock."""
        with self._changed:
            self._changed.wait_for(lambda: self._cause_is_known, max(0.0, deadline - time.monotonic()))

    def note_failure(self, reason: str, *, is_cause: bool = False) -> str:
        """Keep `reason` unless there is one already, and return the one that is kept.

        Args:
            reason: why a rank failed.
            is_cause: that is why, and not what followed from it; replaces a reason that was not.
        """
        with self._changed:
            if self.failure is None:
                self._signal.send(b"x")
            if self.failure is None or (is_cause and not self._cause_is_known):
                self.failure = reason
                if self._exchanges is not None:
                    self._exchanges.abort()
            self._cause_is_known |= is_cause
            self._changed.notify_all()
            return self.failure

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels, start=1):
                selector.register(channel, selectors.EVENT_READ, rank)
                self._silences[rank] = 0.0
            while selector.get_map():
                started = time.monotonic()
                ready = selector.select(LAP)
                self._note_silence(min(time.monotonic() - started, LAP))
                self._note_stall()
                for key, _ in ready:
                    rank = key.data
                    self._silences[rank] = 0.0
                    try:
                        message = self._channels[rank - 1].receive()
                    except (EOFError, OSError):
                        selector.unregister(key.fileobj)
                        del self._silences[rank]
                        self._note_end(rank)
                    else:
                        self._note_report(rank, message)

    def _note_silence(self, seconds: float) -> None:
        """Count time in which this process ran, too: not what both slept through."""
        is_importing = self._reports.get(RankConnecting, 0) < len(self._channels)
        limit = max(self._timeout, IMPORT_LIMIT) if is_importing else self._timeout
        for rank in self._silences:
            self._silences[rank] += seconds
            if self._silences[rank] > limit:
                pid = self._processes[rank - 1].pid
                reason = f"rank {rank}, the process {pid}, has given no sign of life for {limit:g} seconds"
                self.note_failure(reason, is_cause=True)

    def _note_stall(self) -> None:
        """Note a failure if an exchange takes too long, or the device cannot say."""
        exchanges = self._exchanges
        if exchanges is None or self.failure is not None:
            return
        try:
            seconds = exchanges.seconds_waiting()
        except RuntimeError as error:  # as torch raises the device's error
            self.note_failure(f"the device of rank 0 failed: {error}")
            return
        if seconds > self._timeout:
            self.note_failure(
                "the ranks have waited for one of them for longer than tensor_parallel_timeout, "
                f"{self._timeout:g} seconds"
            )

    def _note_report(self, rank: int, message: FromRank) -> None:
        if isinstance(message, RankFailed):
            self.note_failure(f"rank {rank} failed: {message.reason}", is_cause=not message.is_consequence)
            return
        with self._changed:
            self._reports[type(message)] = self._reports.get(type(message), 0) + 1
            self._changed.notify_all()

    def _note_end(self, rank: int) -> None:
        if self._is_ending:
            return
        process = self._processes[rank - 1]
        try:
            how = describe_end(process.wait(EXIT_WAIT))
        except subprocess.TimeoutExpired:
            how = "has closed its channel"
        reason = f"rank {rank}, the process {process.pid}, {how}; its log is on standard error"
        self.note_failure(reason, is_cause=how.startswith("was killed") or self.failure is None)
