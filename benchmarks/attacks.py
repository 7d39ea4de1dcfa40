"""What a hostile request does to the others: steady streams and /health, before and during each attack.

Starts `quire serve`, opens streams of one token at a time, and sends each attack while they run. For each
it prints the time between two tokens of the streams (p50 and p99 in milliseconds) before and during the
attack, the same of small calls if `--clients` send any one after another, the slowest answer of /health,
how much more memory the server's front took, and what the attacker was answered; also, how much of the
machine's time its host gave to others meanwhile. The attacks are those of attacking_requests.py and
attacking_connections.py, each of which is run by a process of its own.

    python benchmarks/attacks.py [--attack NAME ...] [--model DIR] [--streams 16] [--python PATH] [--json]

The template bomb meets a chat template with nested loops over the messages. With
grammars, the time is shown that a small one takes which is sent after all others.

With `--monitoring`, the slowest answer of the server's monitoring port follows that of /health. With
`--python`, the interpreter of another checkout's environment serves: run both commits in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
from attacking_connections import CONNECTION_ATTACKS
from attacking_requests import REQUEST_ATTACKS, completion

QUIET = 4.0  # seconds of the streams before each attack
LEAST = 3.0  # seconds for which an attack is watched at least
HEALTH_INTERVAL = 0.02


def _write_looping_model(directory: Path) -> None:
    """Write mini with a chat template that loops over the messages in three loops within each other."""
    directory.mkdir()
    for file in (Path(__file__).parent.parent / "src" / "quire" / "mini").glob("*.*"):
        shutil.copy(file, directory)
    loops = "{% for a in messages %}" * 3 + "{% endfor %}" * 3
    (directory / "chat_template.jinja").write_text(loops + "{{ messages[0].content }}")


def _free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as bound:
        return int(bound.getsockname()[1])


class Server:
    """`quire serve` in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.port = 0
        self.monitoring_port = _free_port() if options.monitoring else 0

    @contextlib.asynccontextmanager
    async def running(self, model: str, max_descriptors: int | None) -> AsyncIterator[Server]:
        """Serve until the context ends, with at most this many descriptors."""

        def limit() -> None:
            if max_descriptors is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max_descriptors, max_descriptors))

        options = self._options
        command = [options.python, "-m", "quire.cli.main", "serve", model, "--port", "0"]
        command += ["--served-model-name", "mini", "--max-num-queued-reqs", "8192", *options.serve_options]
        if self.monitoring_port:
            command += ["--monitoring-port", str(self.monitoring_port)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, preexec_fn=limit
        )
        try:
            assert process.stdout is not None
            first_line = (await process.stdout.readline()).decode()
            self.port = int(first_line.split("://", 1)[1].split()[0].rsplit(":", 1)[1])
            self.front = psutil.Process(process.pid)
            yield self
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()

    @contextlib.asynccontextmanager
    async def sent(
        self, method: str, path: str, body: bytes = b"", *, port: int = 0
    ) -> AsyncIterator[asyncio.StreamReader]:
        """Send a request; the answer is the reader's. The connection closes with the context."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            yield reader
        finally:
            writer.close()


async def steady_stream(server: Server, gaps: list[tuple[float, float]]) -> None:
    """Stream completions one after another; add (time, seconds since the last token) of each token."""
    while True:
        body = completion(prompt="Once upon a time", max_tokens=1500, stream=True)
        async with server.sent("POST", "/v1/completions", body) as reader:
            started, last = time.perf_counter(), None
            try:
                while piece := await reader.read(65536):
                    if b"data:" not in piece:
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append((now, now - last))
                    last = now
            except asyncio.CancelledError:  # it may wait since the attack began
                gaps.append((time.perf_counter(), time.perf_counter() - (last or started)))
                raise


async def small_client(server: Server, calls: list[tuple[float, float]]) -> None:
    """Ask for completions of eight tokens one after another; add (time, seconds until its answer) of each."""
    body = completion(prompt="Once upon a time", max_tokens=8)
    while True:
        started = time.perf_counter()
        try:
            async with server.sent("POST", "/v1/completions", body) as reader:
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
        finally:  # it may wait since the attack began
            calls.append((time.perf_counter(), time.perf_counter() - started))


async def watch_health(server: Server, port: int, answers: list[tuple[float, float]]) -> None:
    """Ask /health of a port again and again; add (time, seconds until it was answered with 200) each time."""
    while True:
        started = time.perf_counter()
        answer = b""
        try:
            while not answer.startswith(b"HTTP/1.1 200 "):
                with contextlib.suppress(ConnectionError):
                    async with server.sent("GET", "/health", port=port) as reader:
                        answer = await reader.read()
        finally:  # it may wait since the attack began
            answers.append((time.perf_counter(), time.perf_counter() - started))
        await asyncio.sleep(HEALTH_INTERVAL)


async def watch_memory(server: Server, peaks: list[int]) -> None:
    """Keep the front's largest resident size in `peaks[0]`."""
    while True:
        peaks[0] = max(peaks[0], server.front.memory_info().rss)
        await asyncio.sleep(0.02)


