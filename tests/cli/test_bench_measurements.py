"""`quire bench`: what is made of measured times, the report, and the plot."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from quire.cli.bench.commands import draw, require_drawable
from quire.cli.bench.measurements import RequestRecord, rates, served_figures, summary
from quire.cli.bench.report import (
    DISTRIBUTIONS,
    FIGURES,
    STATISTICS,
    BenchmarkReport,
    require_writable,
    tables,
)
from quire.cli.bench_options import ArrivalConfig, TargetConfig
from quire.errors import ConfigError

RECORDS = [
    RequestRecord(0.0, 10, 4, sent=1.0, output_times=[1.5, 1.6, 2.0, 2.1], ended=2.2, num_output_tokens=4),
    RequestRecord(0.5, 20, 1, 0.5, [0.75], 1.0, num_cached_tokens=16, num_output_tokens=1),
    RequestRecord(2.0, 30, 8, 2.0, [3.0, 3.5], 4.0, num_output_tokens=6),  # outputs of several tokens
    RequestRecord(2.0, 40, 8, 2.0, ended=2.5, error="the queue is full"),
]


def percentile_by_hand(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentiles(count: int):
    values = np.random.default_rng(count).exponential(size=count).tolist()
    found = summary(iter(values))
    assert found == pytest.approx(
        {
            "mean": math.fsum(values) / count,
            "median": percentile_by_hand(values, 50),
            "p90": percentile_by_hand(values, 90),
            "p99": percentile_by_hand(values, 99),
        }
    )


def test_no_values_have_no_summary():
    assert summary([]) is None


def test_times_of_a_request():
    first, single, chunked, _ = RECORDS
    assert (first.ttft, first.latency) == pytest.approx((0.5, 1.2))
    assert first.tpot == pytest.approx(0.6 / 3)
    assert first.itl == pytest.approx([0.1, 0.4, 0.1])
    assert (single.tpot, single.itl) == (None, [])
    assert chunked.tpot == pytest.approx(0.5 / 5)


def test_figures_leave_out_what_failed():
    figures = served_figures(RECORDS, {})
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert figures["first_error"] == "the queue is full"
    assert figures["ended_early"] == 1
    assert figures["seconds"] == 4.0
    assert (figures["input_tokens"], figures["cached_tokens"], figures["output_tokens"]) == (60, 16, 11)
    assert figures["requests_per_second"] == 3 / 4
    assert figures["output_tokens_per_second"] == 11 / 4
    assert figures["total_tokens_per_second"] == 71 / 4
    assert figures["ttft_seconds"]["mean"] == pytest.approx((0.5 + 0.25 + 1.0) / 3)
    assert figures["itl_seconds"]["mean"] == pytest.approx((0.1 + 0.4 + 0.1 + 0.5) / 4)
    assert "goodput_requests_per_second" not in figures


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        (("ttft:600",), 2),
        (("ttft:600", "tpot:150"), 1),
        (("tpot:1",), 1),  # one token has no time per token to exceed
        (("latency:100000",), 3),
        (("latency:1", "ttft:100000"), 0),
    ],
)
def test_goodput_counts_requests_that_meet_all_objectives(objectives: tuple[str, ...], met: int):
    figures = served_figures(RECORDS, ArrivalConfig(goodput=objectives).objectives())
    assert figures["goodput_requests_per_second"] == met / 4.0


def test_rates():
    assert rates(3, 10, 20, 4.0) == {
        "requests_per_second": 0.75,
        "output_tokens_per_second": 5.0,
        "total_tokens_per_second": 7.5,
    }


def report(**settings: Any) -> BenchmarkReport:
    results = {
        "workload": {"num_clipped": 2, "num_requests": 4},
        **served_figures(RECORDS, ArrivalConfig(goodput=("ttft:600",)).objectives()),
    }
    return BenchmarkReport("serve", "mini", settings, results, RECORDS)


def test_the_table_shows_every_figure_of_the_json():
    made = report()
    stream = io.StringIO()
    Console(file=stream, width=200).print(*tables(made))
    text = stream.getvalue()
    results = json.loads(json.dumps(made.as_dict()))["results"]
    for name, value in results.items():
        if name in FIGURES:
            label, form = FIGURES[name]
            assert any(label in line and form.format(value) in line for line in text.splitlines())
        elif name in DISTRIBUTIONS:
            (line,) = (line for line in text.splitlines() if DISTRIBUTIONS[name] in line)
            assert [f"{value[statistic] * 1000:,.2f}" for statistic in STATISTICS] == line.split()[-4:]
        else:
            assert name in ("workload", "first_error", "ended_early")
    assert "2 of 4 requests were shortened" in text
    assert "1 requests ended before" in text
    assert "1 requests failed; the first error: the queue is full" in text


def test_json_holds_settings_and_records_but_no_key():
    target = TargetConfig(base_url="http://host/v1", api_key="secret")
    text = json.dumps(report(arrivals=ArrivalConfig(), target=target).as_dict(), allow_nan=False)
    assert "secret" not in text
    data = json.loads(text)
    assert data["settings"]["arrivals"]["request_rate"] == "inf"
    assert data["requests"][0]["output_times"] == [1.5, 1.6, 2.0, 2.1]
    assert data["versions"].keys() == {"quire", "torch", "python"}


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_plot_is_drawn(tmp_path: Path, suffix: str):
    target = tmp_path / f"latencies{suffix}"
    require_drawable(target)
    draw(RECORDS, target, "mini")
    begin = target.read_bytes()[:8]
    assert begin == b"\x89PNG\r\n\x1a\n" if suffix == ".png" else begin.startswith(b"<?xml")


def test_a_plot_of_nothing_but_failures_is_drawn(tmp_path: Path):
    draw(RECORDS[3:], tmp_path / "empty.svg", "mini")
    assert (tmp_path / "empty.svg").stat().st_size


def test_a_plot_needs_a_known_format(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--plot is .*x\.gif; it must end in one of \.svg, \.png, \.pdf"):
        require_drawable(tmp_path / "x.gif")


def test_a_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "quire\[bench\]"'):
        require_drawable(tmp_path / "x.svg")
    assert "matplotlib.pyplot" not in sys.modules


def test_files_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path):
    for target in (tmp_path, tmp_path / "missing" / "x.json"):
        with pytest.raises(ConfigError, match="cannot write --json"):
            require_writable(target, "--json")
    require_writable(Path("-"), "--json")
