"""Answers of /health, /live and /metrics on the monitoring port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable

from prometheus_client import CONTENT_TYPE_LATEST

from quire.server.http.stopping import cancelled_at_end
from quire.server.monitoring.port import Answer, monitored
from quire.server.wire.answers import Health, encode
from quire.server.wire.paths import READINESS_PATHS

TURN_INTERVAL = 0.25
"""Seconds between heartbeats of the event loop."""

STUCK_AFTER = 10.0
"""Seconds without a turn after which the event loop is considered stuck."""

METRICS_AGE = 0.1
"""Seconds for which rendered metrics are reused, as rendering takes time from the event loop."""

JSON = "application/json"


class MonitoredServer:
    """Answers in a thread, from published state, without waiting for the event loop.

    Args:
        health: returns whether requests can be served; called in that thread.
        exposition: returns the metrics in the Prometheus text format; called in that thread.
        read_clock: returns seconds.
    """

    def __init__(
        self,
        health: Callable[[], Health],
        exposition: Callable[[], bytes],
        *,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._health = health
        self._exposition = exposition
        self._read_clock = read_clock
        self._last_turn = read_clock()
        self._rendered = b""
        self._rendered_at = -METRICS_AGE

    @contextlib.asynccontextmanager
    async def answering(self, bound: socket.socket) -> AsyncIterator[None]:
        """Answer on a socket for the duration of the context, and track the event loop's turns.

        Args:
            bound: a bound socket that is not listening yet; the caller closes it.
        """
        ready = dict.fromkeys(READINESS_PATHS, self.health)
        answers = {**ready, "/live": self.live, "/metrics": self.metrics}
        async with cancelled_at_end(self._note_turns()):
            with monitored(bound, answers):
                yield

    def health(self) -> Answer:
        """Answer 200 if requests can be served, otherwise 503 with the reason."""
        stuck = self._stuck()
        return _answer(self._health() if stuck is None else stuck)

    def live(self) -> Answer:
        """Return whether the event loop responds: 200, or 503 with the time since its last turn."""
        return _answer(self._stuck() or Health(status="ok"))

    def metrics(self) -> Answer:
        """Return the metrics in the Prometheus text format, at most `METRICS_AGE` seconds old."""
        now = self._read_clock()
        if now - self._rendered_at >= METRICS_AGE:
            self._rendered, self._rendered_at = self._exposition(), now
        return Answer(200, CONTENT_TYPE_LATEST, self._rendered)

    def note_turn(self) -> None:
        """Record a heartbeat of the event loop."""
        self._last_turn = self._read_clock()

    def _stuck(self) -> Health | None:
        silence = self._read_clock() - self._last_turn
        if silence <= STUCK_AFTER:
            return None
        return Health(
            status="unavailable",
            reason=f"the event loop has not turned for {silence:.0f} s; the limit is {STUCK_AFTER:.0f} s",
        )

    async def _note_turns(self) -> None:
        while True:
            self.note_turn()
            await asyncio.sleep(TURN_INTERVAL)


def _answer(health: Health) -> Answer:
    return Answer(200 if health.status == "ok" else 503, JSON, encode(health))
