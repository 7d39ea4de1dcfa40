"""An engine in this process: how long its decode steps and prompts take."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from gpu_machine import seconds

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.execution.step_graphs import StepGraphs
from quire.kernels.triton.experts import layer as experts

FIRST_TOKEN_ID = 300  # smaller ids are the tokenizer's special and byte tokens
WARM_STEPS = 8  # sizes are captured when they come up for the second time


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of which no two begin alike."""
    span = vocab_size - FIRST_TOKEN_ID
    return [
        [FIRST_TOKEN_ID + (index * 7_919 + place * 104_729) % span for place in range(length)]
        for index in range(count)
    ]


@contextlib.contextmanager
def step_ends(ends: list[tuple[float, int]]) -> Iterator[None]:
    """Note when each step of engines in this process has ended, and for how many requests."""
    step = EngineCore.step

    def noted(core: EngineCore) -> Any:
        result = step(core)
        ends.append((time.perf_counter(), len(result[0])))
        return result

    with mock.patch.object(EngineCore, "step", noted):
        yield


@contextlib.contextmanager
def chosen_experts(num_rows: int) -> Iterator[list[torch.Tensor]]:
    """Note for each layer of steps of so many rows, until they are captured, which experts they choose."""
    route = experts.route
    chosen: list[torch.Tensor] = []

    def noted(scores: torch.Tensor, *args: Any) -> Any:
        routing = route(scores, *args)
        if len(scores) == num_rows and not (scores.is_cuda and torch.cuda.is_current_stream_capturing()):
            chosen.append(routing.tiles.clone())
        return routing

    with mock.patch.object(experts, "route", noted):
        yield chosen


def read_share(llm: LLM, num_requests: int, context: int, num_experts: int) -> float | None:
    """Return the share of experts that decode steps of so many requests read; None without experts.

    None, too, if steps of this size have been captured before, in which nobody sees what they choose.
    """
    if not num_experts:
        return None
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with chosen_experts(num_requests) as chosen:
        llm.generate(prompts(num_requests, context, llm.info.vocab_size), params)
    shares = [len(expert[end > 0].unique()) / num_experts for expert, _, end in chosen]
    return statistics.mean(shares) if shares else None


@contextlib.contextmanager
def captured_steps() -> Iterator[dict[int, Callable[[], None]]]:
    """Note what replays the last step of each number of rows that this process had a GPU compute."""
    computed = StepGraphs._computed
    replays: dict[int, Callable[[], None]] = {}

    def noted(graphs: StepGraphs, *step: Any) -> Any:
        graph = computed(graphs, *step)
        if graph.replay is not None and graph.arrays.token_ids.is_cuda:
            replays[len(graph.arrays.token_ids)] = graph.replay
        return graph

    with mock.patch.object(StepGraphs, "_computed", noted):
        yield replays


def replay_seconds(replays: dict[int, Callable[[], None]], num_requests: int) -> float | None:
    """Return the seconds of the GPU for the captured step of so many requests; None: none was captured."""
    sizes = [size for size in replays if size >= num_requests]
    return seconds(replays[min(sizes)], torch.device("cuda")) if sizes else None


def decode_seconds(llm: LLM, num_requests: int, context: int, num_steps: int) -> float:
    """Return the median seconds of a decode step of `num_requests` requests of `context` tokens and more."""
    ends: list[tuple[float, int]] = []
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + WARM_STEPS, ignore_eos=True)
    with step_ends(ends):
        llm.generate(prompts(num_requests, context, llm.info.vocab_size), params)
    times = [at for at, count in ends if count == num_requests][WARM_STEPS:]
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def prefill_seconds(llm: LLM, num_prompts: int, length: int, rounds: int = 5) -> float:
    """Return the median seconds from asking for prompts to their first tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    taken = []
    for number in range(rounds + 1):
        asked = prompts(num_prompts, length, llm.info.vocab_size)
        for index, prompt in enumerate(asked):
            prompt[0] = FIRST_TOKEN_ID + number * num_prompts + index  # no prefix is cached
        started = time.perf_counter()
        llm.generate(asked, params)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])
