"""Plots of a run under load: the distribution of latencies, and the time to first token over time."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from quire.cli.bench.measurements import RequestRecord
from quire.cli.bench.report import require_writable
from quire.errors import ConfigError

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
