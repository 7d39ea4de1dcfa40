"""The commands `quire bench throughput`, `latency` and `serve`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.bench.measurements import RequestRecord
from quire.cli.bench.report import require_writable
from quire.cli.bench_options import ArrivalConfig, LatencyConfig, TargetConfig, WorkloadConfig
from quire.cli.console import EXIT_FAILURE
from quire.cli.manual import ManualCommand, ManualGroup
from quire.cli.options import config_options
from quire.config import EngineConfig
from quire.errors import ConfigError

MANUAL = """
Measure how fast an engine is.

Prompts are random tokens. Outputs have the requested length: end-of-sequence is ignored. The lengths of
known datasets are drawn from distributions with their published means.

Examples:
  quire bench throughput --dataset sharegpt          all requests at once, offline
  quire bench latency --batch-size 1                 one batch, repeatedly
  quire bench serve --request-rate 4                 Poisson arrivals, streamed
"""

app = typer.Typer(
    help=MANUAL,
    cls=ManualGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write settings and results to this file as JSON; - is stdout, instead of the table.",
    ),
]


@app.command(cls=ManualCommand)
@config_options(positional=("model",), workload=WorkloadConfig, engine=EngineConfig)
def throughput(
    workload: WorkloadConfig,
    engine: EngineConfig,
    *,
    rounds: Annotated[
        int,
        typer.Option(metavar="INT", min=1, help="Number of rounds of the same requests; the fastest counts."),
    ] = 1,
    json_file: JsonFile = None,
) -> None:
    """Run all requests at once, offline, and report requests and tokens per second.

    The engine runs in this process. The prefix cache is reset before each round, so that all rounds do the
    same work; requests of one round can still share prefixes.

    Examples:
      quire bench throughput
      quire bench throughput --num-prompts 16 --input-len 64 --output-len 128 --rounds 3
      quire bench throughput ./my-model --dataset mooncake --scale 0.1 --json figures.json
    """
    from quire.cli.bench.offline import measure_throughput
    from quire.cli.bench.report import BenchmarkReport, require_writable, write_report

    require_writable(json_file, "--json")
    results = measure_throughput(engine, workload, rounds)
    settings = {"workload": workload, "rounds": rounds, "engine": engine}
    write_report(BenchmarkReport("throughput", engine.model, settings, results), json_file)


@app.command(cls=ManualCommand)
@config_options(positional=("model",), batch=LatencyConfig, engine=EngineConfig)
def latency(batch: LatencyConfig, engine: EngineConfig, *, json_file: JsonFile = None) -> None:
    """Run one batch repeatedly, and report how long it takes.

    The engine runs in this process. The prefix cache is reset before each run, so that every run computes
    the whole batch.

    Examples:
      quire bench latency --batch-size 1
      quire bench latency ./my-model --input-len 1024 --output-len 1
    """
    from quire.cli.bench.offline import measure_latency
    from quire.cli.bench.report import BenchmarkReport, require_writable, write_report

    require_writable(json_file, "--json")
    results = measure_latency(engine, batch)
    write_report(
        BenchmarkReport("latency", engine.model, {"batch": batch, "engine": engine}, results), json_file
    )


@app.command(cls=ManualCommand)
@config_options(
    positional=("model",),
    workload=WorkloadConfig,
    arrivals=ArrivalConfig,
    target=TargetConfig,
    engine=EngineConfig,
)
def serve(
    workload: WorkloadConfig,
    arrivals: ArrivalConfig,
    target: TargetConfig,
    engine: EngineConfig,
    *,
    json_file: JsonFile = None,
    per_request: Annotated[
        bool, typer.Option("--per-request", help="Add the times of every request to the JSON.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Plot latencies to this .svg, .png or .pdf file (needs matplotlib)."
        ),
    ] = None,
) -> None:
    """Send requests as they arrive, and report the latencies that clients see.

    Reports time to first token (TTFT), time per output token after the first (TPOT), inter-token latency
    (ITL) and end-to-end latency, measured from when a request is sent. The engine runs in its own process,
    unless --base-url names a running server.

    Examples:
      quire bench serve --dataset sharegpt --request-rate 2
      quire bench serve --max-concurrency 8 --goodput ttft:200 --goodput tpot:50
      quire bench serve --base-url http://127.0.0.1:8000/v1 --request-rate 4 --plot latencies.svg
    """
    import uvloop

    from quire.cli.bench.commands import draw, require_drawable
    from quire.cli.bench.load import measure_serving
    from quire.cli.bench.measurements import served_figures
    from quire.cli.bench.report import BenchmarkReport, require_writable, write_report
    from quire.cli.bench.targets import open_target

    if per_request and json_file is None:
        raise ConfigError("--per-request adds to the JSON, so it needs --json FILE")
    require_writable(json_file, "--json")
    require_drawable(plot)
    loaded, records = uvloop.run(measure_serving(open_target(target, engine), workload, arrivals))
    results = {"workload": loaded.as_dict(), **served_figures(records, arrivals.objectives())}
    settings = {"workload": workload, "arrivals": arrivals, "target": target, "engine": engine}
    measured = records if per_request else None
    write_report(BenchmarkReport("serve", engine.model, settings, results, measured), json_file)
    if plot is not None:
        draw(records, plot, engine.model)
    if results["failed"]:
        raise typer.Exit(EXIT_FAILURE)


FORMATS = (".svg", ".png", ".pdf")
SIZE = (10.0, 4.0)  # inches


def require_drawable(target: Path | None) -> None:
    """Raise `ConfigError` if a plot of `target`'s format cannot be drawn, or matplotlib is missing."""
    if target is None:
        return
    if target.suffix not in FORMATS:
        raise ConfigError(f"--plot is {target}; it must end in one of {', '.join(FORMATS)}")
    require_writable(target, "--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('--plot needs matplotlib: pip install "quire[bench]"')


def draw(records: Sequence[RequestRecord], target: Path, model: str) -> None:
    """Plot the times of the requests that did not fail."""
    from matplotlib.figure import Figure

    done = [record for record in records if record.error is None]
    ttft = [record.ttft for record in done]
    latency = [record.latency for record in done]
    figure = Figure(figsize=SIZE, layout="constrained")
    figure.suptitle(f"{model}: {len(done):,} requests")
    shares, course = figure.subplots(1, 2)
    for values, label in ((ttft, "time to first token"), (latency, "end-to-end latency")):
        if values:
            shares.ecdf(values, label=label)
    shares.set(xlabel="seconds", ylabel="share of requests", ylim=(0, 1), xlim=(0, None))
    if done:
        shares.legend(loc="lower right")
    course.scatter([record.sent for record in done], ttft, s=12)
    course.set(xlabel="sent after (seconds)", ylabel="time to first token (seconds)", ylim=(0, None))
    figure.savefig(target)
