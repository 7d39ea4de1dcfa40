"""A server under mixed traffic and faults, for as long as one likes: `make soak-server`.

Clients ask without pause for what they know the answer of, and also disconnect, read slowly, and send what is
refused. Meanwhile engines are killed and stopped, and a standby takes the place of each. Every answer must be
that of an undisturbed run, or an error that names its cause; in the end the server must hold what it held at
the start, and its memory must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

import private_shared_memory
from subprocesses import started

NUM_CLIENTS = 16
WATCHDOG_TIMEOUT = 3.0
START_TIME = 120.0
ANSWER_TIME = 300.0  # several engines may be stopped while they start
IDLE_TIME = 40.0
LONGEST_PEACE = 20.0  # seconds between two faults
SAMPLE_INTERVAL = 2.0
MEMORY_SLOPE = 32 * 2**20  # bytes an hour that the front may grow by at the most
MEMORY_NOISE = 16 * 2**20  # bytes that it may grow by in however short a run
KEPT_LOG = Path("soak-server.log")  # where the server's log is kept if the soak fails
QUARANTINED = "engines have died while they had this request"

WORDS = ("red", "green", "blue", "small", "large", "old", "new", "one", "two", "seven", "tea", "sun", "key")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAMPLED = {"temperature": 0.9, "seed": 5, "ignore_eos": True}
GREEDY = {"temperature": 0, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def prompt_of(num_words: int, seed: int) -> str:
    """Return some words."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {"prompt": prompt_of(20, 1), "max_tokens": 60, **GREEDY}),
    "sampled": (TEXT, {"prompt": prompt_of(40, 2), "max_tokens": 40, "user": "b", **SAMPLED}),
    "several": (TEXT, {"prompt": prompt_of(30, 3), "max_tokens": 25, "n": 3, "best_of": 3, **SAMPLED}),
    "logprobs": (TEXT, {"prompt": prompt_of(10, 4), "max_tokens": 30, "logprobs": 3, **GREEDY}),
    "stop string": (TEXT, {"prompt": prompt_of(15, 5), "max_tokens": 50, "stop": ["e", "zz"], **GREEDY}),
    "beams": (TEXT, {"prompt": prompt_of(12, 6), "max_tokens": 12, "beam_width": 3}),
    "regex": (
        TEXT,
        {"prompt": "A:", "max_tokens": 30, "structured_outputs": {"regex": "[a-f ]{10,20}"}, "seed": 3},
    ),
    "schema": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a number"}],
            "max_tokens": 30,
            "seed": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    "chat": (
        CHAT,
        {"messages": [{"role": "user", "content": prompt_of(9, 7)}], "max_tokens": 40, **SAMPLED},
    ),
    "two prompts": (TEXT, {"prompt": [prompt_of(5, 8), prompt_of(6, 9)], "max_tokens": 20, **GREEDY}),
    "long prompt": (TEXT, {"prompt": prompt_of(400, 10), "max_tokens": 10, "priority": 1, **GREEDY}),
    "penalties": (
        TEXT,
        {"prompt": prompt_of(8, 11), "max_tokens": 40, "repetition_penalty": 1.3, "priority": -1, **SAMPLED},
    ),
}
STREAMABLE = [name for name, (_, body) in REQUESTS.items() if "beam_width" not in body]
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no prompt": (TEXT, {"max_tokens": 3}),
    "wrong type": (TEXT, {"prompt": "a", "max_tokens": "many"}),
    "too long": (TEXT, {"prompt": "word " * 100_000, "max_tokens": 3}),
    "bad regex": (TEXT, {"prompt": "a", "structured_outputs": {"regex": "(["}}),
    "unknown field": (TEXT, {"prompt": "a", "temperatur": 0}),
    "no messages": (CHAT, {"messages": []}),
}
ACTIONS = ("whole", "whole", "stream", "stream", "disconnect", "give up", "slow", "refused")

Answer = list[tuple[Any, ...]]


class ViolationError(Exception):
    """What must never happen has happened."""


