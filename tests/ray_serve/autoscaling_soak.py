"""Engines on Ray that follow a step of load from one to four and back: see docs/many-machines.md.

Clients ask without pause for half the time, then one of them goes on alone. Every answer must be whole:
neither the engines that start nor those that end may cost a request.

    python tests/ray_serve/autoscaling_soak.py [--seconds 180] [--clients 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

URL = "http://127.0.0.1:8000"
START_LIMIT = 180.0  # seconds
LOG_CHARS = 4000
MAX_TOKENS = 256
MAX_REPLICAS = 4
CONFIG = {
    "applications": [
        {
            "name": "quire",
            "import_path": "quire.ray:app",
            "args": {
                "model": "mini", "num_replicas": 1, "max_replicas": MAX_REPLICAS, "replica_cpus": 0.2,
                "num_threads": 1, "cache_size": 0.25, "max_num_seqs": 8, "health_interval": 0.5,
            },
            "deployments": [
                {
                    "name": "Engine",
                    "autoscaling_config": {
                        "min_replicas": 1, "max_replicas": MAX_REPLICAS,
                        "upscale_delay_s": 2, "downscale_delay_s": 10, "metrics_interval_s": 1,
                        "policy": {
                            "policy_function": "quire.ray.autoscaling:LoadPolicy",
                            "policy_kwargs": {"target_wait": 0.5, "target_queued_tokens": 512},
                        },
                    },
                }
            ],
        }
    ]
}  # fmt: skip


class Load:
    """Clients that ask without pause.

    Attributes:
        outcomes: number of requests by what became of them.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    async def ask_until(self, session: aiohttp.ClientSession, end: float, number: int) -> None:
        """Ask one request after another until a time of the monotonic clock."""
        while time.monotonic() < end:
            prompt = f"Count from {self.outcomes.total()} for client {number}: " + "one two three " * 40
            body = {"model": "mini", "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            try:
                async with session.post(f"{URL}/v1/completions", json=body) as response:
                    self.outcomes[outcome_of(response.status, await response.text())] += 1
            except aiohttp.ClientError as error:
                self.outcomes[f"{type(error).__name__}: {error}"] += 1


def outcome_of(status: int, text: str) -> str:
    """Return "right", or what is wrong with an answer."""
    if status == 200 and json.loads(text)["usage"]["completion_tokens"] == MAX_TOKENS:
        return "right"
    return f"{status}: {text[:200]}"


async def num_engines(session: aiohttp.ClientSession) -> int:
    """Return how many engines the ingress takes for up."""
    async with session.get(f"{URL}/route/engines") as response:
        engines = (await response.json())["data"] if response.status == 200 else []
    return sum(engine["state"] == "up" for engine in engines)


async def wait_until_up(session: aiohttp.ClientSession, server: subprocess.Popen[bytes]) -> None:
    """Wait until the application answers."""
    deadline = time.monotonic() + START_LIMIT
    while True:
        try:
            if await num_engines(session):
                return
        except aiohttp.ClientError:
            pass  # it does not listen yet
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"no engine is up after {START_LIMIT:g} s, or Ray has ended")
        await asyncio.sleep(0.5)


async def step(seconds: float, num_clients: int, server: subprocess.Popen[bytes]) -> None:
    """Let the load rise and fall, and print the numbers of engines and what became of requests."""
    load = Load()
    numbers: list[int] = []
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await wait_until_up(session, server)
        begun = time.monotonic()
        high, end = begun + seconds / 2, begun + seconds
        clients = [
            asyncio.create_task(load.ask_until(session, high if number else end, number))
            for number in range(num_clients)
        ]
        while time.monotonic() < end:
            number = await num_engines(session)
            if not numbers or numbers[-1] != number:
                numbers.append(number)
                print(f"{time.monotonic() - begun:.0f} s: {number} engines", flush=True)
            await asyncio.sleep(0.5)
        await asyncio.gather(*clients)
    print(f"engines: {' -> '.join(map(str, numbers))}")
    for outcome, count in load.outcomes.most_common():
        print(f"{count} x {outcome}")
    if set(load.outcomes) != {"right"}:
        sys.exit("requests were lost")
    if max(numbers) < MAX_REPLICAS or numbers[-1] != 1:
        sys.exit(f"there were at most {max(numbers)} engines, and {numbers[-1]} at the end")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.json"  # JSON is YAML
        config.write_text(json.dumps(CONFIG))
        command = [sys.executable, "-P", "-m", "ray.serve.scripts", "run", str(config)]
        with tempfile.TemporaryFile("w+") as log:
            environment = {**os.environ, "RAY_ADDRESS": "local"}
            server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            try:
                asyncio.run(step(options.seconds, options.clients, server))
            finally:
                log.seek(0)
                print(log.read()[-LOG_CHARS:] if server.poll() is not None else "", end="")
                server.terminate()
                server.wait(START_LIMIT)


if __name__ == "__main__":
    main()
