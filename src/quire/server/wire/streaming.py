"""Streamed answers, and clients that disconnect early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.wire.access_log import note_error
from quire.server.wire.errors import ApiError, ClientGoneError, as_api_error

T = TypeVar("T")

log = logging.getLogger(__name__)

SERVER_SENT_EVENTS = "text/event-stream"
JSON_LINES = "application/x-ndjson"


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, but cancel it as soon as the client disconnects.

    The request's body must have been read. `work` has ended in any case on return. After it has sent the end
    of an answer (for ASGI, a disconnection, too), it may be cancelled.

    Raises:
        ClientGoneError: the client left first.
    """
    loop = asyncio.get_running_loop()
    watcher = loop.create_task(_wait_for_disconnect(receive))
    is_over = False

    def cancel_work(_: asyncio.Task[None]) -> None:
        if not is_over:
            limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            watcher.add_done_callback(cancel_work)
            try:
                return await work
            finally:
                is_over = True  # the loop may already have queued the callback
    except TimeoutError:
        if not limit.expired():
            raise
        raise ClientGoneError("the client disconnected before its answer was complete") from None
    finally:
        watcher.cancel()


async def event_stream(
    receive: Receive,
    events: AsyncGenerator[bytes, None],
    error_event: Callable[[ApiError], bytes],
    *,
    request_id: str,
    media_type: str = SERVER_SENT_EVENTS,
) -> EventStream:
    """Return the response that streams `events`, once the first one is available.

    Errors before it thus become plain responses with their own status; later ones are sent as `error_event`.

    Raises:
        ClientGoneError: the client disconnected before the first event.
        Exception: any error before the first event.
    """
    first = await unless_disconnected(receive, anext(events))
    return EventStream(first, events, error_event, request_id=request_id, media_type=media_type)


class EventStream(Response):
    """Streams events from a generator, which is closed as soon as the client disconnects.

    An error after the first event can no longer change the status, so it is sent as an event.
    """

    charset = "utf-8"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        error_event: Callable[[ApiError], bytes],
        *,
        request_id: str,
        media_type: str,
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first = first
        self._events = events
        self._error_event = error_event
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client disconnects."""
        try:
            await unless_disconnected(receive, self._send_all(scope, send))
        except (ClientGoneError, OSError):
            note_error(scope, "client_left")
            log.debug("request %s: the client left its stream", self._request_id)
        finally:
            await self._events.aclose()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError:
            raise
        except Exception as error:  # any error is reported to the client
            answer = as_api_error(error, request_id=self._request_id)
            note_error(scope, answer.reason)
            await send({"type": "http.response.body", "body": self._error_event(answer), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
