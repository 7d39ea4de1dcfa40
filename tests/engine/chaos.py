"""Engines that are killed, aborted and stopped at random moments under mixed streams: `make chaos`.

Every request must end exactly once, with the texts, tokens and log-probabilities of a run without faults, or
with the error that it is quarantined. Then front and engine must hold what they held at the start, and an
engine must end within a second of its front.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from engine_checks import wait_for_end
from quire import LLM, AsyncLLM, EngineConfig, SamplingParams, SchedulerConfig
from quire.config import SpeculationConfig, SupervisionConfig
from quire.errors import EngineDeadError, RequestQuarantinedError
from quire.request_output import RequestOutput
from quire.structured_outputs import StructuredOutputsParams
from subprocesses import started

NUM_STREAMS = 32
WATCHDOG_TIMEOUT = 2.0
SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP)
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


class Chaos:
    """One engine after another, the streams on them, and what becomes of both."""

    def __init__(self, num_faults: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_faults = num_faults
        self._is_over = False
        self._output = asyncio.Event()
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.pauses: dict[str, list[float]] = {number.name: [] for number in SIGNALS}

    async def run(self, expected: list[RequestOutput]) -> None:
        """Strike engines until there have been enough faults; then check what is left."""
        llm = AsyncLLM(
            EngineConfig(
                num_threads=1,
                scheduler=SchedulerConfig(num_kv_blocks=512),
                speculation=SpeculationConfig(speculative_method="ngram"),
                supervision=SupervisionConfig(watchdog_timeout=WATCHDOG_TIMEOUT, max_engine_crashes=1000),
            )
        )
        await llm.wait_until_ready()
        for prompt, params in REQUESTS:  # so that everything is there that is made once
            async for _ in llm.generate(prompt, params):
                pass
        held, memory = held_by_front(), psutil.Process().memory_info().rss
        streams = [
            asyncio.create_task(self._stream(llm, index, expected[index])) for index in range(NUM_STREAMS)
        ]
        striking = asyncio.create_task(self._strike(llm))
        await asyncio.wait({striking, *streams}, return_when=asyncio.FIRST_COMPLETED)
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
            assert num_ends == 1
            if any(one.error_type == RequestQuarantinedError.__name__ for one in output.outputs):
                self.ends["quarantined"] += 1
                continue
            assert output.outputs == expected.outputs, f"stream {index} differs"
            assert output.prompt_logprobs == expected.prompt_logprobs
            self.ends["as expected"] += 1

    async def _strike(self, llm: AsyncLLM) -> None:
        for _ in range(self._num_faults):
            await self._next_output()
            await asyncio.sleep(self._random.uniform(0, LONGEST_LIFE))
            number = self._random.choice(SIGNALS)
            [engine] = psutil.Process().children()
            begin = time.monotonic()
            os.kill(engine.pid, number)
            self.faults[number.name] += 1
            while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
            await self._next_output()
            self.pauses[number.name].append(time.monotonic() - begin)

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
        assert held_by_front() == held, f"{held_by_front()} is held, it was {held}"
        growth = psutil.Process().memory_info().rss - memory
        assert growth < MEMORY_GROWTH, f"the front has grown by {growth} bytes"
        assert llm.recovery_stats.num_restarts == self._num_faults
        print(f"front: {growth / 2**20:+.1f} MiB; {llm.recovery_stats}")


def held_by_front() -> tuple[object, ...]:
    """Return what must not grow: descriptors, threads, children, and files that others could see."""
    process = psutil.Process()
    files = [sorted(os.listdir(folder)) for folder in ("/dev/shm", tempfile.gettempdir())]
    return len(os.listdir("/proc/self/fd")), process.num_threads(), len(process.children()), files


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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        tempfile.tempdir = os.environ["TMPDIR"] = str(Path(directory))
        with LLM(num_threads=1, num_kv_blocks=512) as undisturbed:
            expected = undisturbed.generate(*map(list, zip(*REQUESTS, strict=True)))
        chaos = Chaos(arguments.faults, arguments.seed)
        asyncio.run(chaos.run(expected))
        seconds = kill_a_front()
        assert seconds < 1, f"the engine ended {seconds:.2f} s after its front"
    print(f"seed {arguments.seed}: {dict(chaos.faults)}; requests: {dict(chaos.ends)}")
    for name, pauses in chaos.pauses.items():
        if pauses:
            median, most = statistics.median(pauses), max(pauses)
            print(f"{name}: next token after {median:.2f} s (median), {most:.2f} s (longest)")
    print(f"kill -9 of the front: its engine has ended after {seconds:.2f} s")


if __name__ == "__main__":
    main()
