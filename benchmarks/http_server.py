"""The HTTP server of several versions of Quire, side by side, with an engine that answers at once.

    python benchmarks/http_server.py [SRC ...] [--rounds 7] [--requests 1000]

SRC is the directory `src` of a checkout, by default this one's. Each version serves POST /v1/completions in a
process of its own. One client sends prompts of 200 tokens over 1 and over 16 connections, to all by turns.
Printed are requests/s and the server's CPU time in microseconds per request, medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
from source_finder import SourceFinder

if TYPE_CHECKING:
    from quire.request_output import RequestOutput

PROMPT_TOKENS = 200
CONNECTIONS = (1, 16)
BODY = json.dumps(
    {
        "model": "fake",
        "prompt": " ".join(["word"] * PROMPT_TOKENS),
        "max_tokens": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 3,
    }
).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class InstantEngine:
    """Answers every prompt with one token, at once."""

    info = SimpleNamespace(
        block_size=16,
        model="fake",
        max_model_len=4096,
        vocab_size=1000,
        dtype="float32",
        reads_priority=False,
        pooling=None,
        labels=(),
        labels_tokens=False,
    )
    model_path = Path("fake")
    tokenizer = SimpleNamespace(chat_template_source=None)

    def __init__(self) -> None:
        from quire.config import EngineConfig

        self.config = EngineConfig()

    async def generate(
        self, prompt: str, params: object, *, request_id: str, **options: object
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the whole answer."""
        from quire.request_output import CompletionOutput, RequestOutput
        from quire.status import FinishReason

        await asyncio.sleep(0)
        completion = CompletionOutput(
            index=0, text="x", token_ids=[5], logprobs=None, finish_reason=FinishReason.LENGTH
        )
        yield RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=[1] * PROMPT_TOKENS,
            outputs=[completion],
            finished=True,
        )


def serve(source: str) -> None:
    """Serve with the version at `source` until this process is killed; print the port first."""
    sys.meta_path.insert(0, SourceFinder(source))
    import uvloop

    from quire.server.http.listening import bound_socket

    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        uvloop.run(serve_until_killed(bound))


async def serve_until_killed(bound: socket.socket) -> None:
    """Serve on a socket; print its port first."""
    from quire.config import ConnectionConfig, ServerConfig
    from quire.server.app import create_app
    from quire.server.http.server import HttpServer

    engine: Any = InstantEngine()
    server = HttpServer(create_app(engine, ServerConfig()), ConnectionConfig())
    async with server.serving(bound):
        print(bound.getsockname()[1], flush=True)
        await asyncio.Event().wait()


async def requests_per_second(
    port: int, num_connections: int, num_requests: int, request: bytes = REQUEST
) -> float:
    """Send all requests, each connection the next one as soon as it has its answer."""
    remaining = iter(range(num_requests))

    async def send_in_turn() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in remaining:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(head.decode())
            length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(send_in_turn() for _ in range(num_connections)))
    return num_requests / (time.perf_counter() - started)


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """Return the CPU time of a process so far."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def measure(sources: list[str], rounds: int, num_requests: int) -> None:
    """Start the servers, drive them by turns, print a table."""
    processes = [
        subprocess.Popen([sys.executable, __file__, "--serve", source], stdout=subprocess.PIPE, text=True)
        for source in sources
    ]
    try:
        servers = [(process, _port(process)) for process in processes]
        for _, port in servers:
            asyncio.run(requests_per_second(port, 4, min(num_requests, 200)))
        print("| connections | | requests/s | CPU us/request |\n|---|---|---|---|")
        for num_connections in CONNECTIONS:
            measured: list[list[tuple[float, float]]] = [[] for _ in servers]
            for _ in range(rounds):
                for results, (process, port) in zip(measured, servers, strict=True):
                    before = cpu_seconds(process)
                    rate = asyncio.run(requests_per_second(port, num_connections, num_requests))
                    results.append((rate, (cpu_seconds(process) - before) / num_requests * 1e6))
            for source, results in zip(sources, measured, strict=True):
                rate, cpu = (statistics.median(column) for column in zip(*results, strict=True))
                print(f"| {num_connections} | {source} | {rate:,.0f} | {cpu:,.0f} |", flush=True)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a server has ended with {process.wait()}")
    return int(line)


def main() -> None:
    """Measure, or be one of the servers that are measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = str(Path(__file__).resolve().parents[1] / "src")
    parser.add_argument("sources", nargs="*", metavar="SRC", help="of each version (default: this one)")
    parser.add_argument("--rounds", type=int, default=7, help="of each (default: 7)")
    parser.add_argument("--requests", type=int, default=1000, help="in each round (default: 1000)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    else:
        measure(options.sources or [own], options.rounds, options.requests)


if __name__ == "__main__":
    main()
