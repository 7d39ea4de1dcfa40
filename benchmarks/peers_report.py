"""The tables of the comparison, from the measurements of `peers.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peers_engines import KINDS
from peers_workload import PRECISIONS, WORKLOADS, Workload
from rich.table import Table

OURS = "quire"
OUR_INT8 = "quire-int8"
NOTHING = "-"
LEAST_AGREEMENT = 0.5  # of first tokens
FEWEST_COMPARED = 16  # with few tokens, rounding may change all

Figures = dict[str, Any]


def rates(workload: Workload, times: dict[str, list[float]]) -> dict[str, float]:
    """Return each engine's tokens per second in its best round, from its seconds in all rounds."""
    return {engine: workload.counted_tokens / min(seconds) for engine, seconds in times.items() if seconds}


def best_peer(values: dict[str, float], *, least: bool = False) -> tuple[str, float] | None:
    """Return the name and value of the best engine other than Quire's; None if there is none."""
    peers = [(value, engine) for engine, value in values.items() if not engine.startswith(OURS)]
    if not peers:
        return None
    value, engine = (min if least else max)(peers)
    return engine, value


def ratio(values: dict[str, float], *, least: bool = False) -> str:
    """Return Quire's value over the best peer's; `least`: the smallest is the best."""
    best = best_peer(values, least=least)
    return versus(values, best[0]) if best else NOTHING


def versus(values: dict[str, float], engine: str) -> str:
    """Return Quire's value over that of another engine."""
    return f"{values[OURS] / values[engine]:.2f}x" if {OURS, engine} <= values.keys() else NOTHING


def tables(results: Figures) -> Iterator[Table]:
    """Yield the tables of each precision: rates, then start-up and memory."""
    for precision in PRECISIONS:
        figures = results["precisions"].get(precision)
        if figures is not None:
            yield rate_table(results["shape"], precision, figures)
            yield cost_table(results["shape"], precision, figures)


def rate_table(shape: str, precision: str, figures: Figures) -> Table:
    """Return tokens per second of every engine, and the share of the limit of Quire and the best peer."""
    engines, machine = list(figures["engines"]), figures["machine"]
    table = Table(
        title=f"{shape}, {precision}, tokens/s; limits of {machine['bandwidth'] / 1e9:.1f} GB/s and "
        + " and ".join(f"{rate / 1e9:.0f} G{name}op/s" for name, rate in machine["gemm_rate"].items())
    )
    table.add_column("requests x prompt/output", no_wrap=True)
    headings = [KINDS[engine].label for engine in engines]
    ratios = ["Quire / best peer", *(["Quire / its int8"] if OUR_INT8 in engines else [])]
    for heading in (*headings, *ratios, "limit", "Quire / limit", "best peer / limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, entry in figures["workloads"].items():
        workload = WORKLOADS[name]
        reached, limit = rates(workload, entry["seconds"]), workload.counted_tokens / entry["limit_seconds"]
        best = best_peer(reached)
        shares = [reached.get(OURS), best[1] if best else None]
        table.add_row(
            name + (" (all tokens)" if workload.counts_prompts else ""),
            *(f"{reached[engine]:.1f}" if engine in reached else NOTHING for engine in engines),
            ratio(reached),
            *([versus(reached, OUR_INT8)] if OUR_INT8 in engines else []),
            f"{limit:.1f}",
            *(f"{share / limit:.0%}" if share else NOTHING for share in shares),
        )
    return table


def cost_table(shape: str, precision: str, figures: Figures) -> Table:
    """Return the start-up time and the peak memory of each engine."""
    engines = figures["engines"]
    table = Table(title=f"{shape}, {precision}, start-up and memory")
    table.add_column("", no_wrap=True)
    for heading in (*(KINDS[engine].label for engine in engines), "Quire / best peer"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = {
        "first start, s": {
            name: entry["start_seconds"][0] for name, entry in engines.items() if entry["start_seconds"]
        },
        "next start, s": {
            name: entry["start_seconds"][-1] for name, entry in engines.items() if entry["start_seconds"]
        },
        "peak memory, GB": {
            name: entry["peak_bytes"] / 1e9 for name, entry in engines.items() if entry["peak_bytes"]
        },
    }
    for label, values in rows.items():
        cells = (f"{values[name]:.2f}" if name in values else NOTHING for name in engines)
        table.add_row(label, *cells, ratio(values, least=True))
    return table


def failures(results: Figures) -> Iterator[str]:
    """Yield a line with the reason for every engine that failed."""
    for precision, figures in results["precisions"].items():
        for name, entry in figures["engines"].items():
            if entry["failure"]:
                yield f"{KINDS[name].label} in {precision}: {entry['failure']}"


def disagreements(results: Figures) -> Iterator[str]:
    """Yield a line for every engine whose first tokens mostly differ from those of the first engine.

    Rounding changes some of them; a wrong conversion of the model changes nearly all.
    """
    for precision, figures in results["precisions"].items():
        for engine in figures["engines"]:
            entries = figures["workloads"].values()
            same = sum(entry["same_first_tokens"].get(engine, 0) for entry in entries)
            compared = sum(entry["first_tokens"].get(engine, 0) for entry in entries)
            if compared >= FEWEST_COMPARED and same < LEAST_AGREEMENT * compared:
                yield f"{KINDS[engine].label} in {precision}: only {same} of {compared} first tokens agree"
