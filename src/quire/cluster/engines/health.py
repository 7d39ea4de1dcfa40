"""Health checks: an engine that fails gets no requests until it answers again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from quire.cluster.engines.registry import NOT_CHECKED, Engine, Role
from quire.cluster.engines.upstream import EngineRequestError, Upstream
from quire.server.wire.answers import EngineDescription

if TYPE_CHECKING:
    from quire.cluster.engines.kv_event_feeds import KVEventFeeds

logger = logging.getLogger(__name__)

MAX_BACKOFF = 16
"""Maximum time between checks of an engine that is down, in health intervals."""


class HealthChecks:
    """Checks each engine periodically, in a task of its own.

    Args:
        upstream: connects to the engines.
        interval: seconds between two checks of an engine that is up.
        feeds: follow the KV events of engines that are up; None: events are not followed.
    """

    def __init__(self, upstream: Upstream, interval: float, feeds: KVEventFeeds | None = None) -> None:
        self._upstream = upstream
        self._feeds = feeds
        self._interval = interval
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()  # of removed engines that still have requests

    async def check(self, engine: Engine) -> None:
        """Check an engine now."""
        before = engine.failure
        failure = await self._failure_of(engine)
        if failure is None and (before or engine.role is Role.PREFILL or self._feeds is not None):
            await self._note(engine, await self._upstream.description(engine))
        if failure is None:
            engine.mark_up()
            if before is not None:
                logger.info("%s is up", engine.url)
        else:
            engine.mark_down(failure)
            if self._feeds is not None:
                await self._feeds.unfollow(engine)
            if before in (None, NOT_CHECKED):
                logger.warning("%s is down: %s", engine.url, failure)

    async def _failure_of(self, engine: Engine) -> str | None:
        """Return why an engine is unusable, if it is; one that twice says nothing in time is lost."""
        begun_at = asyncio.get_running_loop().time()
        for _ in range(2):
            try:
                return await self._upstream.check_health(engine)
            except EngineRequestError as error:
                failure = error
                engine.mark_down(str(error))
                if not error.timed_out:
                    return str(error)
        engine.lose(begun_at)
        return str(failure)

    async def watch(self, engine: Engine) -> None:
        """Start checking an engine; returns after the first check, or when `unwatch` is called."""
        checked = asyncio.Event()
        task = self._tasks[engine] = asyncio.create_task(self._watch(engine, checked))
        task.add_done_callback(lambda _: checked.set())  # the task may be cancelled before it starts
        await checked.wait()

    async def unwatch(self, engine: Engine) -> None:
        """Stop checking an engine when it has no more requests, which it may still lose."""
        task = self._tasks.pop(engine)
        if engine.num_requests:
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._feeds is not None:
            await self._feeds.unfollow(engine)

    async def close(self) -> None:
        """Stop checking all engines."""
        for engine in list(self._tasks):
            await self.unwatch(engine)
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self._feeds is not None:
            await self._feeds.close()

    async def _note(self, engine: Engine, description: EngineDescription | None) -> None:
        engine.note(description)
        if self._feeds is not None and engine in self._tasks:
            await self._feeds.follow(engine, description)

    async def _watch(self, engine: Engine, checked: asyncio.Event) -> None:
        await self.check(engine)
        checked.set()
        delay = self._interval
        while engine in self._tasks or engine.num_requests:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await engine.doubted.wait()
            engine.doubted.clear()
            await self.check(engine)
            is_down = engine.failure is not None
            delay = min(2 * delay, MAX_BACKOFF * self._interval) if is_down else self._interval
