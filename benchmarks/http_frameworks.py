"""What FastAPI would cost: Quire's server, on Starlette alone, beside the same handler under FastAPI.

Both serve POST /v1/completions through uvicorn, each in a process of its own, with an engine that answers at
once. One client sends prompts of 200 tokens over 1 and over 16 connections, to both by turns. Printed are
requests/s and the server's CPU time in microseconds per request, medians over rounds.

    python benchmarks/http_frameworks.py [--rounds 7] [--requests 1000]
"""

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
from types import SimpleNamespace
from typing import Any

import psutil
import uvloop
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.config import ConnectionConfig, EngineConfig, ServerConfig
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.app import create_app
from quire.server.completions import create_completion
from quire.server.context import ServerContext
from quire.server.http_server import HttpServer
from quire.server.listening import bound_socket
from quire.server.middleware import RequestEnvelope
from quire.server.protocol import CompletionRequest
from quire.status import FinishReason

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
    b"POST /v1/completions HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class InstantEngine:
    """Answers every prompt with one token, at once."""

    config = EngineConfig()
    info = SimpleNamespace(model="fake", max_model_len=4096, vocab_size=1000, dtype="float32")

    async def generate(
        self, prompt: str, params: object, *, request_id: str, **options: object
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the whole answer."""
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


def starlette_app(engine: Any) -> Any:
    """Return Quire's server."""
    return create_app(engine, ServerConfig())


def fastapi_app(engine: Any) -> Any:
    """Return the same handler with its body declared to FastAPI, which parses and checks it."""
    config = ServerConfig()
    app = FastAPI(max_body_size=config.max_body_bytes)

    async def complete(request: Request, body: CompletionRequest) -> Response:
        return await create_completion(request, body)

    app.post("/v1/completions", response_model=None)(complete)
    app.add_middleware(RequestEnvelope)
    app.state.context = ServerContext(engine, config)
    return app


APPS = {"Starlette": starlette_app, "FastAPI": fastapi_app}


def serve(name: str) -> None:
    """Serve one of the applications until this process is killed; print the port first."""
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        uvloop.run(serve_until_killed(HttpServer(APPS[name](InstantEngine()), ConnectionConfig()), bound))


async def serve_until_killed(server: HttpServer, bound: socket.socket) -> None:
    """Serve on a socket; print its port first."""
    async with server.serving(bound):
        print(bound.getsockname()[1], flush=True)
        await asyncio.Event().wait()


async def requests_per_second(port: int, num_connections: int, num_requests: int) -> float:
    """Send all requests, each connection the next one as soon as it has its answer."""
    remaining = iter(range(num_requests))

    async def send_in_turn() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in remaining:
            writer.write(REQUEST)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(head.decode())
            length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(send_in_turn() for _ in range(num_connections)))
    return num_requests / (time.perf_counter() - started)


def cpu_seconds(process: "subprocess.Popen[str]") -> float:
    """Return the CPU time of a process so far."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def measure(rounds: int, num_requests: int) -> None:
    """Start the servers, drive them by turns, print a table."""
    command = [sys.executable, __file__, "--serve"]
    processes = {name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in APPS}
    try:
        ports = {name: int(process.stdout.readline()) for name, process in processes.items()}  # type: ignore[union-attr]
        for port in ports.values():
            asyncio.run(requests_per_second(port, 4, 200))
        print("| connections | | requests/s | CPU us/request |\n|---|---|---|---|")
        for num_connections in CONNECTIONS:
            rows: dict[str, list[tuple[float, float]]] = {name: [] for name in APPS}
            for _ in range(rounds):
                for name, process in processes.items():
                    before = cpu_seconds(process)
                    rate = asyncio.run(requests_per_second(ports[name], num_connections, num_requests))
                    rows[name].append((rate, (cpu_seconds(process) - before) / num_requests * 1e6))
            for name, results in rows.items():
                rate, cpu = (statistics.median(column) for column in zip(*results, strict=True))
                print(f"| {num_connections} | {name} | {rate:,.0f} | {cpu:,.0f} |", flush=True)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def main() -> None:
    """Measure, or be one of the servers that are measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="of each (default: 7)")
    parser.add_argument("--requests", type=int, default=1000, help="in each round (default: 1000)")
    parser.add_argument("--serve", choices=APPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    else:
        measure(options.rounds, options.requests)


if __name__ == "__main__":
    main()
