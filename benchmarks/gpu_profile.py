"""The kernels of decode steps: how long each takes, beside what it has to do, and how busy the GPU is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gpu_engine import prompts
from gpu_roofline import Work
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from quire import LLM, SamplingParams

NUM_ROWS = 20  # kernels that are shown
NAME_WIDTH = 48


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """What a kernel takes of a step."""

    name: str
    seconds: float
    num_launches: float


def kernel_times(llm: LLM, num_requests: int, context: int, num_steps: int = 16) -> list[KernelTime]:
    """Return what the kernels take of a decode step, on average, the longest first; without a GPU, operators.

    Requests have `context` tokens when they begin.
    """
    on_gpu = torch.cuda.is_available()
    profiled, _ = _profiled(llm, num_requests, context, num_steps)
    times = []
    for event in profiled.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds:
            times.append(KernelTime(event.key, microseconds / 1e6 / num_steps, event.count / num_steps))
    return sorted(times, key=lambda kernel: -kernel.seconds)


def busy_share(llm: LLM, num_requests: int, context: int, num_steps: int = 24) -> float:
    """Return the share of decode steps' time in which the GPU has something to do; on a CPU, 0.

    It is the difference between a run and one of four times as many steps, so that prompts cancel out. What
    the profiler costs the host counts as time without, and kernels that are there at the same time once.
    """
    few, many = (_profiled(llm, num_requests, context, count) for count in (num_steps, 4 * num_steps))
    return (_busy_seconds(many[0]) - _busy_seconds(few[0])) / (many[1] - few[1])


def _busy_seconds(profiled: Any) -> float:
    times = [event.time_range for event in profiled.events() if event.device_type == DeviceType.CUDA]
    busy, until = 0.0, 0.0
    for time_range in sorted(times, key=lambda time_range: time_range.start):
        busy += max(time_range.end - max(time_range.start, until), 0.0)
        until = max(until, time_range.end)
    return busy / 1e6


def _profiled(llm: LLM, num_requests: int, context: int, num_steps: int) -> tuple[Any, float]:
    """Return what the profiler has of decode steps, and how many seconds they took."""
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    asked = prompts(num_requests, context, llm.info.vocab_size)
    for _ in range(2):  # from the prefix cache the second time, when steps of this size are captured
        llm.generate(asked, params)
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        started = time.perf_counter()
        llm.generate(asked, params)
        seconds = time.perf_counter() - started
    return profiled, seconds


def profile_table(
    times: list[KernelTime], work: Mapping[str, Work], bandwidth: float, rate: float
) -> Iterator[str]:
    """Yield the lines of a table: the longest kernels, and all together.

    Args:
        times: of all kernels of a step.
        work: of kernels, by name.
        bandwidth: bytes per second that copies read and write.
        rate: operations per second of products.
    """
    head = ("ms", "launches", "MB", "GB/s", "Gop", "of the limit")
    yield f"{'kernel':{NAME_WIDTH}}" + "".join(f"{title:>13}" for title in head)
    for kernel in times[:NUM_ROWS]:
        line = (
            f"{kernel.name[:NAME_WIDTH]:{NAME_WIDTH}}{kernel.seconds * 1e3:13.4f}{kernel.num_launches:13.1f}"
        )
        done = work.get(kernel.name)
        if done is not None:
            line += f"{done.bytes / 1e6:13.2f}{done.bytes / kernel.seconds / 1e9:13.0f}"
            line += f"{done.operations / 1e9:13.2f}{done.seconds(bandwidth, rate) / kernel.seconds:13.2f}"
        yield line
    seconds = sum(kernel.seconds for kernel in times)
    yield f"{'all':{NAME_WIDTH}}{seconds * 1e3:13.4f}{sum(kernel.num_launches for kernel in times):13.1f}"
