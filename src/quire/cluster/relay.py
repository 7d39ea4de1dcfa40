"""Passing an engine's answer on to the client as it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

from quire.cluster.access_logging import ERROR_REASON
from quire.cluster.upstream import Answer, EngineRequestError
from quire.server.errors import SERVER_ERROR, UNAVAILABLE, ApiError

logger = logging.getLogger(__name__)

_MAX_HELD = 1 << 16  # bytes of an event that is not complete yet
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")

STOPPING = ApiError(
    503,
    "the router was stopped before the answer was complete",
    kind=UNAVAILABLE,
    code="router_stopped",
)


async def relay(
    request: web.Request, answer: Answer, *, on_broken: Callable[[], None], is_stopping: Callable[[], bool]
) -> web.StreamResponse:
    """Send an answer to the client, byte for byte; a client that is slow slows the engine's connection down.

    If the engine breaks off, a stream of events ends with an event that says so. Any other answer has a
    length, or a framing, that it then does not have: the client's connection is closed.

    Args:
        request: of the client.
        answer: of the engine.
        on_broken: called if the engine breaks off.
        is_stopping: whether the router is being stopped, which is why this may be cancelled.
    """
    if answer.is_whole:
        return web.Response(body=answer.body, status=answer.status, headers=answer.headers)
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    await response.prepare(request)
    send_all = _send_events if answer.is_stream else _send_pieces
    try:
        async with answer.watched():
            await send_all(response, answer)
    except EngineRequestError as error:
        on_broken()
        response[ERROR_REASON] = "engine_failed"
        logger.warning("%s", error)
        if not answer.is_stream:
            return _cut_off(request, response)
        await response.write(_error_event(ApiError(502, str(error), kind=SERVER_ERROR, code="engine_failed")))
    except asyncio.CancelledError:
        if not is_stopping():
            raise
        response[ERROR_REASON] = STOPPING.reason
        if not answer.is_stream:
            return _cut_off(request, response)
        await response.write(_error_event(STOPPING))
    await response.write_eof()
    return response


async def _send_pieces(response: web.StreamResponse, answer: Answer) -> None:
    piece = answer.body
    while piece:
        await response.write(piece)
        piece = await answer.next_piece()


async def _send_events(response: web.StreamResponse, answer: Answer) -> None:
    """Send whole events only, so that an event about a failure is one of its own."""
    held = b""
    piece = answer.body
    while piece:
        held += piece
        end = _end_of_events(held)
        if end:
            await response.write(held[:end])
            held = held[end:]
        piece = await answer.next_piece()
    if held:
        await response.write(held)


def _end_of_events(data: bytes) -> int:
    """Return where the last whole event ends; all of `data` if that would be too much to hold back."""
    if data.endswith(_EVENT_ENDS) or len(data) > _MAX_HELD:
        return len(data)
    return max(data.rfind(end) + len(end) if end in data else 0 for end in _EVENT_ENDS)


def _error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


def _cut_off(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return response
