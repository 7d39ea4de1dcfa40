"""The workloads and measurements of the scheduler comparison, which both sides share.

No model runs. Every request has 512 random prompt tokens that it shares with no other (no prefix hits), and
gets a constant token whenever it catches up. Only calls of the scheduler are timed, not the construction of
fake model outputs between them. `scheduler_quire.py` and `scheduler_vllm.py` each wrap one scheduler.

The garbage collector is on, with Python's default thresholds, on both sides; objects that exist before the
first request are frozen, as in vLLM's engine. Before it is timed, a scheduler runs as many requests as it
will hold to completion, so that new blocks come from a used cache."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
BLOCK_SIZE = 16
VOCABULARY = 151_936
MAX_MODEL_LEN = 1024
TOKEN_BUDGET = 1 << 20  # never the limit of a step
BLOCKS_PER_REQUEST = 44  # 40 are needed; nothing is ever preempted
DEFAULT_RUNNING = (64, 256, 1024, 4096)
RUNNING = 1024  # in all measurements except decode
CHUNK_TOKENS = 64
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
LIFETIME = 10  # steps of a request under churn, so that a tenth ends in every step
CYCLES = 6  # of BLOCK_SIZE steps each: how long decoding is timed

Results = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """What a step did; used to check that both sides do the same work."""

    num_scheduled: int
    num_preempted: int
    num_outputs: int


class Contender(Protocol):
    """A scheduler to measure. Plans, computed tokens and outputs have its own types."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Construct a request, with the hashes of its full blocks, and queue it."""

    def schedule(self) -> Any:
        """Plan a step."""

    def compute(self, plan: Any) -> Any:
        """Return a fake model output: a token for each request that caught up."""

    def update(self, plan: Any, computed: Any) -> Any:
        """Apply a step and return its outputs."""

    def shape(self, plan: Any, outputs: Any) -> Shape:
        """Return the shape of an applied step."""

    def encode(self, outputs: Any) -> int:
        """Encode the outputs of a step as a message for the front end; return its size in bytes."""


class MakeContender(Protocol):
    """The class of a contender."""

    def __call__(self, running: int, *, caching: bool = True, chunk: int = 0) -> Contender:
        """Create a scheduler for `running` requests of at most `chunk` tokens per step (0: no limit)."""


@dataclass(frozen=True)
class StepTimes:
    """Nanoseconds of the two calls of a step, its outputs, and its shape."""

    schedule: int
    update: int
    outputs: Any
    shape: Shape

    @property
    def total(self) -> int:
        """Nanoseconds of both calls."""
        return self.schedule + self.update


