"""Requests to engines: buffering of their answers, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from quire.cluster.engines.registry import Engine
from quire.config import RouterConfig
from quire.errors import QuireError
from quire.front.text.tokenized_prompt import HEADER as PROMPT
from quire.server.calls.stream_progress import PROGRESS
from quire.server.wire.answers import EngineDescription

MAX_WHOLE_ANSWER = 1 << 20
"""Maximum size of an answer that is read whole first, so that the request can be retried elsewhere."""

_READ_BUFFER = 1 << 16  # bytes; aiohttp pauses at twice that while the client is slow
_KEEP_ALIVE = 2  # seconds; a machine that died takes longer to come back, and then knows none of them
_OF_ONE_CONNECTION = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_LOST = "answers nothing any more"
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ValueError)

Headers = CIMultiDict[str]

REQUEST_ID = "X-Request-Id"
_MAX_REQUEST_ID = 128  # characters that engines accept


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request to an engine.

    Args:
        method, path, headers: parts of the request; the path may have a query.
        body: its body; or the pieces of one, which arrive while the request is sent.
        timeout: seconds until the first byte of a stream, or the end of any other answer.
    """

    method: str
    path: str
    headers: Headers
    body: bytes | AsyncIterator[bytes]
    timeout: float

    def headers_for(self, suffix: str) -> Headers:
        """Return the headers with a suffix to the request id, as engines refuse an id in use."""
        headers = self.headers.copy()
        kept = _MAX_REQUEST_ID - len(suffix) - 1
        headers[REQUEST_ID] = f"{headers[REQUEST_ID][:kept]}-{suffix}"
        return headers

    def with_prompt(self, tokenized: bytes) -> EngineRequest:
        """Return the request with its prompt as a `TokenizedPrompt` behind its body."""
        assert isinstance(self.body, bytes)
        headers = self.headers.copy()
        headers[PROMPT] = str(len(tokenized))
        return dataclasses.replace(self, headers=headers, body=self.body + tokenized)


class EngineRequestError(QuireError):
    """An engine did not answer, or not completely.

    Args:
        engine: the engine.
        reason: what happened.
        timed_out: whether it was a timeout.
        was_reached: whether the engine may have begun to serve the request.
    """

    def __init__(
        self, engine: Engine, reason: str, *, timed_out: bool = False, was_reached: bool = True
    ) -> None:
        super().__init__(f"the engine {engine.url} {reason}")
        self.engine = engine
        self.timed_out = timed_out
        self.was_reached = was_reached


