"""Health and metrics of engines, for the event loop and the monitoring thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from quire.errors import EngineDeadError
from quire.scheduling.outputs import SchedulerStats
from quire.server.context import STATS_TIMEOUT, ServerContext
from quire.server.http.stopping import cancelled_at_end
from quire.server.wire.answers import Health

STATS_INTERVAL = 1.0
"""Seconds between requests for the engine's statistics; a busy engine sends them more often."""


def health_of(contexts: Sequence[ServerContext]) -> Health:
    """Return whether requests of all these models can be served. Thread-safe."""
    for context in contexts:
        if context.calls.draining:
            return Health(status="draining", reason="the server is shutting down")
        try:
            context.llm.check_health()
        except EngineDeadError as error:
            return Health(status="unavailable", reason=context.named(str(error)))
    return Health(status="ok")


async def current_stats(context: ServerContext) -> tuple[SchedulerStats | None, bool]:
    """Return the engine's statistics (the last known ones during a long step), and whether it is up."""
    llm = context.llm
    try:
        llm.check_health()
        return await asyncio.wait_for(llm.stats(), STATS_TIMEOUT), True
    except TimeoutError:
        return llm.latest_stats, True
    except EngineDeadError:
        return llm.latest_stats, False


def latest_exposition(contexts: Sequence[ServerContext]) -> bytes:
    """Return the metrics in the Prometheus text format from the last statistics. Thread-safe."""
    for context in contexts:
        llm = context.llm
        is_up = health_of([context]).status != "unavailable"
        context.metrics.engine.update(llm.latest_stats, llm.recovery_stats, engine_up=is_up)
    first, *others = (context.metrics for context in contexts)
    return first.exposition(others=others)


@contextlib.asynccontextmanager
async def stats_kept_current(contexts: Sequence[ServerContext]) -> AsyncIterator[None]:
    """Keep the engines' statistics current for the duration of the context."""
    async with contextlib.AsyncExitStack() as stack:
        for context in contexts:
            await stack.enter_async_context(cancelled_at_end(_ask_for_stats(context)))
        yield


async def _ask_for_stats(context: ServerContext) -> None:
    while True:
        with contextlib.suppress(EngineDeadError):
            await context.llm.stats()
        await asyncio.sleep(STATS_INTERVAL)
