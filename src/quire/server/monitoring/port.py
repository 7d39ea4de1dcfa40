"""The monitoring port: a few paths, answered by a separate thread even if the event loop is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from typing_extensions import override

from quire.server.http.listening import bound_socket
from quire.server.http.stopping import cancelled_at_end
from quire.server.wire.raw_response import closing_response

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Maximum open connections; the oldest is closed to make room."""

CONNECTION_TIMEOUT = 2.0
"""Maximum lifetime of a connection, in seconds."""

MAX_HEAD_BYTES = 8192
"""Maximum size of a request line with its headers."""

MAX_ACCEPTED = 50
"""Maximum connections accepted per `ACCEPT_INTERVAL`, as they take time from the event loop."""

ACCEPT_INTERVAL = 0.1
"""Seconds."""

SWITCH_INTERVAL = 0.001
"""Seconds after which a thread waiting for the GIL gets it.

An answer takes the GIL about ten times; with Python's default of 5 ms, that would add up to 50 ms.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: status, media type and body."""

    status: int
    media_type: str
    body: bytes


@contextlib.contextmanager
def monitoring_socket(host: str, port: int) -> Iterator[socket.socket | None]:
    """Yield a socket bound to this address, not yet listening; None for port 0.

    Raises:
        ConfigError: the address does not exist, is in use, or is not permitted.
    """
    if not port:
        yield None
        return
    with contextlib.closing(bound_socket(host, port)) as bound:
        yield bound


@contextlib.contextmanager
def monitored(bound: socket.socket, answers: Mapping[str, Callable[[], Answer]]) -> Iterator[None]:
    """Answer GET and HEAD of some paths on a socket, in a separate thread, while the context lasts.

    Each connection gets one answer.

    Args:
        bound: a bound socket that is not listening yet; the caller closes it.
        answers: functions by path; called in the thread, must not block.
    """
    bound.listen(128)
    bound.setblocking(False)
    listener = _Listener(bound, answers)
    thread = threading.Thread(target=listener.run, name="monitoring", daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, SWITCH_INTERVAL))
    thread.start()
    try:
        yield
    finally:
        listener.stop()
        thread.join()
        sys.setswitchinterval(interval)


class _Listener:
    """Accepts connections in an event loop of its own."""

    def __init__(self, bound: socket.socket, answers: Mapping[str, Callable[[], Answer]]) -> None:
        self.answers = answers
        self._bound = bound
        self._open: dict[_Connection, None] = {}  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()

    def run(self) -> None:
        """Serve until `stop`."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    def stop(self) -> None:
        """Make `run` return. Thread-safe."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    def admit(self, connection: _Connection) -> None:
        """Count an open connection, and close the oldest if there are too many."""
        self._open[connection] = None
        if len(self._open) > MAX_CONNECTIONS:
            next(iter(self._open)).abort()

    def forget(self, connection: _Connection) -> None:
        """Stop counting a connection."""
        self._open.pop(connection, None)

    async def _serve(self) -> None:
        async with cancelled_at_end(self._accept()):
            await self._stopped.wait()
        for connection in list(self._open):
            connection.abort()

    async def _accept(self) -> None:
        loop = self._loop
        num_accepted, since = 0, loop.time()
        is_failing = False
        while True:
            now = loop.time()
            if now - since >= ACCEPT_INTERVAL:
                num_accepted, since = 0, now
            elif num_accepted >= MAX_ACCEPTED:
                await asyncio.sleep(since + ACCEPT_INTERVAL - now)
                continue
            num_accepted += 1
            try:
                accepted, _ = await loop.sock_accept(self._bound)
                await loop.connect_accepted_socket(lambda: _Connection(self), accepted)
                is_failing = False
            except OSError as error:  # such as no descriptor left
                if not is_failing:
                    logger.warning("the monitoring port cannot accept a connection: %s", error)
                is_failing = True
                await asyncio.sleep(ACCEPT_INTERVAL)


class _Connection(asyncio.Protocol):
    """Reads the head of one request and answers it."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._timeout: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        self._listener.forget(self)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timeout = asyncio.get_running_loop().call_later(CONNECTION_TIMEOUT, self.abort)
        self._listener.admit(self)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._listener.forget(self)

    @override
    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._head += data
        is_complete = b"\r\n\r\n" in self._head
        if is_complete or len(self._head) > MAX_HEAD_BYTES:
            transport.pause_reading()
            transport.write(self._answer() if is_complete else _refusal(431))
            transport.close()  # after everything is written, or at the timeout

    def _answer(self) -> bytes:
        method, _, rest = self._head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        answer = self._listener.answers.get(path)
        if answer is None:
            return _refusal(404, "this port has " + ", ".join(self._listener.answers))
        if method not in (b"GET", b"HEAD"):
            return _refusal(405, "use GET")
        try:
            return _written(answer(), with_body=method == b"GET")
        except Exception:
            logger.exception("the monitoring port could not answer %s", path)
            return _refusal(500, "see the server's log")


def _refusal(status: int, detail: str = "") -> bytes:
    text = f"{HTTPStatus(status).phrase}: {detail}" if detail else HTTPStatus(status).phrase
    return _written(Answer(status, "text/plain; charset=utf-8", f"{text}\n".encode()))


def _written(answer: Answer, *, with_body: bool = True) -> bytes:
    return closing_response(answer.status, answer.media_type, answer.body, with_body=with_body)