class Driver:
    """Adds requests to one scheduler and times its steps."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._numbers = itertools.count()
        self._random = np.random.default_rng(0)

    def add(self, count: int, max_tokens: int) -> list[int]:
        """Add requests; return the nanoseconds for each."""
        times = []
        for number in itertools.islice(self._numbers, count):
            prompt = self._random.integers(VOCABULARY, size=PROMPT_TOKENS).tolist()
            request_id = f"request-{number:08d}"
            started = time.perf_counter_ns()
            self.contender.add(request_id, prompt, max_tokens)
            times.append(time.perf_counter_ns() - started)
        return times

    def step(self, scheduled: int | None = None, outputs: int | None = None) -> StepTimes:
        """Run a step; if given, check how many requests it scheduled and how many outputs it had."""
        contender = self.contender
        started = time.perf_counter_ns()
        plan = contender.schedule()
        planned = time.perf_counter_ns()
        computed = contender.compute(plan)
        computed_at = time.perf_counter_ns()
        step_outputs = contender.update(plan, computed)
        ended = time.perf_counter_ns()
        shape = contender.shape(plan, step_outputs)
        if shape.num_preempted or not _agrees(shape.num_scheduled, scheduled):
            raise SystemExit(f"a step should schedule {scheduled} requests and preempt none, but: {shape}")
        if not _agrees(shape.num_outputs, outputs):
            raise SystemExit(f"a step should have outputs for {outputs} requests, but: {shape}")
        return StepTimes(planned - started, ended - computed_at, step_outputs, shape)

    def warm_up(self, count: int) -> None:
        """Run requests to completion, so that code is warm and the cache is full of their prompts."""
        self.add(count, max_tokens=1)
        while self.step().shape.num_scheduled:
            pass

    def start_decoding(self, running: int) -> None:
        """Bring requests to decoding, a sixteenth of them per step.

        So in each later step, a sixteenth of them starts a block; in lockstep, the median would hide that.
        """
        for cohort in range(BLOCK_SIZE):
            self.add(_share(running, cohort, BLOCK_SIZE), OUTPUT_TOKENS)
            self.step()


def _agrees(actual: int, expected: int | None) -> bool:
    return expected is None or actual == expected


def _share(total: int, index: int, parts: int) -> int:
    """Return the size of part `index` of `total`, split into nearly equal parts."""
    return total * (index + 1) // parts - total * index // parts


def new_driver(make: MakeContender, running: int, *, caching: bool = True, chunk: int = 0) -> Driver:
    """Return a warmed-up driver of a new scheduler; objects from before the first request are frozen."""
    gc.unfreeze()
    driver = Driver(make(running, caching=caching, chunk=chunk))
    gc.collect()
    gc.freeze()
    driver.warm_up(running)
    return driver


def per_request(times: list[StepTimes], requests: int) -> Results:
    """Return medians over steps, in microseconds per request."""
    return {
        name: statistics.median(getattr(entry, name) for entry in times) / requests / 1000
        for name in ("schedule", "update", "total")
    }


def measure_decode(make: MakeContender, running: int) -> Results:
    """Time steps in which every request decodes one token and none starts or ends."""
    driver = new_driver(make, running)
    driver.start_decoding(running)
    times = [driver.step(running, running) for _ in range(CYCLES * BLOCK_SIZE)]
    return per_request(times, running)


def measure_add(make: MakeContender) -> Results:
    """Time constructing and queueing a request, in microseconds."""
    driver = new_driver(make, RUNNING)
    return {"total": statistics.median(driver.add(RUNNING, OUTPUT_TOKENS)) / 1000}


def _ready_for_chunks(make: MakeContender) -> Driver:
    """Return a driver that chunks prompts, with half of `RUNNING` requests decoding."""
    driver = new_driver(make, RUNNING, chunk=CHUNK_TOKENS)
    driver.start_decoding(RUNNING // 2)
    for _ in range(CHUNKS - 1):
        driver.step()
    return driver


def measure_chunks(make: MakeContender) -> Results:
    """Time steps in which half of the requests decode, and half compute a chunk within their prompt."""
    driver, half = _ready_for_chunks(make), RUNNING // 2
    times = []
    for _ in range(CYCLES * BLOCK_SIZE // CHUNKS):
        driver.add(half, max_tokens=1)
        driver.step(RUNNING, half)
        times += [driver.step(RUNNING, half) for _ in range(CHUNKS - 2)]
        driver.step(RUNNING, RUNNING)
    return per_request(times, RUNNING)


def measure_mixed(make: MakeContender) -> Results:
    """Time the same, with some prompts that start and as many that end in each step, with one token each."""
    driver, half = _ready_for_chunks(make), RUNNING // 2
    arrivals = half // CHUNKS
    for _ in range(CHUNKS - 1):
        driver.add(arrivals, max_tokens=1)
        driver.step()
    times = []
    for _ in range(CYCLES * BLOCK_SIZE):
        driver.add(arrivals, max_tokens=1)
        times.append(driver.step(RUNNING, half + arrivals))
    return per_request(times, RUNNING)


def measure_churn(make: MakeContender) -> Results:
    """Time steps in which a tenth of the requests arrives and a tenth ends, without and with `add`."""
    driver = new_driver(make, RUNNING)
    times, with_add = [], []
    for number in range((2 + CYCLES) * LIFETIME):
        full = number >= 2 * LIFETIME
        adding = driver.add(_share(RUNNING, number % LIFETIME, LIFETIME), max_tokens=LIFETIME)
        entry = driver.step(*(RUNNING, RUNNING) if full else ())
        if full:
            times.append(entry)
            with_add.append(entry.total + sum(adding))
    return per_request(times, RUNNING) | {"with_add": statistics.median(with_add) / RUNNING / 1000}


def measure_caching(make: MakeContender) -> Results:
    """Compare decoding with and without prefix caching, in microseconds per request and as a share of a step.

    The memory layout of a scheduler matters as much as caching, and depends on which of the two is created
    first, so both orders are measured.
    """
    costs, steps = zip(*(_cost_of_caching(make, made_first) for made_first in (True, False)), strict=True)
    cost, step = statistics.mean(costs), statistics.mean(steps)
    return {"total": cost / RUNNING / 1000, "share": cost / step}


def _cost_of_caching(make: MakeContender, made_first: bool) -> tuple[float, float]:
    """Return the additional cost of caching per step, and the time of a step with caching, in nanoseconds.

    Steps of both schedulers alternate, as does which one is first; the cost is the difference of
    neighbouring steps.
    """
    drivers = {
        caching: new_driver(make, RUNNING, caching=caching) for caching in (made_first, not made_first)
    }
    for driver in drivers.values():
        driver.start_decoding(RUNNING)
    with_caching, costs = [], []
    for number in range(CYCLES * BLOCK_SIZE):
        order = (True, False) if number % 2 else (False, True)
        times = {caching: drivers[caching].step(RUNNING, RUNNING).total for caching in order}
        with_caching.append(times[True])
        costs.append(times[True] - times[False])
    return statistics.median(costs), statistics.median(with_caching)


def measure_encode(make: MakeContender) -> Results:
    """Time encoding the outputs of one decode step as a message, in milliseconds."""
    driver = new_driver(make, RUNNING)
    driver.start_decoding(RUNNING)
    times, num_bytes = [], 0
    for _ in range(CYCLES * BLOCK_SIZE):
        outputs = driver.step(RUNNING, RUNNING).outputs
        started = time.perf_counter_ns()
        num_bytes = driver.contender.encode(outputs)
        times.append(time.perf_counter_ns() - started)
    return {"total": statistics.median(times) / 1e6, "bytes": num_bytes}


DECODE = "decode"
MEASUREMENTS: dict[str, Callable[[MakeContender], Results]] = {
    "chunks": measure_chunks,
    "mixed": measure_mixed,
    "churn": measure_churn,
    "caching": measure_caching,
    "add": measure_add,
    "encode": measure_encode,
}


def measure(name: str, make: MakeContender) -> Results:
    """Run a measurement by name; that of decode includes the number of running requests."""
    if name.startswith(DECODE):
        return measure_decode(make, int(name.removeprefix(DECODE)))
    return MEASUREMENTS[name](make)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with options to select measurements."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--running",
        type=int,
        nargs="+",
        default=DEFAULT_RUNNING,
        help="numbers of running requests in decode steps",
    )
    choices = (DECODE, *MEASUREMENTS)
    result.add_argument("--only", nargs="+", choices=choices, default=choices, help="what to measure")
    return result


def chosen_names(options: argparse.Namespace) -> list[str]:
    """Return the names of the selected measurements, in the order of the table."""
    decode = [f"{DECODE} {running}" for running in options.running if DECODE in options.only]
    return decode + [name for name in MEASUREMENTS if name in options.only]


def measure_and_print(description: str | None, version: str, make: MakeContender) -> None:
    """Run one side: print its version, then each result, as lines of JSON."""
    arguments = parser(description)
    arguments.add_argument(
        "--stdin", action="store_true", help="read the names of measurements from standard input"
    )
    options = arguments.parse_args()
    print(json.dumps({"version": version}), flush=True)
    names = map(str.strip, sys.stdin) if options.stdin else chosen_names(options)
    for name in names:
        print(json.dumps({name: measure(name, make)}), flush=True)
