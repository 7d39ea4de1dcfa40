"""Responses generated in the background, and their events for reconnecting clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable

from quire.server.wire.errors import ApiError

MAX_RUNNING = 1024
"""Maximum number of background responses of all tenants."""

CLOSE_TIMEOUT = 2.0
"""Seconds to store the last responses when the server stops."""


class BackgroundResponses:
    """The tasks that generate responses in the background, by tenant and id."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def start(self, tenant: str, response_id: str, work: Coroutine[None, None, None]) -> None:
        """Start to generate a response; `work` stores it, even if it fails."""
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
        """Stop generating a response, if it is being generated; wait until it is stored."""
        task = self._tasks.get((tenant, response_id))
        if task is not None:
            await asyncio.sleep(0)  # cancelled before it starts, the task would store nothing
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """Wait until all are stored, at most `CLOSE_TIMEOUT`."""
        tasks = set(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT)
            for task in late:
                task.cancel()


MAX_BYTES = 67_108_864
"""Maximum size of all events; the oldest are dropped, first those of ended responses."""

_Key = tuple[str, str]  # tenant and id of a response


class EventLog:
    """The events of one response, by their sequence numbers."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: dict[int, bytes] = {}
        self._first = 0
        self._next = 0
        self._has_ended = False
        self._changed = asyncio.Event()

    def append(self, event: bytes) -> None:
        """Add the next event."""
        self._events[self._next] = event
        self._next += 1
        self.num_bytes += len(event)
        self._wake_readers()

    def end(self) -> None:
        """Mark the log as ended."""
        self._has_ended = True
        self._wake_readers()

    def drop_first(self) -> int:
        """Drop the oldest event; return its size in bytes."""
        num_bytes = len(self._events.pop(self._first))
        self._first += 1
        self.num_bytes -= num_bytes
        return num_bytes

    def has_after(self, number: int) -> bool:
        """Return whether all events after this number are still there, or yet to come."""
        return number + 1 >= self._first

    async def after(self, number: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after this number, then new ones as they arrive.

        Raises:
            ApiError: 409: the reader was so slow that events have been dropped.
        """
        following = number + 1
        while True:
            while following < self._next:
                if following < self._first:
                    raise events_gone()
                yield self._events[following]
                following += 1
            if self._has_ended:
                if following == number + 1:
                    yield b":\n\n"  # a comment, so that the stream begins at once
                return
            await self._changed.wait()

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EventLogs:
    """The event logs of all streamed background responses."""

    def __init__(self) -> None:
        self._live: dict[_Key, EventLog] = {}
        self._ended: dict[_Key, EventLog] = {}
        self._num_bytes = 0

    def begin(self, tenant: str, response_id: str) -> EventLog:
        """Return the log of a new response."""
        log = self._live[tenant, response_id] = EventLog()
        return log

    def get(self, tenant: str, response_id: str) -> EventLog | None:
        """Return the log of a response; None: there is none, or it has been dropped."""
        key = tenant, response_id
        return self._live.get(key) or self._ended.get(key)

    def append(self, log: EventLog, events: Iterable[bytes]) -> None:
        """Add events to a log, dropping old ones if necessary."""
        for event in events:
            self._num_bytes += len(event)
            log.append(event)
        while self._num_bytes > MAX_BYTES:
            self._drop_some()

    def end(self, tenant: str, response_id: str) -> None:
        """Mark a response's log as ended; its events stay until others need the room."""
        log = self._live.pop((tenant, response_id))
        log.end()
        self._ended[tenant, response_id] = log

    def remove(self, tenant: str, response_id: str) -> None:
        """Drop the events of an ended response."""
        log = self._ended.pop((tenant, response_id), None)
        if log is not None:
            self._num_bytes -= log.num_bytes

    def _drop_some(self) -> None:
        if self._ended:
            self.remove(*next(iter(self._ended)))
        else:
            self._num_bytes -= next(log for log in self._live.values() if log.num_bytes).drop_first()


def events_gone() -> ApiError:
    """Return the error for events that are not kept."""
    return ApiError(
        409,
        "the response's events are not kept, or no longer; get the response without stream",
        code="events_not_kept",
    )
