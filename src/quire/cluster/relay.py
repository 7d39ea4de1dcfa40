"""Forwarding an engine's answer to the client as it arrives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import Send

from quire.cluster.client_request import ClientRequest
from quire.cluster.engines.upstream import Answer, EngineRequestError
from quire.server.wire.access_log import note_error
from quire.server.wire.errors import SERVER_ERROR, UNAVAILABLE, ApiError

logger = logging.getLogger(__name__)

_MAX_HELD = 1 << 16  # bytes of an incomplete event
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_WITHOUT_BODY = (204, 304)

STOPPING = ApiError(
    503,
    "the router was stopped before the answer was complete",
    kind=UNAVAILABLE,
    code="router_stopped",
)


async def relay(
    request: ClientRequest, answer: Answer, *, on_broken: Callable[[], None], is_stopping: Callable[[], bool]
) -> None:
    """Forward an answer byte for byte; a slow client slows down reading from the engine.

    If the engine breaks off, a stream of events ends with an error event; for any other answer, the client's
    connection is closed.

    Args:
        request: the client's request.
        answer: the engine's answer.
        on_broken: called if the engine breaks off.
        is_stopping: returns whether the router is stopping, which may cancel this.
    """
    send = request.send
    if answer.is_whole:
        await _send_whole(request, answer)
        return
    await _send_start(send, answer.status, answer.headers)
    send_all = _send_events if answer.is_stream else _send_pieces
    failure: ApiError | None = None
    try:
        async with answer.watched():
            await send_all(send, answer)
    except EngineRequestError as error:
        on_broken()
        logger.warning("%s", error)
        failure = ApiError(502, str(error), kind=SERVER_ERROR, code="engine_failed")
    except asyncio.CancelledError:
        if not is_stopping():
            raise
        failure = STOPPING
    if failure is not None:
        note_error(request.scope, failure.reason)
        if not answer.is_stream:
            return  # the server closes the connection, as the answer is incomplete
        await _send_piece(send, b"data: " + failure.body() + b"\n\n")
    await _send_end(request, b"")


async def _send_whole(request: ClientRequest, answer: Answer) -> None:
    headers = answer.headers
    if request.scope["method"] != "HEAD" and answer.status not in _WITHOUT_BODY:
        headers = [*headers, (b"content-length", b"%d" % len(answer.body))]
    await _send_start(request.send, answer.status, headers)
    await _send_end(request, answer.body)


async def _send_pieces(send: Send, answer: Answer) -> None:
    piece = answer.body
    while piece:
        await _send_piece(send, piece)
        piece = await answer.next_piece()


async def _send_events(send: Send, answer: Answer) -> None:
    """Send whole events only, so that an error event can follow."""
    held = b""
    piece = answer.body
    while piece:
        held += piece
        end = _end_of_events(held)
        if end:
            await _send_piece(send, held[:end])
            held = held[end:]
        piece = await answer.next_piece()
    if held:
        await _send_piece(send, held)


async def _send_start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _send_end(request: ClientRequest, piece: bytes) -> None:
    await request.send({"type": "http.response.body", "body": piece, "more_body": False})
    request.is_answered = True


def _end_of_events(data: bytes) -> int:
    """Return where the last whole event ends; the length of `data` if the rest is too long to hold."""
    if data.endswith(_EVENT_ENDS) or len(data) > _MAX_HELD:
        return len(data)
    return max(data.rfind(end) + len(end) if end in data else 0 for end in _EVENT_ENDS)
