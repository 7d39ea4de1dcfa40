"""Compares Quire's embeddings with sentence-transformers, ONNX Runtime, vLLM and llama.cpp on the CPU.

Models have random weights in the shapes of published ones. Texts are random token ids, the same for every
engine; each is computed to a normalized row, the mean over the tokens, or for Qwen3-Embedding the last one.
Engines are processes with environments of their own and two threads, and take turns; all but the one that is
measured are stopped. Every workload is warmed up, then measured in rounds.

The figure of a workload is texts per second in an engine's best round, and for single texts also the time
that 99 of 100 take at most. The limit is the layers' matrix products at the rate that the machine was
measured to have for the precision; attention comes on top of these.

    make bench-embeddings
    python benchmarks/embedding_peers.py [--shapes minilm-l6] [--engines quire,llamacpp] [--precisions bf16]
                                         [--workloads 1x16,512x16-512] [--most-texts 128] [--seconds 3]
                                         [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from embedding_shapes import BATCH_TEXTS, SHAPES, WORKLOADS, Workload
from peers_engines import HERE, MODELS, PEERS, interpreter
from rich.console import Console
from rich.table import Table

PRECISIONS = {
    "bf16": ("quire", "sentence-transformers", "vllm", "llamacpp"),
    "int8": ("quire", "onnxruntime", "llamacpp"),
}
ENVIRONMENTS = {
    "sentence-transformers": "sentence",
    "onnxruntime": "sentence",
    "vllm": "vllm",
    "llamacpp": "llamacpp",
}
LOGS = PEERS / "logs"
MAX_CALLS = 1_000
LEAST_COSINE = 0.98  # of the first rows of two engines, both rounded


def files_of(shape: str, engine: str, precision: str) -> Path:
    """Return an engine's model."""
    directory = MODELS / shape
    names = {"onnxruntime": "model-int8.onnx", "llamacpp": f"model-{precision}.gguf"}
    return directory / names.get(engine, "checkpoint")


def write_files(shape: str, engine: str, precision: str) -> Path:
    """Return an engine's model, written first where it is missing."""
    path = files_of(shape, engine, precision)
    if path.exists():
        return path
    if engine == "onnxruntime":
        run(interpreter("sentence"), "embedding_files.py", "onnx", files_of(shape, "quire", ""), path)
    elif engine == "llamacpp":
        form = {"int8": "q8_0"}.get(precision, precision)
        run(interpreter("llamacpp"), "peers_gguf.py", files_of(shape, "quire", ""), form, path)
    else:
        run(sys.executable, "embedding_files.py", "checkpoint", shape, path)
    return path


def run(python: str, script: str, *arguments: object) -> None:
    """Run one of this folder's programs."""
    subprocess.run([python, str(HERE / script), *map(str, arguments)], check=True, capture_output=True)


class Worker:
    """A running `embedding_worker.py`.

    Raises:
        RuntimeError: the worker has ended; the message has the end of its log.
    """

    def __init__(self, engine: str, model: Path, precision: str) -> None:
        self._log = LOGS / f"embedding-{model.parent.name}-{engine}-{precision}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment = ENVIRONMENTS.get(engine)
        python = interpreter(environment) if environment else sys.executable
        with self._log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [python, str(HERE / "embedding_worker.py"), engine, str(model), precision],
                env=os.environ | variables_of(engine),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.version: str = self._answer()["version"]

    def embed(self, texts: list[list[int]]) -> tuple[float, list[float]]:
        """Return the seconds that texts take, and the first one's row."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(texts) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["row"]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run within the context only."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._log.read_text(encoding="utf-8", errors="replace")[-1_000:])
        answer: dict[str, Any] = json.loads(line)
        return answer


def variables_of(engine: str) -> dict[str, str]:
    """Return the environment variables that an engine is run with."""
    if engine != "vllm":
        return {"HF_HUB_OFFLINE": "1"}
    patterns = "tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4", "lib/libiomp5.so"
    libraries = [str(found) for pattern in patterns for found in (PEERS / "vllm").glob(pattern)]
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": " ".join(libraries),
    }


@dataclasses.dataclass
class Measured:
    """What an engine needed for a workload, in seconds."""

    best: float
    p99: float | None  # of single texts


class Comparison:
    """The engines of a shape and precision.

    Args:
        shape: of the model.
        precision: of the weights.
        engines: to compare, of those that take part.
        console: says what fails.
    """

    def __init__(self, shape: str, precision: str, engines: list[str], console: Console) -> None:
        self._console = console
        self.workers: dict[str, Worker] = {}
        for engine in engines:
            try:
                self.workers[engine] = Worker(engine, write_files(shape, engine, precision), precision)
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", b"") or b""
                self._leave_out(engine, f"{error} {said.decode(errors='replace')[-1_000:]}")
                continue
            with self.workers[engine].awake():
                pass

    def measure(self, workload: Workload, seconds: float) -> dict[str, Measured]:
        """Return what each engine needs; those that fail are left out from then on."""
        results, rows = {}, {}
        for engine, worker in list(self.workers.items()):
            try:
                with worker.awake():
                    results[engine], rows[engine] = _times(worker, workload, seconds)
            except RuntimeError as error:
                self._leave_out(engine, str(error))
        for engine, row in rows.items():
            cosine = float(np.dot(row, rows["quire"])) if "quire" in rows else 1.0
            if not cosine > LEAST_COSINE:
                self._console.print(f"{engine}'s row of {workload.name} is another: cosine {cosine:.3f}")
        return results

    def close(self) -> None:
        """End all engines."""
        for worker in self.workers.values():
            worker.kill()

    def _leave_out(self, engine: str, reason: str) -> None:
        self._console.print(f"{engine} is left out: {reason}", markup=False)
        if engine in self.workers:
            self.workers.pop(engine).kill()


def _times(worker: Worker, workload: Workload, seconds: float) -> tuple[Measured, list[float]]:
    """Warm up, then repeat for `seconds`; single texts up to five times as long, for their p99."""
    _, row = worker.embed(workload.texts("0")[:BATCH_TEXTS])
    is_single = workload.num_texts == 1
    times: list[float] = []
    ends = time.monotonic() + seconds * (5 if is_single else 1)
    while not times or (time.monotonic() < ends and len(times) < MAX_CALLS):
        times.append(worker.embed(workload.texts(str(len(times) + 1)))[0])
    p99 = sorted(times)[math.ceil(0.99 * len(times)) - 1] if is_single else None
    return Measured(min(times), p99), row


def products_of(shape: str) -> int:
    """Return the operations of a token in the layers' matrix products."""
    import torch
    from embedding_files import random_model

    with torch.device("meta"):
        model = random_model(shape)
    matrices = (
        weights for name, weights in model.named_parameters() if "embed" not in name and weights.ndim == 2
    )
    return 2 * sum(weights.numel() for weights in matrices)


