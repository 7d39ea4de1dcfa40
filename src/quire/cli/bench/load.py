"""Sending requests at their arrival times, and recording each one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.cli.bench.measurements import RequestRecord
from quire.cli.bench.target import Target
from quire.cli.bench.workload import ARRIVALS, BenchRequest, Workload, build_workload
from quire.cli.bench_options import ArrivalConfig, WorkloadConfig
from quire.cli.console import stderr_is_terminal
from quire.errors import EngineDeadError, QuireError


async def measure_serving(
    opening: contextlib.AbstractAsyncContextManager[Target], config: WorkloadConfig, arrivals: ArrivalConfig
) -> tuple[Workload, list[RequestRecord]]:
    """Warm up a target, send it a workload, and return the workload and a record of each request.

    Raises:
        QuireError: the target cannot be used, or a warm-up request failed.
        EngineDeadError: the engine has ended.
    """
    from quire.front.progress import batch_progress

    generator = np.random.default_rng([config.seed, ARRIVALS])
    async with opening as target:
        workload = build_workload(config, target.vocabulary, target.max_model_len)
        for record in await LoadGenerator(target, [0.0] * len(workload.warmup), workload.warmup).run():
            if record.error is not None:
                raise QuireError(record.error)
        times = arrival_times(config.num_prompts, arrivals.request_rate, arrivals.burstiness, generator)
        with batch_progress(config.num_prompts, shown=stderr_is_terminal()) as on_progress:
            load = LoadGenerator(
                target, times.tolist(), workload.requests, arrivals.max_concurrency, on_progress=on_progress
            )
            return workload, await load.run()


class LoadGenerator:
    """Sends requests to a target at given times.

    Args:
        target: serves the requests.
        arrivals: arrival time of each request, in seconds from the start.
        requests: in the order of `arrivals`.
        max_concurrency: maximum number of requests in flight; 0: no limit.
        on_progress: called with (requests ended, tokens generated) after each request.
    """

    def __init__(
        self,
        target: Target,
        arrivals: Sequence[float],
        requests: Sequence[BenchRequest],
        max_concurrency: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, tokens: None,
    ) -> None:
        self._target = target
        self._requests = list(zip(requests, arrivals, strict=True))
        self._in_flight = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
        self._on_progress = on_progress
        self._done = self._tokens = 0
        self._started = 0.0

    async def run(self) -> list[RequestRecord]:
        """Send each request when it is due; once all have ended, return their records in the same order."""
        self._started = time.perf_counter()
        tasks = [asyncio.create_task(self._when_due(request, due)) for request, due in self._requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _when_due(self, request: BenchRequest, due: float) -> RequestRecord:
        await asyncio.sleep(due - self._now())
        record = RequestRecord(
            arrived=due, num_prompt_tokens=len(request.prompt_token_ids), output_len=request.output_len
        )
        async with self._in_flight:
            await self._send(request, record)
        self._done += 1
        self._tokens += record.num_output_tokens
        self._on_progress(self._done, self._tokens)
        return record

    async def _send(self, request: BenchRequest, record: RequestRecord) -> None:
        record.sent = self._now()
        try:
            usage = await self._target.send(request, lambda: record.output_times.append(self._now()))
            record.num_output_tokens, record.num_cached_tokens = usage
            if not record.output_times:
                record.error = "the response had no tokens"
        except EngineDeadError:
            raise
        except QuireError as error:
            record.error = str(error)
        record.ended = self._now()


def arrival_times(count: int, rate: float, burstiness: float, generator: np.random.Generator) -> np.ndarray:
    """Draw arrival times [count] in seconds; the first is 0.

    The gaps have mean 1 / `rate` and coefficient of variation 1 / sqrt(`burstiness`). With a burstiness of 1
    they are exponential, and the process is Poisson.

    Args:
        rate: requests per second; infinity means all at once.
        burstiness: shape parameter of the gamma distribution.
    """
    if rate == math.inf:
        return np.zeros(count)
    gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])
