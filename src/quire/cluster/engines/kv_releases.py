"""Telling engines that the KV of a prompt will not be read."""

from __future__ import annotations

import asyncio
import logging

from quire.cluster.engines.registry import Engine
from quire.cluster.engines.upstream import EngineRequest, EngineRequestError, Upstream

logger = logging.getLogger(__name__)

MAX_RELEASES = 256
"""Releases at a time. KV that is not released is freed when nobody has asked for it in time."""


class KVReleases:
    """Releases KV beside the requests that it was computed for, whose clients do not wait for that.

    Args:
        upstream: connects to engines.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, engine: Engine, asked: EngineRequest) -> None:
        """Send a request to an engine to release KV, unless too many are being sent."""
        if len(self._tasks) < MAX_RELEASES:
            task = asyncio.create_task(self._send(engine, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel those that have not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, engine: Engine, asked: EngineRequest) -> None:
        try:
            async with self._upstream.answer(engine, asked):
                pass
        except EngineRequestError as error:
            logger.warning("KV that nobody will read is not released: %s", error)