class Attacker:
    """An attack in a process of its own, which waits until it is told to begin."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def prepared(cls, name: str, port: int) -> Attacker:
        """Return the attacker once it has made all that it will send."""
        script = Path(__file__).with_name(
            "attacking_connections.py" if name in CONNECTION_ATTACKS else "attacking_requests.py"
        )
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, script, name, str(port), stdin=pipe, stdout=pipe
        )
        assert process.stdout is not None
        await process.stdout.readline()
        return cls(process)

    async def run(self) -> tuple[Counter[str], float]:
        """Attack; return how often the attacker saw which status, and how long its small request took."""
        out, _ = await self._process.communicate(b"\n")
        outcome = json.loads(out)
        return Counter(outcome["seen"]), math.nan if outcome["last_seconds"] is None else outcome[
            "last_seconds"
        ]


def _milliseconds(
    samples: list[tuple[float, float]], since: float, until: float
) -> tuple[float, float, float]:
    """Return p50, p99 and maximum of the samples that ended in this time, in milliseconds."""
    chosen = [seconds * 1000 for moment, seconds in samples if since <= moment <= until] or [float("nan")] * 2
    return statistics.median(chosen), statistics.quantiles(chosen, n=100)[98], max(chosen)


def _stolen_seconds() -> float:
    """Return for how long this machine's cores were ready to run, and its host ran something else."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


async def measure(server: Server, name: str, num_streams: int, num_clients: int) -> dict[str, object]:
    """Return what one attack does."""
    gaps: list[tuple[float, float]] = []
    calls: list[tuple[float, float]] = []
    health: list[tuple[float, float]] = []
    monitoring: list[tuple[float, float]] = []
    peaks = [0]
    watchers = [asyncio.create_task(steady_stream(server, gaps)) for _ in range(num_streams)]
    watchers += [asyncio.create_task(small_client(server, calls)) for _ in range(num_clients)]
    watchers.append(asyncio.create_task(watch_health(server, server.port, health)))
    if server.monitoring_port:
        watchers.append(asyncio.create_task(watch_health(server, server.monitoring_port, monitoring)))
    watchers.append(asyncio.create_task(watch_memory(server, peaks)))
    attacker = await Attacker.prepared(name, server.port)
    await asyncio.sleep(1)
    started = time.perf_counter()
    await asyncio.sleep(QUIET)
    attacked, before_memory, stolen = time.perf_counter(), peaks[0], _stolen_seconds()
    seen, last_seconds = await attacker.run()
    answered = time.perf_counter()
    await asyncio.sleep(max(0.5, LEAST - (answered - attacked)))
    for watcher in watchers:
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    ended = time.perf_counter()
    stolen = (_stolen_seconds() - stolen) / ((ended - attacked) * (psutil.cpu_count() or 1))
    before, during = _milliseconds(gaps, started, attacked), _milliseconds(gaps, attacked, ended)
    return {
        "attack": name,
        "p50_before": before[0],
        "p99_before": before[1],
        "p50": during[0],
        "p99": during[1],
        "worst": during[2],
        "calls_before": _milliseconds(calls, started, attacked)[:2],
        "calls": _milliseconds(calls, attacked, answered),
        "health": _milliseconds(health, attacked, ended)[2],
        "monitoring": _milliseconds(monitoring, attacked, ended)[2],
        "health_before": _milliseconds(health, started, attacked)[2],
        "stolen": stolen * 100,
        "memory": (peaks[0] - before_memory) / 2**20,
        "last_seconds": last_seconds,
        "seconds": answered - attacked,
        "status": ", ".join(f"{count} x {status}" for status, count in seen.items()),
    }


async def main() -> None:
    """Run the attacks that were asked for and print a line for each."""
    names = [*REQUEST_ATTACKS, *CONNECTION_ATTACKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--attack", action="append", choices=names, help="default: all")
    parser.add_argument("--model", default="mini", help="a name, or a directory named mini")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--clients", type=int, default=0, help="that ask for small completions beside them")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--monitoring", action="store_true", help="also ask the monitoring port")
    parser.add_argument("--json", action="store_true", help="one object for each attack")
    parser.add_argument("serve_options", nargs="*", help="of quire serve, after --")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    if not options.json:
        print("attack | p50, p99 before | p50, p99, worst during | small calls before | during | ", end="")
        print("worst /health, monitoring port (ms) | % stolen | MiB | s, of the small request | status")
    with tempfile.TemporaryDirectory() as directory:
        looping = Path(directory) / "mini"
        _write_looping_model(looping)
        for name in options.attack or names:
            model = str(looping) if name == "template bomb" else options.model
            async with Server(options).running(model, _max_descriptors(name)) as server:
                show(await measure(server, name, options.streams, options.clients), as_json=options.json)


def _max_descriptors(name: str) -> int | None:
    return CONNECTION_ATTACKS[name].max_descriptors if name in CONNECTION_ATTACKS else None


def show(row: dict[str, object], *, as_json: bool) -> None:
    """Print the line of one attack."""
    line = (
        "{attack} | {p50_before:.1f}, {p99_before:.1f} | {p50:.1f}, {p99:.1f}, {worst:.0f} | "
        "{calls_before[0]:.1f}, {calls_before[1]:.1f} | {calls[0]:.1f}, {calls[1]:.1f}, {calls[2]:.0f} | "
        "{health:.0f}, {monitoring:.0f} | {stolen:.0f} | "
        "{memory:.0f} | {seconds:.1f}, {last_seconds:.1f} | {status}"
    )
    print(json.dumps(row) if as_json else line.format(**row), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
