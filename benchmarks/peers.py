"""Compares Quire with vLLM, OpenVINO GenAI and llama.cpp on one model, in one run, on the CPU.

The model has random weights in the shape of Qwen3-0.6B, or of another model with `--shape`. Prompts are
random token ids, the same for every engine and new in each round; decoding is greedy and ignores
end-of-sequence. Each engine is a process with its own environment, two threads, and a KV cache for the same
number of tokens. Engines take turns; an engine that is not being measured is stopped (SIGSTOP). In int4,
engines take part with several files, and Quire in int8, too. For each precision, this program

1. writes missing model files, and reads all files once, so that they are in the page cache;
2. measures memory bandwidth and matrix products of the machine, for the limits, and again at the end; the
   best counts;
3. starts every engine twice, one after another, and measures the time to the first generated token: the
   first start may have to compile or pack what the second finds on disk;
4. for each workload, warms up every engine with a short run, then measures in rounds, alternately;
5. records the peak memory of each engine.

The figure of a workload is the best round of an engine, in tokens per second: output tokens, or prompt and
output tokens for workloads that measure prefill. An engine that fails is left out from then on, and the
reason is printed.

    make bench-peers
    python benchmarks/peers.py [--engines quire,llamacpp] [--precisions bf16] [--workloads 1x32/32]
                               [--shape 0.6b] [--rounds 3] [--json FILE]

All engines of a precision are in memory together. For the larger shapes in 24 GiB, choose: int4, and few
engines and workloads.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from peers_engines import CHECKPOINT, HERE, KINDS, MODELS, PEERS, conversion
from peers_limit import Machine, least_seconds
from peers_model import work_of
from peers_process import LOG_TAIL_CHARS, EngineError, EngineProcess
from peers_report import disagreements, failures, tables
from peers_shapes import SHAPES
from peers_workload import PRECISIONS, WORKLOADS, Workload
from rich.console import Console

LOGS = PEERS / "logs"
TABLE_WIDTH = 130
READ_CHUNK_BYTES = 2**24

Figures = dict[str, Any]


class Comparison:
    """One precision of one shape: its running engines and its figures."""

    def __init__(self, shape: str, precision: str, engines: list[str], console: Console) -> None:
        self._shape = shape
        self._precision = precision
        self._console = console
        self._running: dict[str, EngineProcess] = {}
        self._machine = Machine(0.0, {})
        self.figures: Figures = {
            "machine": {},
            "engines": {
                name: {"start_seconds": [], "peak_bytes": 0, "versions": {}, "failure": ""}
                for name in engines
            },
            "workloads": {},
        }

    def run(self, workloads: list[Workload], *, rounds: int, starts: int) -> None:
        """Measure everything; see the docstring of the module."""
        try:
            for name in self.figures["engines"]:
                self._attempt(name, self._prepare_files)
            self._measure_machine()
            for name in self._surviving():
                self._attempt(name, functools.partial(self._start, starts=starts))
            for workload in workloads:
                self._measure(workload, min(rounds, workload.max_rounds))
            for name in list(self._running):
                self._attempt(name, self._note_memory)
            self._measure_machine()
            self._note_limits()
        finally:
            for process in self._running.values():
                process.resume()
                process.close()

    def _prepare_files(self, name: str) -> None:
        checkpoint = MODELS / self._shape / CHECKPOINT
        for directory in dict.fromkeys((checkpoint, KINDS[name].model(self._precision, self._shape))):
            if not directory.exists():
                self._say(f"writing {directory}")
                write_files(directory)
            read_files(directory)

    def _measure_machine(self) -> None:
        self._say("measuring the machine")
        command = [sys.executable, str(HERE / "peers_machine.py")]
        measured = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        self._machine = Machine(**measured).best_of(self._machine)
        self.figures["machine"] = dataclasses.asdict(self._machine)

    def _start(self, name: str, *, starts: int) -> None:
        for number in range(starts):
            self._say(f"starting {KINDS[name].label}, {number + 1} of {starts}")
            log = LOGS / f"{self._shape}-{name}-{self._precision}.log"
            process = EngineProcess(KINDS[name], self._precision, self._shape, log)
            entry = self.figures["engines"][name]
            entry["versions"] = process.versions
            entry["start_seconds"].append(process.seconds_to_ready)
            if number + 1 < starts:
                process.close()
        self._running[name] = process
        process.pause()

    def _measure(self, workload: Workload, rounds: int) -> None:
        entry: Figures = {
            "seconds": {name: [] for name in self._running},
            "same_first_tokens": dict.fromkeys(self._running, 0),
            "first_tokens": dict.fromkeys(self._running, 0),
        }
        self.figures["workloads"][workload.name] = entry
        self._take_turns(workload.warm_up, "warm-up", entry=None)
        for number in range(1, rounds + 1):
            self._take_turns(workload, f"round {number} of {rounds}", entry)

    def _take_turns(self, workload: Workload, seed: str, entry: Figures | None) -> None:
        prompts = workload.prompts(seed)
        expected: list[int] = []

        def measure(name: str) -> None:
            self._say(f"{workload.name}, {seed}: {KINDS[name].label}")
            with self._running[name].awake() as process:
                seconds, outputs = process.run(workload, prompts)
            if entry is None:
                return
            entry["seconds"][name].append(seconds)
            first = [output[0] for output in outputs]
            expected.extend(first if not expected else ())
            same = sum(one == other for one, other in zip(first, expected, strict=True))
            entry["same_first_tokens"][name] += same
            entry["first_tokens"][name] += len(first)

        for name in list(self._running):
            self._attempt(name, measure)

    def _note_limits(self) -> None:
        work = work_of(SHAPES[self._shape].config)
        for name, entry in self.figures["workloads"].items():
            entry["limit_seconds"] = least_seconds(WORKLOADS[name], work, self._precision, self._machine)

    def _note_memory(self, name: str) -> None:
        self.figures["engines"][name]["peak_bytes"] = self._running[name].peak_memory()

    def _attempt(self, name: str, work: Callable[[str], None]) -> None:
        """Run `work` for one engine; if it fails, record why and continue without the engine."""
        try:
            work(name)
        except (EngineError, OSError, subprocess.CalledProcessError) as error:
            self.figures["engines"][name]["failure"] = reason(error)
            self._console.print(f"{KINDS[name].label} failed: {reason(error)}", style="red", markup=False)
            if name in self._running:
                self._running.pop(name).kill()

    def _surviving(self) -> list[str]:
        return [name for name, entry in self.figures["engines"].items() if not entry["failure"]]

    def _say(self, text: str) -> None:
        self._console.print(f"{datetime.datetime.now():%H:%M:%S} {self._precision}: {text}", highlight=False)


def reason(error: Exception) -> str:
    """Return the error message, with the end of the output of a failed command."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"{error}\n{error.stderr.decode(errors='replace')[-LOG_TAIL_CHARS:].strip()}"
    return str(error)


