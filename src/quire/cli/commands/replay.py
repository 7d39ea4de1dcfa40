"""`quire replay`: run a recording again, or convert it to a trace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.console import EXIT_FAILURE, one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from quire.recording.replay import ReplayReport


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording, made with --record-path FILE.")],
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a trace that ui.perfetto.dev opens."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a recorded scheduler again, without the model, and compare every plan with the recorded one.

    The exit status is 1 if anything differs. A recording names the scheduler class that it was made with,
    and that class is run: replay only recordings that you trust.

    Examples:
      quire serve --record-path run.quire
      quire replay run.quire
      quire replay run.quire --perfetto trace.json
    """
    from quire.recording.file_format import Recording
    from quire.recording.perfetto import write_trace
    from quire.recording.replay import replay as replay_recording

    with one_line_errors():
        num_events = None if perfetto is None else write_trace(Recording(file), perfetto)
        report = replay_recording(file)
    if as_json:
        typer.echo(json.dumps(as_dict(file, report), indent=2))
    else:
        from rich.console import Console

        Console(highlight=False).print(report_table(file, report))
        if num_events is not None:
            typer.echo(f"{perfetto}: {num_events:,} events; open it at https://ui.perfetto.dev")
    if report.difference is not None:
        raise typer.Exit(EXIT_FAILURE)


def as_dict(file: Path, report: ReplayReport) -> dict[str, Any]:
    """Return the report as plain data."""
    return {"file": str(file), "same": report.difference is None, **dataclasses.asdict(report)}


def report_table(file: Path, report: ReplayReport) -> Table:
    """Return a table of the replay, and its first difference if any."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"Replay of {file}", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    rows: list[tuple[str, object]] = [
        ("scheduler", report.scheduler_cls),
        ("calls", f"{report.num_calls:,} in {report.seconds:,.1f} s when recorded"),
        ("steps", f"{report.num_steps:,}"),
        ("requests", f"{report.num_requests:,}"),
        ("tokens", f"{report.num_tokens:,}"),
        ("preemptions", f"{report.num_preemptions:,}"),
    ]
    if report.is_truncated:
        rows.append(("end", "truncated in the middle of a call"))
    found = report.difference
    if found is None:
        rows.append(("result", "identical, call by call"))
    else:
        rows += [
            ("result", f"differs at call {found.call}, {found.name}, after step {found.step}"),
            ("where", found.where),
            ("recorded", found.recorded),
            ("replayed", found.replayed),
        ]
    for name, value in rows:
        table.add_row(name, str(value))
    return table
