"""Engines that are killed, aborted, stopped and out of memory under mixed streams: `make chaos`.

The faults are shared out among scenarios: drafts, steps that overlap, KV tiers, and ranks. Every request must
end exactly once, with the texts, tokens and log-probabilities of a run without faults, or with the error that
it is quarantined or that there was no memory for it. Then front and engine must hold what they held at the
start, and an engine must end within a second of its front.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

import private_shared_memory
from engine_checks import wait_for_end
from quire import LLM, AsyncLLM, EngineConfig, SamplingParams
from quire.config import BUILT_IN_MODEL
from quire.errors import EngineDeadError, QuireError, RequestQuarantinedError
from quire.front.arguments import engine_config
from quire.request_output import RequestOutput
from quire.structured_outputs import StructuredOutputsParams
from subprocesses import started

NUM_STREAMS = 32
WATCHDOG_TIMEOUT = 2.0
FAULTS = ("kill", "abort", "stop", "no memory", "kill while starting", "kill while restoring")
SIGNALS = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}
NO_MEMORY = 2**20  # bytes of address space that an engine may have: less than it has, so it gets no more
OUT_OF_MEMORY = re.compile(  # in the error of a request
    "MemoryError|allocate|failed to map segment|can't start new thread"
)
NO_MEMORY_TIME = 3.0  # seconds; then it may have memory again
LONGEST_START = 4.0  # seconds, more or less
LONGEST_LIFE = 2.0  # seconds that an engine has with requests before it is struck
NEXT_OUTPUT_TIMEOUT = 120.0
MEMORY_GROWTH = 64 * 2**20  # bytes that the front may grow by: allocators keep some

FRONT = """
import asyncio
from quire import AsyncLLM, SamplingParams
async def main():
    llm = AsyncLLM()
    stream = llm.generate("Once", SamplingParams(max_tokens=500, ignore_eos=True))
    await anext(stream)
    print("runs", flush=True)
    async for _ in stream:
        pass
    await asyncio.Event().wait()
asyncio.run(main())
"""


def mixed_params(index: int) -> SamplingParams:
    """Return the parameters of one of the streams."""
    length = 20 + 5 * index
    match index % 6:
        case 0:
            return SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=2)
        case 1:
            return SamplingParams(max_tokens=length, seed=index, n=2, ignore_eos=True)
        case 2:
            return SamplingParams(max_tokens=length, seed=index, repetition_penalty=1.2, ignore_eos=True)
        case 3:
            regex = StructuredOutputsParams(regex=r"[a-z ]{60,90}")
            return SamplingParams(max_tokens=length, seed=index, structured_outputs=regex)
        case 4:
            return SamplingParams(max_tokens=20, temperature=0.0, prompt_logprobs=1, stop=(".",))
        case _:
            return SamplingParams(max_tokens=15, beam_width=2, ignore_eos=True)


REQUESTS = [
    (f"{index}. What does a KV cache hold? " * (1 + index % 4), mixed_params(index))
    for index in range(NUM_STREAMS)
]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """An engine's configuration, beside what all engines of this program have."""

    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_ranks: int = 1

    def config(self, directory: Path) -> EngineConfig:
        """Return the configuration; what the engine keeps on disk is in `directory`."""
        options = {
            "num_threads": 1,
            "num_kv_blocks": 512,
            "tensor_parallel_size": self.num_ranks,
            "watchdog_timeout": WATCHDOG_TIMEOUT * self.num_ranks,
            "max_engine_crashes": 1000,
            **self.options,
        }
        if options.get("kv_tier") == "disk":
            options["kv_tier_path"] = str(directory / "tier")
        return engine_config(BUILT_IN_MODEL, options)


SCENARIOS = (
    Scenario("drafts", {"speculative_method": "ngram"}),
    Scenario("overlap", {"overlap_steps": True}),
    Scenario("memory tier", {"kv_tier": "memory", "kv_tier_size": 0.05}),
    Scenario("disk tier", {"kv_tier": "disk", "kv_tier_size": 0.05}),
    Scenario("two ranks", num_ranks=2),
)