def write_files(target: Path) -> None:
    """Write a model directory, which gets its name only when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        whole = Path(scratch) / target.name
        subprocess.run(conversion(target, whole), capture_output=True, check=True)
        shutil.move(whole, target)


def read_files(directory: Path) -> None:
    """Read all files of a directory, so that they are in the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            while file.read(READ_CHUNK_BYTES):
                pass


def chosen(names: Iterable[str], text: str, option: str) -> list[str]:
    """Return the names listed in an option, in the order of `names`.

    Raises:
        SystemExit: one of them is unknown.
    """
    known, wanted = list(names), text.split(",")
    for name in wanted:
        if name not in known:
            raise SystemExit(f"--{option} has {name!r}; it must be one of {', '.join(known)}")
    return [name for name in known if name in wanted]


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, names in (
        ("engines", tuple(KINDS)),
        ("precisions", PRECISIONS),
        ("workloads", tuple(WORKLOADS)),
    ):
        everything = ",".join(names)
        result.add_argument(f"--{option}", default=everything, help=f"any of {everything} (default: all)")
    result.add_argument("--shape", choices=SHAPES, default="0.6b", help="default: 0.6b")
    result.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds per workload, except the long one (default: 3)",
    )
    result.add_argument("--starts", type=int, default=2, help="number of starts of each engine (default: 2)")
    result.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return result


def main() -> None:
    """Measure and print."""
    options, progress = parser().parse_args(), Console(stderr=True)
    # Otherwise, stopped workers would be left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engines = chosen(KINDS, options.engines, "engines")
    workloads = [WORKLOADS[name] for name in chosen(WORKLOADS, options.workloads, "workloads")]
    results: Figures = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "shape": options.shape,
        "precisions": {},
    }
    for precision in chosen(PRECISIONS, options.precisions, "precisions"):
        taking_part = [name for name in engines if precision in KINDS[name].models]
        comparison = Comparison(options.shape, precision, taking_part, progress)
        results["precisions"][precision] = comparison.figures
        comparison.run(workloads, rounds=options.rounds, starts=options.starts)
        if options.json:  # after each precision: the next may take an hour
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    report(results)


def report(results: Figures) -> None:
    """Print the tables, and the versions they were measured with."""
    console = Console()
    console = Console(width=max(console.width, TABLE_WIDTH))
    for table in tables(results):
        console.print(table)
    for line in (*failures(results), *disagreements(results)):
        console.print(line, markup=False, highlight=False)
    versions: dict[str, str] = {}
    for figures in results["precisions"].values():
        for entry in figures["engines"].values():
            versions |= entry["versions"]
    words = [results["date"], *(f"{name} {version}" for name, version in versions.items())]
    console.print(", ".join(words), f"Python {results['python']}, {results['cores']} cores", sep=", ")


if __name__ == "__main__":
    main()
