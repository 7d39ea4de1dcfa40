"""The report of a benchmark, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quire import __version__
from quire.cli.bench.measurements import RequestRecord
from quire.cli.console import in_flags
from quire.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

STDOUT = Path("-")
SECRETS = ("api_key",)

FIGURES = {
    "completed": ("requests completed", "{:,}"),
    "failed": ("requests failed", "{:,}"),
    "seconds": ("seconds", "{:,.2f}"),
    "input_tokens": ("prompt tokens", "{:,}"),
    "cached_tokens": ("prompt tokens from the prefix cache", "{:,}"),
    "output_tokens": ("output tokens", "{:,}"),
    "requests_per_second": ("requests/s", "{:,.2f}"),
    "goodput_requests_per_second": ("requests/s that met all objectives", "{:,.2f}"),
    "output_tokens_per_second": ("output tokens/s", "{:,.1f}"),
    "total_tokens_per_second": ("prompt and output tokens/s", "{:,.1f}"),
    "fastest_seconds": ("fastest run, s", "{:,.4f}"),
}
"""Label and format of each single figure in the table, by its name in the results."""

DISTRIBUTIONS = {
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per output token",
    "itl_seconds": "inter-token latency",
    "latency_seconds": "end-to-end latency",
    "batch_seconds": "time per batch",
    "per_token_seconds": "batch time per output token",
}
STATISTICS = ("mean", "median", "p90", "p99")


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """The settings and results of a benchmark.

    Args:
        benchmark: its name.
        model: name of the model.
        settings: the configurations and values it was run with.
        results: figures by name; times in seconds.
        records: records of each request, or None if they were not requested.
    """

    benchmark: str
    model: str
    settings: dict[str, Any]
    results: dict[str, Any]
    records: Sequence[RequestRecord] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as data that JSON can represent."""
        data: dict[str, Any] = {
            "benchmark": self.benchmark,
            "model": self.model,
            "versions": {
                "quire": __version__,
                "torch": version("torch"),
                "python": platform.python_version(),
            },
            "machine": {"architecture": platform.machine(), "cpus": os.cpu_count()},
            "settings": {name: _json_value(value) for name, value in self.settings.items()},
            "results": self.results,
        }
        if self.records is not None:
            data["requests"] = [record.as_dict() for record in self.records]
        return data


def require_writable(target: Path | None, flag: str) -> None:
    """Raise `ConfigError` if `target` cannot be written; checked before the benchmark runs, not after."""
    if target is None or target == STDOUT:
        return
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise ConfigError(
            f"cannot write {flag} {target}: it is a directory, or its folder is missing or read-only"
        )


def write_report(report: BenchmarkReport, target: Path | None) -> None:
    """Write JSON to `target` if there is one, and print the table unless that is stdout."""
    text = json.dumps(report.as_dict(), indent=2, allow_nan=False)
    if target == STDOUT:
        typer.echo(text)
        return
    if target is not None:
        target.write_text(text + "\n", encoding="utf-8")
    from rich.console import Console

    Console(highlight=False, markup=False).print(*tables(report))


def tables(report: BenchmarkReport) -> list[RenderableType]:
    """Return what is printed: single figures, distributions in milliseconds, and warnings."""
    from rich import box
    from rich.table import Table

    title = f"bench {report.benchmark} of {report.model}"
    single = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    single.add_column()
    single.add_column(justify="right")
    for name, (label, form) in FIGURES.items():
        if name in report.results:
            single.add_row(label, form.format(report.results[name]))
    spread = Table("milliseconds", box=box.SIMPLE_HEAD)
    for statistic in STATISTICS:
        spread.add_column(statistic, justify="right")
    for name, label in DISTRIBUTIONS.items():
        values = report.results.get(name)
        if values is not None:
            spread.add_row(label, *(f"{values[statistic] * 1000:,.2f}" for statistic in STATISTICS))
    return [*(table for table in (single, spread) if table.rows), *result_warnings(report.results)]


def result_warnings(results: dict[str, Any]) -> list[str]:
    """Return warnings about requests that were clip_shape, ended early or failed."""
    said = []
    workload = results.get("workload", {})
    if workload.get("num_clipped"):
        said.append(
            f"{workload['num_clipped']:,} of {workload['num_requests']:,} requests were shortened to fit "
            "the longest sequence of the model; see --scale and --max-model-len"
        )
    if results.get("ended_early"):
        said.append(
            f"{results['ended_early']:,} requests ended before their output had the requested length: "
            "the server does not support ignore_eos"
        )
    if results.get("failed"):
        first = in_flags(results["first_error"])
        said.append(f"{results['failed']:,} requests failed; the first error: {first}")
    return said


def _json_value(value: Any) -> Any:
    """Return a setting as JSON can represent it, without secrets; infinity becomes a string."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _json_value(part) for name, part in fields.items() if name not in SECRETS}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return [_json_value(part) for part in value]
    return value if isinstance(value, str | int | float | None) else repr(value)
