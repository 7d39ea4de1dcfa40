"""Responses that are generated while nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from quire.server.wire.errors import ApiError

MAX_RUNNING = 1024
"""Responses of all tenants that are generated in the background."""

CLOSE_TIMEOUT = 2.0
"""Seconds that the last ones have to be stored when the server ends."""


class BackgroundResponses:
    """The tasks that generate them, by tenant and id."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def start(self, tenant: str, response_id: str, work: Coroutine[None, None, None]) -> None:
        """Begin to generate a response; `work` stores it, whatever becomes of it."""
        task = asyncio.create_task(work)
        self._tasks[tenant, response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop((tenant, response_id), None))

    def require_room(self) -> None:
        """Raise `ApiError` 429 if too many are being generated."""
        if len(self._tasks) >= MAX_RUNNING:
            raise ApiError(
                429,
                f"{len(self._tasks)} responses are being generated in the background, which is the limit; "
                "try again later",
                kind="rate_limit_error",
                code="too_many_background_responses",
            )

    def has(self, tenant: str, response_id: str) -> bool:
        """Return whether a response is being generated."""
        return (tenant, response_id) in self._tasks

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Stop generating a response, if it is being generated; return when it is stored."""
        task = self._tasks.get((tenant, response_id))
        if task is not None:
            await asyncio.sleep(0)  # a task that is cancelled before it has begun would store nothing
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """Return when all are stored, but wait no longer than `CLOSE_TIMEOUT`."""
        tasks = set(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT)
            for task in late:
                task.cancel()