def measured_rates() -> dict[str, float]:
    """Return the machine's operations per second by precision."""
    command = [sys.executable, str(HERE / "peers_machine.py")]
    rates: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[
        "gemm_rate"
    ]
    return rates


def table_of(
    title: str,
    engines: list[str],
    workloads: list[Workload],
    figures: dict[str, dict[str, Measured]],
    limits: dict[str, float],
) -> Table:
    """Return a table of texts per second, Quire over the best peer, and its share of the limit."""
    table = Table(title=title)
    for column in ("texts", *engines, "Quire / best peer", "p99 of one", "share of the limit"):
        table.add_column(column, justify="right")
    for workload in workloads:
        measured = figures[workload.name]
        rates = {engine: workload.num_texts / entry.best for engine, entry in measured.items()}
        peers = [rate for engine, rate in rates.items() if engine != "quire"]
        both = "quire" in rates and peers
        singles = [entry.p99 for engine, entry in measured.items() if entry.p99 and engine != "quire"]
        own = measured.get("quire")
        if measured:
            table.add_row(
                workload.name,
                *(f"{rates[engine]:,.1f}" if engine in rates else "-" for engine in engines),
                f"{rates['quire'] / max(peers):.2f}x" if both else "-",
                f"{own.p99 * 1e3:.1f} / {min(singles) * 1e3:.1f} ms" if own and own.p99 and singles else "-",
                f"{limits[workload.name] / own.best:.0%}" if own else "-",
            )
    return table


def main() -> None:
    """Measure what the command line asks for, and print tables."""
    options = parsed()
    console = Console(width=140)
    rates = measured_rates()
    console.print(", ".join(f"{name} {rate / 1e9:.0f} Gop/s" for name, rate in rates.items()))
    record: dict[str, Any] = {"rates": rates, "figures": {}}
    chosen = [workload for workload in WORKLOADS if workload.name in options.workloads]
    capped = (
        dataclasses.replace(workload, num_texts=min(workload.num_texts, options.most_texts))
        for workload in chosen
    )
    workloads = list(dict.fromkeys(capped))  # some may have become the same
    for shape in options.shapes:
        products = products_of(shape)
        for precision in options.precisions:
            engines = [engine for engine in PRECISIONS[precision] if engine in options.engines]
            comparison = Comparison(shape, precision, engines, console)
            figures: dict[str, dict[str, Measured]] = {}
            try:
                for workload in workloads:
                    figures[workload.name] = comparison.measure(workload, options.seconds)
            finally:
                comparison.close()
            limits = {
                workload.name: products * sum(map(len, workload.texts("1"))) / rates[precision]
                for workload in workloads
            }
            console.print(table_of(f"{shape}, {precision}, texts/s", engines, workloads, figures, limits))
            record["figures"][f"{shape} {precision}"] = {
                name: {engine: vars(entry) for engine, entry in row.items()} for name, row in figures.items()
            }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1), encoding="utf-8")


def parsed() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every_engine = sorted({engine for engines in PRECISIONS.values() for engine in engines})
    for name, values in (
        ("shapes", list(SHAPES)),
        ("engines", every_engine),
        ("precisions", list(PRECISIONS)),
        ("workloads", [workload.name for workload in WORKLOADS]),
    ):
        parser.add_argument(f"--{name}", type=lambda given: given.split(","), default=values)
    parser.add_argument("--most-texts", type=int, default=512, help="of a workload (default: 512)")
    parser.add_argument("--seconds", type=float, default=3, help="for each engine and workload")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
