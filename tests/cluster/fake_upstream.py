"""Engines that are nothing but a socket: they answer as real ones do, or fail at a given point."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.cluster.engines.registry import Engine
    from quire.cluster.prefixes.block_index import EngineBlocks
    from quire.cluster.prefixes.memory import ChunksInFlight
    from quire.cluster.router import Router

TIMEOUT = 1e4  # seconds, of what is to time out
LONG = 1e6
TEXTS = [" one", " two", " three"]
PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 7000, "transfer_id": "ab"}
ANSWER = json.dumps({"id": "cmpl-1", "choices": [{"index": 0, "text": "".join(TEXTS)}]}).encode()
EVENTS = [b'data: {"choices":[{"index":0,"text":%s}]}\n\n' % json.dumps(text).encode() for text in TEXTS] + [
    b"data: [DONE]\n\n"
]

HEAD_OF_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-Kind: stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@dataclasses.dataclass
class Seen:
    """A request that an engine got."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.content)


class FakeEngine:
    """Answers every request as `fault` says; empty: as an engine does."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.error_code: str | None = None  # of an answer that is an error
        self.health: int | None = 200  # status; None: it says nothing
        self.seen: list[Seen] = []
        self.got_one = asyncio.Event()
        self.lost_one = asyncio.Event()  # somebody has left before the answer was complete
        self.may_go_on = asyncio.Event()
        self.on_hang = lambda: None
        self.kv_port = 0  # at which others read its KV; 0: at none
        self.other_kv_ports: dict[str, int] = {}  # of further models, by their names
        self.block_size = 16
        self.models: list[str] = []  # names of what it serves; empty: it does not say
        self.kv_events: dict[str, Any] | None = None  # where its KV events are
        self.waits_for = 0  # port of an engine whose KV never comes
        self.num_sent = 0  # bytes of an endless stream
        self.forgets_connections = False  # as a machine does that died
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            await self._serve_all(reader, writer)
        except asyncio.CancelledError:
            pass  # this engine has been stopped
        finally:
            self._tasks.discard(task)
            writer.transport.abort() if self.fault else writer.close()

    async def _serve_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        has_answered = False
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                seen = await _read_request(reader)
                if self.forgets_connections and has_answered:
                    writer.transport.abort()
                    return
                has_answered = True
                if seen.path == "/health" and self.health is None:
                    await reader.read()
                    return
                if seen.path == "/health":
                    writer.write(_plain(self.health, b"{}"))
                    continue
                if seen.path == "/engine":
                    writer.write(_plain(200, self._description()))
                    continue
                self.seen.append(seen)
                self.got_one.set()
                await self.answer(seen, reader, writer)

    async def answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams = b'"stream": true' in seen.content or b'"stream":true' in seen.content
        if self.fault == "waits":
            await self.may_go_on.wait()
        if self.fault.isdecimal():
            error = {"error": {"message": f"refused by {self.url}", "type": "t", "code": self.error_code}}
            writer.write(_plain(int(self.fault), json.dumps(error).encode()))
            return
        waits_in_vain = self.waits_for and b'"remote_port":%d' % self.waits_for in seen.content
        if not waits_in_vain:
            writer.write(self._beginning(streams, self._body(seen)))
            await writer.drain()
        if self.fault.startswith("hangs") or waits_in_vain:
            asyncio.get_running_loop().call_later(0, self.on_hang)
            await reader.read()  # until the other side leaves
            self.lost_one.set()
        if self.fault == "dies in the body":
            await self.may_go_on.wait()
        if self.fault.startswith(("hangs", "dies")) or waits_in_vain:
            raise ConnectionError
        if self.fault == "pauses":
            await self.may_go_on.wait()
            writer.write(b"".join(map(chunk, EVENTS[1:])) + b"0\r\n\r\n")
        if self.fault == "long stream":
            await self._send_long_stream(writer)

    def _beginning(self, streams: bool, body: bytes) -> bytes:
        """Return what is written at once."""
        plain = _plain(200, body)
        return {
            "": _stream() if streams else plain,
            "waits": _stream() if streams else plain,
            "hangs": b"",
            "dies": b"",
            "garbage": b"\x00\x01 garbage\r\n\r\n",
            "not json": _plain(200, b"<html>"),
            "no params": _plain(200, ANSWER),
            "dies in the head": HEAD_OF_STREAM[:40],
            "dies before the body": HEAD_OF_STREAM if streams else plain[: -len(body)],
            "hangs before the body": HEAD_OF_STREAM if streams else plain[: -len(body)],
            "dies in the body": _first_events(EVENTS[0], EVENTS[1][:9]) if streams else plain[:-5],
            "hangs in the body": _first_events(EVENTS[0]),
            "dies in a long body": _plain(200, b"x" * 3_000_000)[:-5],
            "dies at no agreed end": HEAD_OF_STREAM.replace(b"Transfer-Encoding", b"X-Nothing") + EVENTS[0],
            "pauses": _first_events(EVENTS[0]),
            "long stream": HEAD_OF_STREAM,
        }[self.fault]

    def _description(self) -> bytes:
        described = {
            **self._of_one_engine(self.kv_port, self.models),
            "kv_events": self.kv_events,
            "others": [self._of_one_engine(port, [name]) for name, port in self.other_kv_ports.items()],
        }
        return json.dumps(described).encode()

    def _of_one_engine(self, kv_port: int, models: list[str]) -> dict[str, Any]:
        address = {"host": "10.0.0.1", "port": kv_port} if kv_port else None
        card = {"role": "prefill", "model": "m", "block_size": self.block_size, "max_model_len": 99}
        cards = [{"id": name, "created": 1, "owned_by": self.url, "max_model_len": 99} for name in models]
        return {**card, "kv_transfer": address, "models": cards}

    def _body(self, seen: Seen) -> bytes:
        if b'"do_remote_decode"' in seen.content:
            return json.dumps({**json.loads(ANSWER), "kv_transfer_params": PARAMS}).encode()
        return ANSWER

    async def _send_long_stream(self, writer: asyncio.StreamWriter) -> None:
        event = b"data: " + b"x" * 9990 + b"\n\n"
        for _ in range(4000):
            writer.write(chunk(event))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await writer.drain()
                    self.num_sent += len(event)
                    continue
            self.may_go_on.set()  # nobody reads
            await writer.drain()
        writer.write(b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def running(*engines: FakeEngine) -> AsyncIterator[None]:
    """Run these engines for the duration of the context."""
    try:
        for engine in engines:
            await engine.start()
        yield
    finally:
        for engine in engines:
            await engine.stop()


async def releases_end(router: Router) -> None:
    """Wait until a router has answered all requests, and has told engines which KV will not be read."""
    await router.calls.wait_idle()
    await asyncio.gather(*router._calls.releases._tasks)


async def check_health(router: Router, engine: Engine) -> None:
    """Ask an engine how it is now, as the router does from time to time."""
    await router._health.check(engine)


def watched_urls(router: Router) -> list[str]:
    """Return the URL of each engine that is asked from time to time, once for each that asks."""
    return [engine.url for engine in router._health._tasks]


def digests_of(blocks: EngineBlocks) -> list[bytes]:
    """Return which blocks an engine has by what the router knows, the least recently used first."""
    return list(blocks._digests)


def chunks_in_flight(in_flight: ChunksInFlight) -> int:
    return len(in_flight._counts)


async def _read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    original = dict(line.split(": ", 1) for line in head[1:] if line)
    headers = {name.lower(): value for name, value in original.items()}
    content = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, path, headers, content)


def _plain(status: int, body: bytes) -> bytes:
    return (
        b"HTTP/1.1 %d Reason\r\nContent-Type: application/json\r\nX-Kind: plain\r\n"
        b"Retry-After: 7\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body
    )


def chunk(data: bytes) -> bytes:
    """Return a chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _first_events(*events: bytes) -> bytes:
    return HEAD_OF_STREAM + b"".join(map(chunk, events))


def _stream() -> bytes:
    return _first_events(*EVENTS) + b"0\r\n\r\n"
