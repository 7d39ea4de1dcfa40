"""The built-in model's held-out questions, for benchmarks."""

from __future__ import annotations

from pathlib import Path

from quire.cli.commands.evaluate import EVAL_FILE, Case, read_cases, select
from quire.models.checkpoints.hub import resolve_model


def eval_cases(task: str, count: int) -> list[Case]:
    """Return the first questions of a task, at most `count`."""
    return select(read_cases(Path(resolve_model("mini")) / EVAL_FILE), [task], count)
