"""Requests for the embedding of one short text, to a server of `mini-embed` or another embedder.

    python benchmarks/embedding_requests.py [--model mini-embed] [--rounds 5] [--requests 1000]

One client sends POST /v1/embeddings over 1 and over 16 connections. Printed are requests/s, and the CPU time
of a request in microseconds: in the front, which reads, tokenizes and answers it, and in the engine. Medians
over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from urllib.parse import urlsplit

import psutil
from http_server import requests_per_second

CONNECTIONS = (1, 16)
TEXT = "How do I reset the password of my account?"


def request_of(model: str) -> bytes:
    """Return the HTTP request for the embedding of `TEXT`."""
    body = json.dumps({"model": model, "input": TEXT, "encoding_format": "base64"}).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def cpu_seconds(front: psutil.Process) -> tuple[float, float]:
    """Return the CPU time of a server so far: of its front, and of all its other processes."""
    times = [process.cpu_times() for process in (front, *front.children(recursive=True))]
    of_front, *others = (each.user + each.system for each in times)
    return of_front, sum(others)


def measure(port: int, front: psutil.Process, options: argparse.Namespace) -> None:
    """Drive a server, print a table."""
    request = request_of(options.model)
    asyncio.run(requests_per_second(port, 4, min(options.requests, 200), request))
    print("| connections | requests/s | CPU us/request, front | engine |\n|---|---|---|---|")
    for num_connections in CONNECTIONS:
        measured = []
        for _ in range(options.rounds):
            before = cpu_seconds(front)
            rate = asyncio.run(requests_per_second(port, num_connections, options.requests, request))
            spent = (after - start for after, start in zip(cpu_seconds(front), before, strict=True))
            measured.append((rate, *(1e6 * seconds / options.requests for seconds in spent)))
        columns = (statistics.median(column) for column in zip(*measured, strict=True))
        print(
            f"| {num_connections} | " + " | ".join(f"{median:,.0f}" for median in columns) + " |", flush=True
        )


def main() -> None:
    """Start the server and measure it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini-embed", help="an embedder (default: mini-embed)")
    parser.add_argument("--rounds", type=int, default=5, help="of each (default: 5)")
    parser.add_argument("--requests", type=int, default=1000, help="in each round (default: 1000)")
    options = parser.parse_args()
    command = [sys.executable, "-m", "quire.cli.main", "serve", options.model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            measure(urlsplit(url).port or 0, psutil.Process(process.pid), options)
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
