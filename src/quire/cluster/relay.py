"""Forwarding answers of engines to a client as they arrive; an engine may go on with another's stream."""

from __future__ import annotations

import dataclasses
import logging

import msgspec

from quire.cluster.client_request import ClientRequest
from quire.cluster.engines.upstream import Answer, EngineRequest, EngineRequestError
from quire.server.calls.stream_progress import COMMENT, END, LINE, PROGRESS
from quire.server.wire.access_log import note_error
from quire.server.wire.bodies import CONTINUATION, MAX_PROGRESS
from quire.server.wire.errors import UNAVAILABLE, ApiError

logger = logging.getLogger(__name__)

_MAX_HELD = 1 << 16  # bytes of an incomplete event
_MAX_PIECE = 1 << 23  # bytes of an incomplete piece of a stream with progress
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_WITHOUT_BODY = (204, 304)
_PROGRESS = PROGRESS.lower().encode()
_UNAVAILABLE_CODES = ("aborted", "engine_asleep", "engine_dead")
_OVERLOADED = "overloaded_error"  # Anthropic's word for `UNAVAILABLE`

STOPPING = ApiError(
    503,
    "the router was stopped before the answer was complete",
    kind=UNAVAILABLE,
    code="router_stopped",
)


class Relay:
    """Sends one client the answer to its request, of which several engines may send parts.

    Args:
        request: the client's request.

    Attributes:
        has_begun: whether the client has been sent any of it.
    """

    def __init__(self, request: ClientRequest) -> None:
        self.has_begun = False
        self._request = request
        self._is_stream = False
        self._progress: _Progress | None = None  # if the answer can be continued

    @property
    def is_continuable(self) -> bool:
        """Whether another engine can go on with what has begun."""
        return self._progress is not None and not self._progress.is_too_long

    @property
    def num_events(self) -> int:
        """How many events the client has been sent of a stream that can be continued."""
        return 0 if self._progress is None else self._progress.num_events

    def asked(self, asked: EngineRequest, body: bytes) -> EngineRequest:
        """Return the request for the next engine: for the whole answer, or for the rest of it.

        Args:
            asked: the request, without its body.
            body: its body.
        """
        if not (self.has_begun and self._progress is not None):
            return dataclasses.replace(asked, body=body)
        so_far = bytes(self._progress.lines)
        headers = asked.headers_for(f"part{self._progress.num_engines}")
        headers[CONTINUATION] = str(len(so_far))
        return dataclasses.replace(asked, body=body + so_far, headers=headers)

    def can_forward(self, answer: Answer) -> bool:
        """Whether an answer can be forwarded, also behind what has been sent."""
        return not self.has_begun or (answer.status == 200 and answer.has_progress)

    async def forward(self, answer: Answer) -> None:
        """Forward an answer as it is; a slow client slows down reading from the engine.

        Raises:
            EngineRequestError: the engine broke off, or said that it cannot go on.
        """
        if answer.is_whole and not answer.has_progress:
            await self._send_whole(answer)
            return
        async with answer.watched():
            if answer.has_progress:
                await self._send_with_progress(answer)
            elif answer.is_stream:
                await self._send_events(answer)
            else:
                await self._send_pieces(answer)
        await self._send_end(b"")

    async def fail(self, failure: ApiError) -> None:
        """End what has begun: a stream with an error event, any other answer by closing the connection."""
        note_error(self._request.scope, failure.reason)
        if self._is_stream:
            await self._send_piece(b"data: " + failure.body() + b"\n\n")
            await self._send_end(b"")

    async def _send_whole(self, answer: Answer) -> None:
        headers = answer.headers
        if self._request.scope["method"] != "HEAD" and answer.status not in _WITHOUT_BODY:
            headers = [*headers, (b"content-length", b"%d" % len(answer.body))]
        await self._send_start(answer, headers)
        await self._send_end(answer.body)

    async def _send_pieces(self, answer: Answer) -> None:
        await self._send_start(answer, answer.headers)
        piece = answer.body
        while piece:
            await self._send_piece(piece)
            piece = await answer.next_piece()

    async def _send_events(self, answer: Answer) -> None:
        """Send whole events only, so that an error event can follow."""
        await self._send_start(answer, answer.headers)
        held = b""
        piece = answer.body
        while piece:
            held += piece
            end = _end_of_events(held)
            if end:
                await self._send_piece(held[:end])
                held = held[end:]
            piece = await answer.next_piece()
        if held:
            await self._send_piece(held)

    async def _send_with_progress(self, answer: Answer) -> None:
        """Send whole pieces only, without their progress, and none that the client has."""
        if not self.has_begun:
            self._progress = _Progress()
        progress = self._progress
        assert progress is not None
        reader = progress.reader()
        data = answer.body
        while data:
            if events := reader.events(data):
                await self._send_events_of(answer, events)
            if reader.num_held > _MAX_PIECE:
                raise EngineRequestError(answer.engine, f"sent a piece of more than {_MAX_PIECE} bytes")
            data = await answer.next_piece()
        if reader.held:
            if reason := _unavailable(reader.held):
                raise EngineRequestError(answer.engine, f"cannot go on: {reason}")
            await self._send_events_of(answer, reader.held)

    async def _send_events_of(self, answer: Answer, events: bytes) -> None:
        if not self.has_begun:
            await self._send_start(answer, [one for one in answer.headers if one[0].lower() != _PROGRESS])
        await self._send_piece(events)

    async def _send_start(self, answer: Answer, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun, self._is_stream = True, answer.is_stream
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await self._request.send(start)

    async def _send_piece(self, piece: bytes) -> None:
        await self._request.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _send_end(self, piece: bytes) -> None:
        await self._request.send({"type": "http.response.body", "body": piece, "more_body": False})
        self._request.is_answered = True


class _Progress:
    """How far a stream has come that another engine can continue.

    Attributes:
        lines: what it has said about its progress, joined by line feeds.
        num_lines: number of these.
        num_events: events that have been passed on.
        num_engines: how many engines have worked on it.
        is_too_long: whether there was more progress than another engine reads.
    """

    def __init__(self) -> None:
        self.lines = bytearray()
        self.num_lines = 0
        self.num_events = 0
        self.num_engines = 0
        self.is_too_long = False

    def reader(self) -> _PieceReader:
        """Return the reader for the answer of the next engine."""
        self.num_engines += 1
        return _PieceReader(self)

    def note(self, lines: list[bytes], num_events: int) -> None:
        """Note what is new in a piece, and how many events of it are passed on."""
        self.num_events += num_events
        if self.is_too_long:
            return
        self.num_lines += len(lines)
        for line in lines:
            self.lines += b"\n" + line if self.lines else line
        if len(self.lines) > MAX_PROGRESS:
            self.is_too_long = True
            self.lines.clear()


class _PieceReader:
    """Divides the stream of one engine into pieces, and skips what the engine repeats.

    Args:
        progress: how far the stream has come; it is kept up to date.
    """

    def __init__(self, progress: _Progress) -> None:
        self._progress = progress
        self._num_repeated_events = progress.num_events
        self._num_repeated_lines = progress.num_lines
        self._tail = b""  # an incomplete event
        self._events: list[bytes] = []  # of an incomplete piece
        self._num_held = 0

    @property
    def num_held(self) -> int:
        """Bytes of the incomplete piece."""
        return self._num_held + len(self._tail)

    @property
    def held(self) -> bytes:
        """The incomplete piece."""
        return b"".join([*self._events, self._tail])

    def events(self, data: bytes) -> bytes:
        """Return the new events of the pieces that `data` completes."""
        *parts, self._tail = (self._tail + data).split(END)
        complete: list[bytes] = []
        for part in parts:
            if part.startswith(COMMENT):
                complete += self._events
                self._progress.note(self._new_lines(part), len(self._events))
                self._events, self._num_held = [], 0
            elif self._num_repeated_events:
                self._num_repeated_events -= 1
            else:
                self._events.append(part + END)
                self._num_held += len(part)
        return b"".join(complete)

    def _new_lines(self, comment: bytes) -> list[bytes]:
        """Return the lines of a piece's comment that have not been repeated."""
        lines = [line for line in comment[len(COMMENT) :].split(LINE) if line]
        num_repeated = min(len(lines), self._num_repeated_lines)
        self._num_repeated_lines -= num_repeated
        return lines[num_repeated:]


class _Failure(msgspec.Struct, frozen=True):
    type: str = ""
    message: str = ""


class _FailureEvent(msgspec.Struct):
    error: _Failure = _Failure()
    code: str = ""  # of an event of /v1/responses
    message: str = ""


def _unavailable(event: bytes) -> str:
    """Return why an engine cannot go on, if it says so in an event; else an empty text."""
    _, _, data = event.partition(END)[0].partition(b"data: ")
    try:
        told = msgspec.json.decode(data, type=_FailureEvent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if told.code in _UNAVAILABLE_CODES:
        return told.message
    return told.error.message if told.error.type in (UNAVAILABLE, _OVERLOADED) else ""


def _end_of_events(data: bytes) -> int:
    """Return where the last whole event ends; the length of `data` if the rest is too long to hold."""
    if data.endswith(_EVENT_ENDS) or len(data) > _MAX_HELD:
        return len(data)
    return max(data.rfind(end) + len(end) if end in data else 0 for end in _EVENT_ENDS)