class Chaos:
    """One engine after another, the streams on them, and what becomes of both.

    Args:
        config: of the engines.
        num_faults: that strike them.
        rng: chooses faults and moments.
    """

    def __init__(self, config: EngineConfig, num_faults: int, rng: random.Random) -> None:
        self._config = config
        self._random = rng
        self._num_faults = num_faults
        self._is_over = False
        self._output = asyncio.Event()
        self.ends: Counter[str] = Counter()
        self.pauses: dict[str, list[float]] = {kind: [] for kind in FAULTS}

    async def run(self, expected: list[RequestOutput]) -> None:
        """Strike engines until there have been enough faults; then check what is left."""
        llm = AsyncLLM(self._config)
        await llm.wait_until_ready()
        for prompt, params in REQUESTS:  # so that everything is there that is made once
            async for _ in llm.generate(prompt, params):
                pass
        held, memory = held_by_front(), psutil.Process().memory_info().rss
        streams = [
            asyncio.create_task(self._stream(llm, index, expected[index])) for index in range(NUM_STREAMS)
        ]
        striking = asyncio.create_task(self._strike_often(llm))
        ended, _ = await asyncio.wait({striking, *streams}, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # if that raises, nobody else is waited for
        self._is_over = True
        for task in (striking, *streams):
            await task
        await self._check_what_is_left(llm, held, memory)
        await llm.shutdown()

    async def _stream(self, llm: AsyncLLM, index: int, expected: RequestOutput) -> None:
        prompt, params = REQUESTS[index]
        while not self._is_over:
            num_ends = 0
            try:
                async for output in llm.generate(prompt, params):
                    num_ends += output.finished
                    self._output.set()
            except RequestQuarantinedError:
                self.ends["quarantined"] += 1
                continue
            except QuireError as error:
                if not OUT_OF_MEMORY.search(str(error)):
                    raise
                self.ends["out of memory"] += 1
                continue
            assert num_ends == 1
            errors = {one.error_type for one in output.outputs} - {None}
            if errors == {RequestQuarantinedError.__name__}:
                self.ends["quarantined"] += 1
                continue
            messages = [one.error for one in output.outputs if one.error is not None]
            if messages:
                assert all(map(OUT_OF_MEMORY.search, messages)), messages
                self.ends["out of memory"] += 1
                continue
            assert output.outputs == expected.outputs, f"stream {index} differs"
            assert output.prompt_logprobs == expected.prompt_logprobs
            self.ends["as expected"] += 1

    async def _strike_often(self, llm: AsyncLLM) -> None:
        for _ in range(self._num_faults):
            await self._next_output()
            await asyncio.sleep(self._random.uniform(0, LONGEST_LIFE))
            kind = self._random.choice(FAULTS)
            begin, num_restarts = time.monotonic(), llm.recovery_stats.num_restarts
            engine = await engine_process()
            await self._strike(kind, engine)
            while not has_not_ended(engine) and llm.recovery_stats.num_restarts == num_restarts:
                await asyncio.sleep(0.01)  # outputs of the engine that has died may arrive still
            await self._next_output()
            self.pauses[kind].append(time.monotonic() - begin)

    async def _strike(self, kind: str, engine: psutil.Process) -> None:
        """Let a fault happen, and wait until the engine has died of it or has got over it."""
        match kind:
            case "no memory":
                await run_out_of_memory(engine)
            case "kill while starting":
                await end(engine, signal.SIGKILL)
                engine = await engine_process()
                await asyncio.sleep(self._random.uniform(0, LONGEST_START))
                await end(engine, signal.SIGKILL)
            case "kill while restoring":
                await end(engine, signal.SIGKILL)
                await self._next_output()
                await end(await engine_process(), signal.SIGKILL)
            case _:
                victims = [engine, *ranks_of(engine)]
                await end(self._random.choice(victims), SIGNALS[kind], engine)

    async def _next_output(self) -> None:
        self._output.clear()
        async with asyncio.timeout(NEXT_OUTPUT_TIMEOUT):
            await self._output.wait()

    async def _check_what_is_left(self, llm: AsyncLLM, held: tuple[object, ...], memory: int) -> None:
        assert llm.num_unfinished_requests == 0
        async with asyncio.timeout(60):
            while True:  # an engine may be on its way still
                try:
                    stats = await llm.stats()
                except EngineDeadError:
                    await asyncio.sleep(0.1)
                    continue
                if stats.num_free_blocks == stats.num_blocks:
                    break
        assert stats.num_running == stats.num_waiting == 0
        assert is_no_more(held_by_front(), held), f"{held_by_front()} is held, it was {held}"
        growth = psutil.Process().memory_info().rss - memory
        assert growth < MEMORY_GROWTH, f"the front has grown by {growth} bytes"
        print(f"  front: {growth / 2**20:+.1f} MiB; {llm.recovery_stats}; {dict(self.ends)}", flush=True)


async def engine_process() -> psutil.Process:
    """Return the engine process, as soon as there is one."""
    while True:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "quire.engine.process.main" in child.cmdline():
                    return child
        await asyncio.sleep(0.01)


def ranks_of(engine: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the other ranks of an engine."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in engine.children() if "quire.engine.ranks.process" in child.cmdline()]
    return []


async def end(victim: psutil.Process, number: signal.Signals, engine: psutil.Process | None = None) -> None:
    """Send a signal to a process, and wait until its engine (by default, itself) has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(number)
    while has_not_ended(engine or victim):
        await asyncio.sleep(0.01)


async def run_out_of_memory(engine: psutil.Process) -> None:
    """Let an engine have no more address space, until it has died of that or for some seconds."""
    with contextlib.suppress(psutil.NoSuchProcess):
        resource.prlimit(engine.pid, resource.RLIMIT_AS, (NO_MEMORY, resource.RLIM_INFINITY))
        deadline = time.monotonic() + NO_MEMORY_TIME
        while has_not_ended(engine) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(engine.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def has_not_ended(process: psutil.Process) -> bool:
    """Whether a process runs, or is stopped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def undisturbed(num_ranks: int) -> list[RequestOutput]:
    """Return what the requests are answered without faults."""
    with LLM(num_threads=1, num_kv_blocks=512, tensor_parallel_size=num_ranks) as llm:
        return llm.generate(*map(list, zip(*REQUESTS, strict=True)))


def held_by_front() -> tuple[object, ...]:
    """Return what must not grow: descriptors, threads, children, and files that others could see."""
    process = psutil.Process()
    files = [sorted(os.listdir(folder)) for folder in ("/dev/shm", tempfile.gettempdir())]
    return len(os.listdir("/proc/self/fd")), process.num_threads(), len(process.children()), files


def is_no_more(now: tuple[object, ...], then: tuple[object, ...]) -> bool:
    """Whether a front holds no more numbers of things than it did, and the same files."""
    *numbers, files = zip(now, then, strict=True)
    return all(new <= old for new, old in numbers) and files[0] == files[1]


def kill_a_front() -> float:
    """Kill a front with kill -9; return the seconds until its engine has ended."""
    before = held_by_front()
    with started([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout.readline() == "runs\n"
        [engine] = psutil.Process(front.pid).children()
        begin = time.monotonic()
        front.kill()
        assert wait_for_end(engine.pid)
        seconds = time.monotonic() - begin
    assert held_by_front()[-1] == before[-1], "files are left"
    return seconds


def main() -> None:
    """Run as many faults as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--scenario", choices=names, action="append", help="may be repeated; default: all")
    arguments = parser.parse_args()
    private_shared_memory.run_again_with_it()
    print(f"seed {arguments.seed}", flush=True)
    rng = random.Random(arguments.seed)
    pauses: dict[str, list[float]] = {kind: [] for kind in FAULTS}
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        tempfile.tempdir = os.environ["TMPDIR"] = str(Path(directory))
        expected: dict[int, list[RequestOutput]] = {}
        scenarios = [one for one in SCENARIOS if one.name in (arguments.scenario or names)]
        for index, scenario in enumerate(scenarios):
            num_faults = arguments.faults * (index + 1) // len(scenarios)
            num_faults -= arguments.faults * index // len(scenarios)
            if not num_faults:
                continue
            print(f"{scenario.name}: {num_faults} faults", flush=True)
            if scenario.num_ranks not in expected:
                expected[scenario.num_ranks] = undisturbed(scenario.num_ranks)
            chaos = Chaos(scenario.config(Path(directory)), num_faults, rng)
            asyncio.run(chaos.run(expected[scenario.num_ranks]))
            ends += chaos.ends
            for kind, seconds in chaos.pauses.items():
                pauses[kind] += seconds
        seconds_after_front = kill_a_front()
        assert seconds_after_front < 1, f"the engine ended {seconds_after_front:.2f} s after its front"
    print(f"requests: {dict(ends)}")
    for kind, found in pauses.items():
        if found:
            median, most = statistics.median(found), max(found)
            print(f"{kind}: {len(found)}, next token after {median:.2f} s (median), {most:.2f} s (longest)")
    print(f"kill -9 of the front: its engine has ended after {seconds_after_front:.2f} s")


if __name__ == "__main__":
    main()
