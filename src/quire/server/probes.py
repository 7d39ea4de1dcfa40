"""What /health, /live and /metrics answer, for the event loop and for the thread of the monitoring port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from prometheus_client import CONTENT_TYPE_LATEST

from quire.errors import EngineDeadError
from quire.server.context import ServerContext
from quire.server.monitoring import Answer
from quire.server.responses import Health, encode
from quire.server.stopping import cancelled_at_end

TURN_INTERVAL = 0.25
"""Seconds between notes that the event loop turns."""

STUCK_AFTER = 10.0
"""Seconds without a turn after which the event loop is considered stuck."""

STATS_INTERVAL = 1.0
"""Seconds between questions for the engine's figures, which a busy engine tells more often by itself."""

METRICS_AGE = 0.1
"""Seconds for which rendered metrics are sent again: rendering takes time from the event loop."""

JSON = "application/json"


def health_of(context: ServerContext) -> Health:
    """Return whether requests can be served; any thread may ask."""
    if context.calls.draining:
        return Health(status="draining", reason="the server is shutting down")
    try:
        context.llm.check_health()
    except EngineDeadError as error:
        return Health(status="unavailable", reason=str(error))
    return Health(status="ok")


class MonitoredServer:
    """Answers for a thread that must not wait for the event loop: from what the loop left behind.

    Args:
        context: of the server.
        read_clock: returns seconds.
    """

    def __init__(self, context: ServerContext, *, read_clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._read_clock = read_clock
        self._last_turn = read_clock()
        self._rendered = b""
        self._rendered_at = -METRICS_AGE

    @contextlib.asynccontextmanager
    async def kept_current(self) -> AsyncIterator[None]:
        """Note that the event loop turns, and have the engine's figures at hand, while the context lasts."""
        async with cancelled_at_end(self._note_turns()), cancelled_at_end(self._ask_for_stats()):
            yield

    def health(self) -> Answer:
        """Tell whether requests can be served: 200, or 503 with the reason."""
        stuck = self._stuck()
        return _answer(health_of(self._context) if stuck is None else stuck)

    def live(self) -> Answer:
        """Tell whether the event loop turns: 200, or 503 with how long it has not."""
        return _answer(self._stuck() or Health(status="ok"))

    def metrics(self) -> Answer:
        """Return the metrics in the Prometheus text format, at most `METRICS_AGE` seconds old."""
        now = self._read_clock()
        if now - self._rendered_at >= METRICS_AGE:
            context = self._context
            is_up = health_of(context).status != "unavailable"
            context.metrics.engine.update(
                context.llm.latest_stats, context.llm.recovery_stats, engine_up=is_up
            )
            self._rendered, self._rendered_at = context.metrics.exposition(), now
        return Answer(200, CONTENT_TYPE_LATEST, self._rendered)

    def note_turn(self) -> None:
        """Note that the event loop turns."""
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

    async def _ask_for_stats(self) -> None:
        while True:
            with contextlib.suppress(EngineDeadError):
                await self._context.llm.stats()
            await asyncio.sleep(STATS_INTERVAL)


def _answer(health: Health) -> Answer:
    return Answer(200 if health.status == "ok" else 503, JSON, encode(health))
