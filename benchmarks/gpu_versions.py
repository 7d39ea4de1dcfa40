"""Decode steps of several versions of Quire, side by side on one GPU.

    python benchmarks/gpu_versions.py SRC [SRC ...] [--models Qwen3-0.6B ...] [--num-layers 8]
        [--num-requests 1 16] [--rounds 3]

SRC is the directory `src` of a checkout that this one's benchmarks can measure; the others are compared with
the first one. Each version loads a model of that shape with so many layers (0: as many as it has), all of
them at the same time. Then they measure one after the other, in rounds: the median decode step of requests of
1,024 tokens, and how long the GPU takes for its capture by itself. The bits are those of log-probabilities.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTEXT = 1_024
NUM_STEPS = 64


@dataclasses.dataclass(frozen=True)
class Task:
    """What a version does; see `gpu_versions_worker`."""

    model: str
    num_layers: int
    most_requests: int
    context: int
    num_steps: int
    is_tiny: bool


class Version:
    """A process with a version of Quire and its engine."""

    def __init__(self, source: str, task: Task) -> None:
        worker = Path(__file__).with_name("gpu_versions_worker.py")
        line = [sys.executable, str(worker), source, json.dumps(dataclasses.asdict(task))]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.source = source

    def answer(self) -> Any:
        """Return the next line that it writes.

        Raises:
            SystemExit: it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.source}: the process has ended with {self._process.wait()}")
        return json.loads(line)

    def measured(self, num_requests: int) -> dict[str, Any]:
        """Return what it measures with so many requests."""
        assert self._process.stdin is not None
        print(num_requests, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = self.answer()
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def versions(sources: list[str], task: Task) -> Iterator[list[Version]]:
    """Yield processes whose engines are ready."""
    started = [Version(source, task) for source in sources]
    try:
        for version in started:
            version.answer()
        yield started
    finally:
        for version in started:
            version.close()


def compare(
    sources: list[str], task: Task, num_requests: int, found: list[list[dict[str, Any]]]
) -> Iterator[str]:
    """Yield a line for each version, of which `found` [versions][rounds] was measured."""
    steps = [statistics.median(one["step"] for one in rounds) for rounds in found]
    captured = [[one["captured"] for one in rounds if one["captured"] is not None] for rounds in found]
    of_gpu = [statistics.median(times) if times else None for times in captured]
    for source, rounds, step, replay in zip(sources, found, steps, of_gpu, strict=True):
        line = f"{task.model}, {num_requests} requests: {step * 1e3:8.3f} ms {step / steps[0]:5.2f}"
        if replay is not None and of_gpu[0] is not None:
            line += f"   captured {replay * 1e3:8.3f} ms {replay / of_gpu[0]:6.3f}"
        bits = "same" if {one["bits"] for one in rounds} == {found[0][0]["bits"]} else "other"
        yield f"{line}   {bits} bits   {source}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", metavar="SRC")
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B"], help="default: Qwen3-0.6B")
    parser.add_argument("--num-layers", type=int, default=0, help="of each model; default: 0, all of them")
    parser.add_argument("--num-requests", type=int, nargs="+", default=[1, 16], help="default: 1 and 16")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--tiny", action="store_true", help="go through the code on a CPU")
    options = parser.parse_args()
    context, num_steps = (8, 4) if options.tiny else (CONTEXT, NUM_STEPS)
    for model in options.models:
        most = max(options.num_requests)
        task = Task(model, options.num_layers, most, context, num_steps, options.tiny)
        with versions(options.sources, task) as started:
            for count in options.num_requests:
                rounds = [[one.measured(count) for one in started] for _ in range(options.rounds)]
                found = [list(of_version) for of_version in zip(*rounds, strict=True)]
                for line in compare(options.sources, task, count, found):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
