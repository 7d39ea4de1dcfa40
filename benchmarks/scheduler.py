"""Compares Quire's scheduler with vLLM's v1 `Scheduler`, without a model, on the same work.

`scheduler_quire.py` and `scheduler_vllm.py`, each with its own interpreter, run every measurement
alternately, in several rounds, so that drift of the machine affects both. Figures are medians over rounds, of
medians over steps. Requests have 512 prompt tokens, all different (no prefix hits), and 128 output tokens (10
under churn, 1 where only the prompt matters); blocks have 16 tokens; prefix caching is on. Measured are

- decode: `schedule()` and `update_from_output()` per running request and step, while all requests decode
  and none starts or ends; in each step, a sixteenth of them starts a block and a sixteenth fills one;
- chunks: the same, with 512 requests that decode and 512 that compute 64 tokens within their prompt;
- mixed: the same, and in each step 64 prompts start and 64 end;
- churn: 1,024 running requests, a tenth of which ends and is replaced per step, without and with
  `add_request()`;
- caching: the additional cost of prefix caching in a decode step of 1,024 requests;
- add: constructing a request, with the hashes of its prompt's blocks, and `add_request()`;
- encode: encoding the outputs of a decode step of 1,024 requests as a message for the front end.

    make bench-scheduler
    python benchmarks/scheduler.py [--rounds 3] [--running 64 256 1024 4096] [--only decode churn] [--json]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scheduler_workload import chosen_names, parser

HERE = Path(__file__).parent
VLLM_PYTHON = HERE.parent / ".peers" / "vllm" / "bin" / "python"
TABLE_WIDTH = 126
LABELS = {
    "chunks": "chunks, 512 + 512",
    "mixed": "mixed, 512 + 512",
    "churn": "churn, 10 % of 1,024",
    "caching": "caching, 1,024",
    "add": "add, 512 tokens, each",
    "encode": "encode, 1,024 outputs, total",
}

Round = dict[str, Any]


class Side:
    """The process of one scheduler, which runs measurements by name."""

    def __init__(self, python: str, script: str) -> None:
        self._command = [python, str(HERE / script), "--stdin"]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self.version: str = self._read()["version"]

    def measure(self, name: str) -> Round:
        """Run one measurement by name and return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process by closing its input."""
        self._process.communicate()
        self._errors.close()

    def _read(self) -> Round:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries may print, too
                result: Round = json.loads(line)
                return result
        self._errors.seek(0)
        status, errors = self._process.wait(), self._errors.read()[-4000:]
        raise SystemExit(f"{' '.join(self._command)} ended with status {status}:\n{errors}")


def run_rounds(sides: tuple[Side, Side], options: Namespace, console: Console) -> list[tuple[Round, Round]]:
    """Run all measurements on both sides alternately; return both sides' figures for each round."""
    rounds: list[tuple[Round, Round]] = [({}, {}) for _ in range(options.rounds)]
    for number, results in enumerate(rounds, start=1):
        for name in chosen_names(options):
            with console.status(f"round {number} of {options.rounds}: {name}"):
                for side, result in zip(sides, results, strict=True):
                    result.update(side.measure(name))
    return rounds


def rows_of(result: Round) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield (label, unit, figures) for each row of the table, from one round of one side."""
    for name, figures in result.items():
        label = LABELS.get(name) or f"decode, {int(name.split()[1]):,} running"
        if name == "caching":
            yield label, "us", figures
            yield label + ", share", "%", {"total": 100 * figures["share"]}
        elif name == "encode":
            yield label, "ms", figures
        else:
            yield label, "us", figures
        if "with_add" in figures:
            yield label + ", with add", "us", {"total": figures["with_add"]}


def table_of(rounds: list[tuple[Round, Round]], title: str) -> Table:
    """Return the comparison: medians over rounds, their ratio, and the range of the ratio over rounds."""
    table = Table(title=title)
    for heading in ("", "unit"):
        table.add_column(heading, no_wrap=True)
    for heading in ("Quire", "schedule", "update", "vLLM", "schedule", "update", "vLLM / Quire", "range"):
        table.add_column(heading, justify="right", no_wrap=True)
    sides = zip(*([list(rows_of(side)) for side in entry] for entry in rounds), strict=True)
    quire_rows, vllm_rows = (list(zip(*side, strict=True)) for side in sides)
    for ours, theirs in zip(quire_rows, vllm_rows, strict=True):
        label, unit, _ = ours[0]
        cells = figures_of([row[2] for row in ours]) + figures_of([row[2] for row in theirs])
        pairs = [(mine[2]["total"], other[2]["total"]) for mine, other in zip(ours, theirs, strict=True)]
        table.add_row(label, unit, *cells, *(("", "") if unit == "%" else ratio_of(pairs)))
    return table


def figures_of(rounds: list[dict[str, float]]) -> list[str]:
    """Return the medians over rounds of both calls together, and of each where measured."""
    return [
        f"{statistics.median(figures[name] for figures in rounds):.2f}" if name in rounds[0] else ""
        for name in ("total", "schedule", "update")
    ]


def ratio_of(pairs: list[tuple[float, float]]) -> tuple[str, str]:
    """Return vLLM's time relative to Quire's, from (Quire's, vLLM's) pairs: of the medians, and the range."""
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    if min(map(min, pairs)) <= 0:  # a difference smaller than the noise
        return "", ""
    ratios = [other / mine for mine, other in pairs]
    return f"{theirs / ours:.1f}x", f"{min(ratios):.1f}-{max(ratios):.1f}"


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--rounds", type=int, default=3, help="number of rounds, in which both sides alternate (default: 3)"
    )
    arguments.add_argument(
        "--vllm-python",
        default=str(VLLM_PYTHON),
        help="Python interpreter of vLLM's environment (default: .peers)",
    )
    arguments.add_argument("--json", action="store_true", help="print every round's figures as JSON")
    options = arguments.parse_args()
    if not Path(options.vllm_python).exists():
        raise SystemExit(f"{options.vllm_python} does not exist; `make bench-scheduler` sets it up")
    sides = Side(sys.executable, "scheduler_quire.py"), Side(options.vllm_python, "scheduler_vllm.py")
    rounds = run_rounds(sides, options, Console(stderr=True))
    for side in sides:
        side.close()
    versions = [side.version for side in sides]
    if options.json:
        print(json.dumps({"versions": versions, "rounds": rounds}))
        return
    console = Console()
    table = table_of(rounds, f"{' beside '.join(versions)}, medians of {options.rounds} rounds")
    Console(width=max(console.width, TABLE_WIDTH)).print(table)


if __name__ == "__main__":
    main()
