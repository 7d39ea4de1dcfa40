"""HTTP/1.1 on one connection, with limits on its client.

A request is parsed after the one before it has been answered, a bounded number of bytes per turn of the event
loop, for a bounded number of connections. So a connection with thousands of pipelined requests, or a body of
millions of chunks, takes no more memory than another and waits its turn, and thousands that send at the same
moment only delay each other. uvicorn parses everything that has arrived at once, limits neither the size of
headers nor any time, and waits forever for a client that does not read.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.config import ConnectionConfig
from quire.server.http import request_head
from quire.server.http.connections import Connection, Connections, Deadline, FairReads
from quire.server.wire.access_log import AccessLog, AccessRecord, note_error, record_of
from quire.server.wire.errors import TIMEOUT, ApiError

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

log = logging.getLogger(__name__)

BYTES_PER_TURN = 8_192
MAX_HELD = 65_536  # received, unparsed bytes above which reading pauses
_LINGER = 1.0  # seconds for a refused client to read the answer before the connection closes


class _Part(enum.Enum):
    """Parser state: what the client sends next."""

    HEAD = enum.auto()
    SIZED_BODY = enum.auto()
    CHUNKED_BODY = enum.auto()
    NOTHING = enum.auto()  # received data is dropped


class _AnswerTransport:
    """The transport that uvicorn's request cycle sees; it is closed when an answer is complete.

    Args:
        transport: the connection's transport.
        close: closes the connection once the client has sent its request.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        config: uvicorn's configuration.
        server_state: uvicorn's state.
        limits: limits of the connection.
        connections: all open connections, where this one replaces `handshake` when it is made.
        handshake: stands for this connection in `connections` until then.
        turns: schedules parsing across all connections.
        access_log: logs requests that do not reach the application; None: none.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        limits: ConnectionConfig,
        connections: Connections,
        handshake: Connection,
        *,
        turns: FairReads,
        access_log: AccessLog | None = None,
    ) -> None:
        super().__init__(config, server_state, {})
        self._limits = limits
        self._open_connections = connections
        self._handshake = handshake
        self._turns = turns
        self._access_log = access_log
        self._next = _Part.HEAD
        self._received = bytearray()  # not yet parsed
        self._searched = 0  # leading bytes without the end of a header
        self._body_left = 0  # remaining bytes of a body of known size
        self._barren = 0  # bytes of a chunked body since the last data
        self._body_ends = 0.0  # deadline of a body, by the loop's clock
        self._is_last = False  # the connection closes after this request
        self._is_idle = False  # answered, and no byte of another request received
        self._app_to_start: ASGI3Application | None = None  # once its request's body is complete
        self._refusal: ApiError | None = None  # set in the parser's callbacks
        self._has_turn = False  # another turn is scheduled
        self._receiving = Deadline(self.loop, self._client_is_slow)
        self._sending = Deadline(self.loop, self._client_does_not_read)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._answered = cast("asyncio.Transport", _AnswerTransport(transport, self._close_after_body))
        self._open_connections.replace(self._handshake, self)
        self._receiving.set(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request, if there is one."""
        self._next = _Part.NOTHING
        self._app_to_start = None
        self._received.clear()
        self._receiving.close()
        self._sending.close()
        self._open_connections.remove(self)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        if self._next is _Part.NOTHING:
            return
        if self._next is not _Part.HEAD:
            left = self._body_ends - self.loop.time()
            self._receiving.set(min(self._limits.body_idle_timeout, left))
        elif self._is_idle:
            self._is_idle = False
            self._receiving.set(self._limits.header_timeout)
            self._open_connections.waits(self)
        self._received += data
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self._turns.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Parse received bytes for one turn, at most to the end of a request."""
        self._has_turn = False
        left = BYTES_PER_TURN
        while left > 0 and self._received and (piece := self._next_piece(left)):
            left -= len(piece)
            self._feed(piece)
        if left <= 0 and self._received:
            self._wait_for_turn()
        self._regulate()

    def _regulate(self) -> None:
        """Resume or pause reading, by the bytes held here and by the request."""
        if self.transport is None or self.transport.is_closing():
            return
        if len(self._received) > MAX_HELD:
            self.flow.pause_reading()
        elif self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _next_piece(self, most: int) -> bytes:
        """Remove and return the next bytes to parse: a header, or a part of a body; empty: none.

        No piece goes beyond the end of a request.

        Args:
            most: maximum bytes of a body.
        """
        match self._next:
            case _Part.HEAD:
                return b"" if self._is_answering else self._complete_head()
            case _Part.SIZED_BODY:
                return self._taken(min(most, self._body_left))
            case _Part.CHUNKED_BODY:
                return self._taken(self._chunked_length(most))
        return b""

    def _taken(self, length: int) -> bytes:
        piece = bytes(self._received[:length])
        del self._received[:length]
        return piece

    def _complete_head(self) -> bytes:
        """Remove and return a complete header, unless it is refused."""
        while self._received.startswith(b"\r\n"):  # some clients send a line break after a body
            del self._received[:2]
        if not self._received:
            return b""
        refusal = request_head.beginning_refusal(self._received) if self._searched == 0 else None
        at = self._received.find(request_head.END, self._searched)
        length = len(self._received) if at < 0 else at + len(request_head.END)
        refusal = refusal or request_head.size_refusal(length, self._limits.max_header_bytes)
        if refusal is None and at < 0:
            self._searched = max(0, length - len(request_head.END) + 1)
            return b""
        self._searched = 0
        head = self._taken(length)
        refusal = refusal or request_head.head_refusal(head, self._limits.max_headers)
        if refusal:
            self._refuse(refusal)
            return b""
        return request_head.without_upgrade(head)

    def _chunked_length(self, most: int) -> int:
        """Return how many of the received bytes of a chunked body to parse.

        Its last bytes are `request_head.END`, so no piece goes beyond them, and none ends within them.
        """
        most = max(most, 2 * len(request_head.END))
        at = self._received.find(request_head.END, 0, most)
        if at >= 0:
            return at + len(request_head.END)
        length = min(most, len(self._received))
        for kept in (3, 2, 1):
            if self._received.endswith(request_head.END[:kept], 0, length):
                return length - kept
        return length

    def _feed(self, piece: bytes) -> None:
        """Parse a piece, and refuse the request if it is invalid."""
        was_waiting = self._next
        self._barren += len(piece)  # reset by on_body
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._refusal = request_head.not_http("no other protocol is served")
        except httptools.HttpParserError as error:
            self._refusal = self._refusal or request_head.not_http(str(error))
        if was_waiting is _Part.CHUNKED_BODY and self._barren > self._limits.max_header_bytes:
            self._refusal = request_head.not_http(f"{self._barren} bytes of chunks hold no data")
        if self._refusal:
            self._refuse(self._refusal)
            return
        if self.cycle.body:
            self.cycle.message_event.set()
        if self._next is _Part.HEAD or len(self.cycle.body) > HIGH_WATER_LIMIT:
            self._start()
        if self._next is _Part.HEAD:
            self._request_complete()
        elif was_waiting is _Part.HEAD:
            self._body_ends = self.loop.time() + self._limits.body_timeout
            self._receiving.set(min(self._limits.body_idle_timeout, self._limits.body_timeout))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header field; those after a body are dropped."""
        if self._next is _Part.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless it is refused."""
        self._refusal = request_head.framing_refusal(self.parser.get_http_version(), self.headers)
        if self._refusal:
            return
        fields = dict(self.headers)
        self._barren = 0
        self._body_left = int(fields.get(b"content-length", b"0"))
        super().on_headers_complete()
        self.cycle.transport = self._answered
        is_chunked = b"transfer-encoding" in fields
        self._next = _Part.CHUNKED_BODY if is_chunked else _Part.SIZED_BODY

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start the request once its body is complete, or larger than what is buffered.

        A slow client thus only takes memory for the few bytes that it has sent.
        """
        self._app_to_start = app
        if cycle.waiting_for_100_continue or self._body_left > HIGH_WATER_LIMIT:
            self._start()

    def _start(self) -> None:
        if self._app_to_start is not None:
            super()._start_asgi_task(self.cycle, self._app_to_start)
            self._app_to_start = None

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, which may be one byte."""
        self._barren = 0
        self._body_left -= len(body)
        if not self.cycle.response_complete:
            self.cycle.body += body

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        if self._refusal is None:
            self._next = _Part.HEAD
            super().on_message_complete()

    def _close_after_body(self) -> None:
        """Close the connection after the client has sent its body, as it may only read the answer then."""
        if self._is_answering or self._next in (_Part.HEAD, _Part.NOTHING):
            self.transport.close()
            return
        self._is_last = True
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _request_complete(self) -> None:
        if self._is_last:
            self._next = _Part.NOTHING
            self._sending.set(self._limits.write_timeout)
            self.transport.close()
        elif self._is_answering:
            self._receiving.clear()
            self._open_connections.serves(self)
        else:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        """Wait for the next request, or parse it in the next turn."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._next = _Part.NOTHING
            self._sending.set(self._limits.write_timeout)
            return
        self.cycle.body.clear()  # no longer needed
        if self._next is _Part.HEAD:
            self._wait_for_request()
        else:
            self._body_ends = min(self._body_ends, self.loop.time() + self._limits.body_idle_timeout)
        if self._received:
            self._wait_for_turn()
        self.flow.resume_reading()

    def _wait_for_request(self) -> None:
        self._is_idle = not self._received
        self._receiving.set(self._limits.keep_alive_timeout if self._is_idle else self._limits.header_timeout)
        self._open_connections.waits(self)

    def shutdown(self) -> None:
        """Close the connection after the answer to a started request."""
        if self._app_to_start is not None:
            self.transport.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        self._sending.set(self._limits.write_timeout)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Continue sending."""
        if not self.transport.is_closing():
            self._sending.clear()
        super().resume_writing()

    def _client_is_slow(self) -> None:
        """Close a connection whose client takes too long to send a request."""
        if self._next is _Part.NOTHING or (self._next is _Part.HEAD and not self._received):
            self.transport.abort()
            return
        if self._next is not _Part.HEAD and not self._is_answering:
            limit = self._limits.body_idle_timeout
            log.info("%s: closed, rest of an answered body took %g s (body_idle_timeout)", self.client, limit)
            self.transport.abort()
            return
        self._refuse(ApiError(408, self._slowness(), kind=TIMEOUT, code="request_timeout"))

    def _slowness(self) -> str:
        """Return which limit a slow client has exceeded."""
        limits = self._limits
        if self._next is _Part.HEAD:
            return f"the header was not complete within {limits.header_timeout:g} s (header_timeout)"
        return (
            f"no part of the body arrived for {limits.body_idle_timeout:g} s (body_idle_timeout), "
            f"or not all of it within {limits.body_timeout:g} s (body_timeout)"
        )

    def _client_does_not_read(self) -> None:
        limit = self._limits.write_timeout
        log.info("%s: closed, because its client has not read for %g s", self.client, limit)
        self.transport.abort()

    def _refuse(self, refusal: ApiError) -> None:
        """Refuse a request, unless its answer has begun, and close the connection."""
        log.info("%s: refused with status %d: %s", self.client, refusal.status, refusal.message)
        is_in_body = self._next is not _Part.HEAD
        self._note(refusal, is_in_body=is_in_body)
        self._next = _Part.NOTHING
        self._app_to_start = None
        self._received.clear()
        if is_in_body and self.cycle.response_started:
            self.transport.abort()
            return
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._sending.set(self._limits.write_timeout)
        self._receiving.set(_LINGER)
        self._open_connections.waits(self)
        self.transport.write(refusal.closing_response())
        if self.transport.can_write_eof():
            self.transport.write_eof()  # and drop received data until the client has read the answer
        else:
            self.transport.close()

    def _note(self, refusal: ApiError, *, is_in_body: bool) -> None:
        """Log a refused request, unless the application already has a record of it."""
        if is_in_body and self._app_to_start is None:
            note_error(self.cycle.scope, refusal.reason)
        elif self._access_log is not None:
            if is_in_body:
                record = record_of(self.cycle.scope)
            else:
                record = AccessRecord(client=self.client[0] if self.client else "unix", method="-", path="-")
            record.status, record.error = refusal.status, refusal.reason
            self._access_log.write(record)
