"""Requests to engines, counted as load and in metrics; failures trigger a health check."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator

from quire.cluster.engines.metrics import Purpose, RouterMetrics
from quire.cluster.engines.registry import Engine, Engines
from quire.cluster.engines.upstream import Answer, EngineRequest, EngineRequestError, Upstream
from quire.cluster.prompts import Prompt


class PromptKV(enum.Enum):
    """Where the KV of a request's prompt comes from."""

    COMPUTED = enum.auto()
    LOADED = enum.auto()


class EngineCalls:
    """Sends requests to engines.

    Args:
        engines: all engines.
        upstream: connects to them.
        metrics: the router's metrics.

    Attributes:
        releases: frees KV that no request will read.
    """

    def __init__(self, engines: Engines, upstream: Upstream, metrics: RouterMetrics) -> None:
        self.engines = engines
        self.metrics = metrics
        self.releases = KVReleases(upstream)
        self._upstream = upstream

    @contextlib.asynccontextmanager
    async def answer(
        self, engine: Engine, purpose: Purpose, prompt: Prompt, kv: PromptKV, asked: EngineRequest
    ) -> AsyncIterator[Answer]:
        """Send a request to an engine and yield its answer, see `Upstream.answer`.

        Args:
            engine: where to send it.
            purpose: prefill or answer.
            prompt: the request's prompt.
            kv: where the KV of the prompt comes from.
            asked: the request.

        Raises:
            EngineRequestError: the engine did not answer.
        """
        self.metrics.requests.labels(engine.url, purpose).inc()
        if prompt.content:
            self.metrics.count_prefix(self.engines.cached_prefix(prompt, engine))
        if prompt.cached is not None and prompt.cached.tokenized and engine.takes_prompts:
            asked = asked.with_prompt(prompt.cached.tokenized)
        with self.engines.serving(engine, prompt, is_computed=kv is PromptKV.COMPUTED) as served:
            try:
                async with self._upstream.answer(engine, asked) as answer:
                    served.answered()
                    yield answer
            except EngineRequestError as error:
                if self.engines.by_url.get(engine.url) is engine:  # else it was removed, with its counters
                    self.metrics.failures.labels(engine.url, purpose).inc()
                if not error.timed_out:
                    engine.doubt(str(error))
                raise


logger = logging.getLogger(__name__)

MAX_RELEASES = 256
"""Maximum concurrent releases. KV that is not released is freed when its loan times out."""


class KVReleases:
    """Releases KV in the background, so that clients do not wait for it.

    Args:
        upstream: connects to engines.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, engine: Engine, asked: EngineRequest) -> None:
        """Ask an engine to release KV, unless too many releases are under way."""
        if len(self._tasks) < MAX_RELEASES:
            task = asyncio.create_task(self._send(engine, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel unfinished releases."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, engine: Engine, asked: EngineRequest) -> None:
        try:
            async with self._upstream.answer(engine, asked):
                pass
        except EngineRequestError as error:
            logger.warning("unused KV was not released: %s", error)