class Answer:
    """An engine's answer: at least its first byte, or all of it if it is short and not a stream.

    Args:
        engine: the engine.
        response: its response.
        idle_timeout: seconds to wait for each further piece.
    """

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse, idle_timeout: float) -> None:
        self.status = response.status
        self.headers = [(name, value) for name, value in response.raw_headers if _is_passed_on(name)]
        self.engine = engine
        self.is_stream = response.content_type == "text/event-stream"
        self.has_progress = self.is_stream and PROGRESS in response.headers
        self.is_whole = False
        self.body = b""  # so far
        self._response = response
        self._idle_timeout = idle_timeout
        self._is_waiting = False  # for the next piece
        self._has_moved = True  # since the timer last fired
        self._moved_at = math.inf  # on the event loop's clock
        self._timer: asyncio.TimerHandle | None = None

    async def next_piece(self) -> bytes:
        """Return the next piece of the body; empty at its end. See `watched`.

        Raises:
            EngineRequestError: the engine broke off.
        """
        self._is_waiting = True
        try:
            return await self._response.content.readany()
        except _FAILURES as error:
            raise _failure(self.engine, error, "") from error
        finally:
            self._is_waiting = False
            self._has_moved = True
            self._moved_at = asyncio.get_running_loop().time()

    async def read_beginning(self) -> None:
        """Read as much as needed before answering the client."""
        while not self.is_whole and len(self.body) < (1 if self.is_stream else MAX_WHOLE_ANSWER):
            piece = await self.next_piece()
            self.body += piece
            self.is_whole = not piece

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Within this context, a piece may take between once and twice the idle timeout.

        One timer watches all pieces; a timer for each would cost more than passing the piece on.

        Raises:
            EngineRequestError: the engine was silent for too long, or is lost.
        """

        def give_up(since: float) -> None:
            if self._is_waiting and self._moved_at < since:
                limit.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as limit:
                self._expire_if_silent(limit)
                try:
                    with self.engine.calling_on_loss(give_up):
                        yield
                finally:
                    if self._timer is not None:
                        self._timer.cancel()
        except TimeoutError as error:
            if self.engine.is_lost:
                raise EngineRequestError(self.engine, _LOST) from error
            reason = f"sent nothing for {self._idle_timeout:g} s"
            raise EngineRequestError(self.engine, reason, timed_out=True) from error

    def _expire_if_silent(self, limit: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        if self._is_waiting and not self._has_moved:
            limit.reschedule(loop.time())
            return
        self._has_moved = not self._is_waiting
        self._timer = loop.call_later(self._idle_timeout, self._expire_if_silent, limit)


class Upstream:
    """Connections to all engines.

    Args:
        config: configuration of the router.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_READ_BUFFER,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    @contextlib.asynccontextmanager
    async def answer(self, engine: Engine, asked: EngineRequest) -> AsyncIterator[Answer]:
        """Send a request to an engine; yields the answer after `Answer.read_beginning`.

        Leaving the context closes the connection unless the answer has been read completely.

        Args:
            engine: where to send it.
            asked: the request.

        Raises:
            EngineRequestError: the engine did not answer.
        """
        url = URL(engine.url + asked.path, encoded=True)
        response: aiohttp.ClientResponse | None = None

        def give_up(since: float) -> None:
            if begun_at < since:
                limit.reschedule(asyncio.get_running_loop().time())

        begun_at = asyncio.get_running_loop().time()
        try:
            try:
                async with asyncio.timeout(asked.timeout) as limit:
                    with engine.calling_on_loss(give_up):
                        response = await self._session.request(
                            asked.method,
                            url,
                            headers=_with_key(asked.headers, engine.key) if engine.key else asked.headers,
                            data=asked.body or None,
                            allow_redirects=False,
                        )
                        if not _is_delimited(response):  # its end would look like a failure
                            raise EngineRequestError(engine, "does not say where its answer ends")
                        answer = Answer(engine, response, self._config.idle_timeout)
                        await answer.read_beginning()
            except _FAILURES as error:
                if isinstance(error, TimeoutError) and engine.is_lost:
                    raise EngineRequestError(engine, _LOST) from error
                raise _failure(engine, error, f"did not answer within {asked.timeout:g} s") from error
            yield answer
        finally:
            if response is not None:
                response.close()

    async def check_health(self, engine: Engine) -> str | None:
        """Return why an engine is unusable; None if it is healthy.

        Raises:
            EngineRequestError: it did not answer.
        """
        status, body = await self._get(engine, "/health")
        return None if status == 200 else f"/health answered {status}: {body[:200].decode(errors='replace')}"

    async def description(self, engine: Engine) -> EngineDescription | None:
        """Return how an engine describes itself; None if it does not."""
        try:
            status, body = await self._get(engine, "/engine")
            return msgspec.json.decode(body, type=EngineDescription) if status == 200 else None
        except (EngineRequestError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None

    async def _get(self, engine: Engine, path: str) -> tuple[int, bytes]:
        key = self._config.engine_api_key
        headers = Headers({"Authorization": f"Bearer {key}"} if key else {})
        asked = EngineRequest(
            method="GET", path=path, headers=headers, body=b"", timeout=self._config.connect_timeout
        )
        async with self.answer(engine, asked) as answer:
            return answer.status, answer.body


def is_end_to_end(name: bytes) -> bool:
    """Return whether a header is end-to-end rather than hop-by-hop."""
    return name.lower() not in _OF_ONE_CONNECTION


def _with_key(headers: Headers, key: str) -> Headers:
    headers = headers.copy()
    headers["Authorization"] = f"Bearer {key}"
    headers.popall("X-Api-Key", None)
    return headers


def _is_passed_on(name: bytes) -> bool:
    return is_end_to_end(name) and name.lower() != b"date"  # each server writes its own


def _is_delimited(response: aiohttp.ClientResponse) -> bool:
    is_chunked = response.headers.get("Transfer-Encoding", "").lower().endswith("chunked")
    has_no_body = response.method == "HEAD" or response.status in (204, 304)
    return is_chunked or has_no_body or "Content-Length" in response.headers


def _failure(engine: Engine, error: Exception, on_timeout: str) -> EngineRequestError:
    """Describe an engine's failure in a sentence."""
    match error:
        case aiohttp.ClientConnectorError():
            return EngineRequestError(
                engine, f"cannot be reached: {error.strerror or error}", was_reached=False
            )
        case aiohttp.ConnectionTimeoutError():
            return EngineRequestError(
                engine, "cannot be reached: connecting timed out", timed_out=True, was_reached=False
            )
        case TimeoutError():
            return EngineRequestError(engine, on_timeout, timed_out=True)
        case aiohttp.ServerDisconnectedError():
            return EngineRequestError(engine, "closed the connection without an answer")
        case aiohttp.ClientPayloadError():
            return EngineRequestError(engine, "broke off in the middle of its answer")
    return EngineRequestError(engine, f"gave no valid answer: {error or type(error).__name__}")