class Soak:
    """The clients of a server, and who strikes it.

    Args:
        url: of the server.
        front: its process.
        rng: chooses what happens.
    """

    def __init__(self, url: str, front: psutil.Process, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.memory: list[tuple[float, int]] = []  # (time, bytes) of the front
        self.engine_memory: list[int] = []
        self._front = front
        self._rng = rng
        self._is_over = False
        self._expected: dict[str, Answer] = {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=ANSWER_TIME, limits=limits)

    async def run(self, seconds: float) -> None:
        """Learn the answers, let everything happen for some time, and check what is left."""
        for name in REQUESTS:
            self._expected[name] = await self._ask(name, streamed=False)
        for name in STREAMABLE:
            self._compare(name, await self._ask(name, streamed=True))
        for name in REFUSED:
            await self._be_refused(name)
        while len(engines_of(self._front)) < 2:  # a standby starts some time later
            await asyncio.sleep(0.1)
        await asyncio.sleep(SAMPLE_INTERVAL)
        held = held_by(self._front)
        tasks = [asyncio.create_task(self._be_client(number)) for number in range(NUM_CLIENTS)]
        others = [asyncio.create_task(self._strike_often()), asyncio.create_task(self._sample())]
        await asyncio.wait([*tasks, *others], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        self._is_over = True
        for task in (*tasks, *others):
            await task
        await self._check_what_is_left(held)
        await self._http.aclose()

    # -- clients -------------------------------------------------------------------------------------------

    async def _be_client(self, number: int) -> None:
        rng = random.Random(number)
        while not self._is_over:
            action = rng.choice(ACTIONS)
            name = rng.choice(list(REQUESTS) if action in ("whole", "give up") else STREAMABLE)
            match action:
                case "whole" | "stream" | "slow":
                    pause = 0.02 if action == "slow" else 0.0
                    answer = await self._ask(name, streamed=action != "whole", pause=pause)
                    self._compare(name, answer)
                case "disconnect":
                    await self._leave(name, num_lines=rng.randint(1, 20))
                case "give up":
                    await self._give_up(name, after=rng.uniform(0, 0.5))
                case _:
                    await self._be_refused(rng.choice(list(REFUSED)))

    def _compare(self, name: str, answer: Answer) -> None:
        if answer == self._expected[name]:
            self.counts["right"] += 1
        elif answer and answer[0][0] == "error" and QUARANTINED in answer[0][1]:
            self.counts["quarantined"] += 1
        else:
            raise ViolationError(f"{name}: {answer!r:.600}, expected {self._expected[name]!r:.600}")

    async def _ask(self, name: str, *, streamed: bool, pause: float = 0.0) -> Answer:
        path, body = REQUESTS[name]
        body = {"model": "mini", "stream": streamed} | body
        if not streamed:
            response = await self._http.post(path, json=body)
            return answer_of([response.json()])
        parts = []
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                return answer_of([json.loads(await response.aread())])
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line[6:]))
                if pause:
                    await asyncio.sleep(pause)
        return answer_of(parts)

    async def _leave(self, name: str, num_lines: int) -> None:
        """Ask for a stream, and disconnect after some lines of it."""
        path, body = REQUESTS[name]
        async with self._http.stream("POST", path, json={"model": "mini", "stream": True} | body) as response:
            lines = response.aiter_lines()
            for _ in range(num_lines):
                if await anext(lines, None) is None:
                    break
        self.counts["left"] += 1

    async def _give_up(self, name: str, after: float) -> None:
        path, body = REQUESTS[name]
        try:
            await asyncio.wait_for(self._http.post(path, json={"model": "mini"} | body), after)
        except TimeoutError:
            self.counts["given up"] += 1

    async def _be_refused(self, name: str) -> None:
        path, body = REFUSED[name]
        response = await self._http.post(path, json={"model": "mini"} | body)
        is_lost = response.status_code == 500 and QUARANTINED in response.text
        if not is_lost and not (400 <= response.status_code < 500 and response.json()["error"]["message"]):
            raise ViolationError(f"{name}: status {response.status_code}, {response.text:.300}")
        self.counts["refused"] += 1

    # -- faults and figures --------------------------------------------------------------------------------

    async def _strike_often(self) -> None:
        while not self._is_over:
            await self._sleep(self._rng.uniform(1, LONGEST_PEACE))
            engines = engines_of(self._front)
            if not engines or self._is_over:
                continue
            number = self._rng.choice((signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP))
            with contextlib.suppress(psutil.NoSuchProcess):
                engines[0].send_signal(number)
                self.faults[number.name] += 1

    async def _sample(self) -> None:
        while not self._is_over:
            self.memory.append((time.monotonic(), self._front.memory_info().rss))
            with contextlib.suppress(psutil.NoSuchProcess):
                self.engine_memory += [engine.memory_info().rss for engine in engines_of(self._front)[:1]]
            await self._sleep(SAMPLE_INTERVAL)

    async def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._is_over:
            await asyncio.sleep(0.1)

    async def _check_what_is_left(self, held: dict[str, Any]) -> None:
        deadline = time.monotonic() + IDLE_TIME
        while time.monotonic() < deadline:
            busy = await self._busy()
            await asyncio.sleep(0.5)  # the connections of the questions close
            if not busy and held_by(self._front) == held:
                return
        raise ViolationError(f"still there: {busy}, {held_by(self._front)}; at the start: {held}")

    async def _busy(self) -> dict[str, float]:
        """Return what of the server's figures is not that of one that does nothing."""
        if (await self._http.get("/health")).status_code != 200:
            return {"health": 1.0}
        text = (await self._http.get("/metrics")).text
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        figures = {key: float(value) for key, value in rows}
        blocks = figures["quire_kv_blocks"] - figures["quire_kv_blocks_free"]
        running, waiting = figures["quire_requests_running"], figures["quire_requests_waiting"]
        return {
            key: value
            for key, value in {"blocks": blocks, "running": running, "waiting": waiting}.items()
            if value
        }

    def slope(self) -> float:
        """Return by how many bytes a second the front has grown in the second half."""
        later = self.memory[len(self.memory) // 2 :]
        return statistics.linear_regression(*zip(*later, strict=True)).slope


def answer_of(parts: list[dict[str, Any]]) -> Answer:
    """Return what an answer says, whether it came in one part or in many."""
    if not parts:
        return [("error", "an empty answer")]
    if "error" in parts[-1]:
        return [("error", parts[-1]["error"]["message"])]
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        index = choice["index"]
        message = choice.get("message") or choice.get("delta") or {}
        texts[index] = texts.get(index, "") + (choice.get("text") or message.get("content") or "")
        ends[index] = choice["finish_reason"] or ends.get(index, "")
        if choice.get("logprobs"):
            logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
    return [(index, texts[index], ends[index], logprobs.get(index)) for index in sorted(texts)]


def engines_of(front: psutil.Process) -> list[psutil.Process]:
    """Return the engine processes of a server, oldest first: its engine, and the standby."""
    engines = []
    for child in front.children():
        try:
            if "quire.engine.process.main" in child.cmdline():
                engines.append(child)
        except psutil.NoSuchProcess:
            continue
    return sorted(engines, key=psutil.Process.create_time)


def held_by(front: psutil.Process) -> dict[str, Any]:
    """Return what must be the same in the end: descriptors, threads, processes, and files others see."""
    commands = [child.cmdline() for child in front.children(recursive=True)]
    modules = Counter(command[command.index("-m") + 1] for command in commands)
    descriptors = descriptors_of(front)
    # There are as many as conversations have come at once, up to some; each has a socket.
    descriptors["socket"] -= modules["quire.models.text.template_process"]
    return {
        "descriptors": descriptors,
        "threads": front.num_threads(),
        "processes": sorted(modules.keys() - {"quire.grammar.trial_process"}),  # started when needed
        "files": sorted(os.listdir("/dev/shm")) + sorted(os.listdir(tempfile.gettempdir())),
    }


def descriptors_of(process: psutil.Process) -> dict[str, int]:
    """Return how many descriptors of each kind a process has: sockets, pipes, anonymous ones and files."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            kinds[os.readlink(link).partition(":[")[0]] += 1
    return dict(sorted(kinds.items()))


def served_url(server: subprocess.Popen[bytes], log: Path) -> str:
    """Return the URL that a server says it listens on, once it is ready."""
    while server.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("Ready: "):
                return line.split()[1]
        time.sleep(0.1)
    raise ViolationError("the server has ended at its start")


def report(soak: Soak, seconds: float) -> None:
    """Print what has happened, and check the memory."""
    mib = 2**20
    growth = soak.memory[-1][1] - soak.memory[len(soak.memory) // 2][1]
    print(f"{seconds:.0f} s; requests: {dict(soak.counts)}; faults: {dict(soak.faults)}")
    print(
        f"front: {soak.memory[0][1] / mib:.1f} MiB at first, {soak.memory[-1][1] / mib:.1f} MiB at last, "
        f"{soak.slope() * 3600 / mib:+.1f} MiB/h in the second half ({growth / mib:+.1f} MiB); "
        f"engines: at most {max(soak.engine_memory) / mib:.1f} MiB"
    )
    if growth > MEMORY_NOISE and soak.slope() * 3600 > MEMORY_SLOPE:
        raise ViolationError("the memory of the front grows")


def soak_and_stop(server: subprocess.Popen[bytes], log: Path, seconds: float, seed: int) -> None:
    """Let everything happen to a server that starts, and end it."""
    url = served_url(server, log)
    front = psutil.Process(server.pid)
    soak = Soak(url, front, random.Random(seed))
    asyncio.run(soak.run(seconds))
    children = front.children(recursive=True)
    server.send_signal(signal.SIGTERM)
    status = server.wait(START_TIME)
    _, alive = psutil.wait_procs(children, timeout=5)
    if status or alive:
        raise ViolationError(f"SIGTERM: exit status {status}, still alive: {alive}")
    report(soak, seconds)


def main() -> None:
    """Run for as long as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    private_shared_memory.run_again_with_it()
    print(f"seed {arguments.seed}", flush=True)
    command = [sys.executable, "-m", "quire.cli.main", "serve", "mini", "--port", "0", "--num-threads", "1"]
    command += ["--num-kv-blocks", "512", "--watchdog-timeout", str(WATCHDOG_TIMEOUT)]
    command += ["--max-engine-crashes", "1000", "--policy", "priority"]
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        tempfile.tempdir = os.environ["TMPDIR"] = str(Path(directory))
        limit = arguments.seconds + 10 * START_TIME
        log = Path(directory, "log")
        with (
            log.open("w") as output,
            started(command, limit=limit, stdout=output, stderr=subprocess.STDOUT) as server,
        ):
            try:
                soak_and_stop(server, log, arguments.seconds, arguments.seed)
            except BaseException:
                shutil.copy(log, KEPT_LOG)
                print(f"the server's log: {KEPT_LOG}", file=sys.stderr)
                raise


if __name__ == "__main__":
    main()
