"""What `quire route` costs: latency added to a streamed token, and requests/s, beside direct access.

An engine that is nothing but a socket streams events that carry the time at which they were written, evenly
spread over each 25 ms or all at once, and answers other requests immediately. One client asks it directly and
through the router, by turns. Engine, router and client are a process each. Printed are medians over rounds.

    python benchmarks/route.py [--rounds 7] [--streams 64] [--connections 32]
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

STEP = 0.025  # seconds between two tokens of a stream
TOKENS = 80
WARM_UP = 10  # tokens of each stream that do not count
PLAIN_SECONDS = 2.0
ANSWER = json.dumps({"id": "cmpl-1", "choices": [{"index": 0, "text": " word" * 16}]}).encode()
EVENT = b'data: {"id":"cmpl-0123456789","object":"text_completion","created":1700000000,"model":"fake",'
EVENT += b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"written":%.7f}\n\n'
PROGRESS = b":[[0,[12345],null,null]]\n\n"  # with which another engine could continue
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Quire-Progress: 1\r\n"
STREAM += b"Transfer-Encoding: chunked\r\n\r\n"


class Engine:
    """Answers every request, and writes a token of every stream in every step.

    Args:
        is_spread: whether the tokens of a step are spread over it.
    """

    def __init__(self, is_spread: bool) -> None:
        self._is_spread = is_spread
        self._streams: dict[asyncio.StreamWriter, int] = {}  # tokens left

    async def serve(self) -> None:
        """Serve until this process is killed; print the port first."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await self._write_tokens()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                body = await read_message(reader)
                if b'"stream"' in body:
                    writer.write(STREAM)
                    self._streams[writer] = TOKENS
                else:
                    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                    writer.write(head % len(ANSWER) + ANSWER)

    async def _write_tokens(self) -> None:
        due = time.monotonic()
        while True:
            due += STEP
            writers = list(self._streams)
            for index, writer in enumerate(writers):
                part = (index / len(writers) - 1) * STEP if self._is_spread else -STEP
                await asyncio.sleep(max(0.0, due + part - time.monotonic()))
                self._write_token(writer)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _write_token(self, writer: asyncio.StreamWriter) -> None:
        event = EVENT % time.monotonic() + PROGRESS
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        self._streams[writer] -= 1
        if not self._streams[writer]:
            writer.write(b"0\r\n\r\n")
            del self._streams[writer]


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next HTTP message that has a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, has_length, rest = head.partition(b"content-length: ")
    return await reader.readexactly(int(rest.partition(b"\r\n")[0]) if has_length else 0)


def request(**fields: object) -> bytes:
    """Return a request for a completion."""
    body = json.dumps({"model": "fake", "prompt": "word " * 200, "max_tokens": TOKENS, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def latencies(port: int, num_streams: int) -> list[float]:
    """Return the seconds from the writing of each token to its arrival here."""

    async def stream() -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(stream=True))
        found: list[float] = []
        while len(found) < TOKENS:
            line = await reader.readline()
            if b'"written":' in line:
                found.append(time.monotonic() - float(line.rpartition(b":")[2].rstrip(b"}\n")))
            elif not line:
                raise SystemExit("a stream broke off")
        writer.close()
        return found[WARM_UP:]

    return [one for found in await asyncio.gather(*(stream() for _ in range(num_streams))) for one in found]


async def requests_per_second(port: int, num_connections: int) -> float:
    """Send requests for some seconds, each connection the next one as soon as it has its answer."""
    until = time.monotonic() + PLAIN_SECONDS
    count = 0

    async def send_in_turn() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < until:
            writer.write(request())
            assert await read_message(reader) == ANSWER
            count += 1
        writer.close()

    await asyncio.gather(*(send_in_turn() for _ in range(num_connections)))
    return count / PLAIN_SECONDS


@contextlib.contextmanager
def started(*command: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a program while the block lasts; yields it and its first line."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.wait()


def cpu_seconds(process: "subprocess.Popen[str]") -> float:
    """Return the CPU time of a process so far."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def milliseconds(seconds: list[float]) -> str:
    """Return mean, median and 99th percentile."""
    ordered = sorted(seconds)
    shown = [statistics.mean(ordered), ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]]
    return " / ".join(f"{1000 * one:.2f}" for one in shown)


def measure(rounds: int, num_streams: int, num_connections: int) -> None:
    """Drive both by turns, and print a table."""
    for kind in ("spread", "burst"):
        with (
            started(__file__, "--engine", kind) as (_, engine_port),
            started(
                "-m", "quire.cli.main", "route", "--port", "0",
                "--engine", f"http://127.0.0.1:{engine_port.strip()}",
            ) as (router, ready),
        ):  # fmt: skip
            ports = {"direct": int(engine_port), "router": int(ready.split()[1].rpartition(":")[2])}
            tokens: dict[str, list[list[float]]] = {name: [] for name in ports}
            plain: dict[str, list[float]] = {name: [] for name in ports}
            cpu_of_tokens = cpu_of_requests = 0.0
            for _ in range(rounds):
                for name, port in ports.items():
                    start = cpu_seconds(router)
                    tokens[name].append(asyncio.run(latencies(port, num_streams)))
                    middle = cpu_seconds(router)
                    plain[name].append(asyncio.run(requests_per_second(port, num_connections)))
                    if name == "router":
                        cpu_of_tokens += middle - start
                        cpu_of_requests += cpu_seconds(router) - middle
        added = [
            statistics.mean(through) - statistics.mean(direct)
            for direct, through in zip(tokens["direct"], tokens["router"], strict=True)
        ]
        ratios = [through / direct for direct, through in zip(plain["direct"], plain["router"], strict=True)]
        print(f"{kind}: ms to the client, mean / median / 99 %")
        for name in ports:
            print(f"  {name}: {milliseconds([one for found in tokens[name] for one in found])}")
        print(
            f"  added, median of {rounds} rounds: {1000 * statistics.median(added):.2f} ms "
            f"({1000 * min(added):.2f} to {1000 * max(added):.2f}); "
            f"CPU {1e6 * cpu_of_tokens / (rounds * num_streams * TOKENS):.0f} us per token"
        )
        print(
            f"  requests/s: direct {statistics.median(plain['direct']):.0f}, "
            f"router {statistics.median(plain['router']):.0f}, "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); "
            f"CPU {1e6 * cpu_of_requests / (sum(plain['router']) * PLAIN_SECONDS):.0f} us per request",
            flush=True,
        )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--engine", choices=("spread", "burst"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        asyncio.run(Engine(options.engine == "spread").serve())
    else:
        measure(options.rounds, options.streams, options.connections)


if __name__ == "__main__":
    main()
