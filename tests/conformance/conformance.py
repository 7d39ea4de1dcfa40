"""Which row of which specification is shown by which test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

import datadist_rows
import paged_cache_rows
import pytest
import router_rows
import scheduler_rows

SPECS = {
    "scheduler interface and configuration": scheduler_rows,
    "paged attention cache": paged_cache_rows,
    "LLMDataDist": datadist_rows,
    "routers, sidecars and trainers": router_rows,
}
"""Modules with `ROWS` (names by section), `ELSEWHERE` (row: where it is shown) and `NOT_YET` (row: why)."""


def rows_of(spec: ModuleType) -> list[str]:
    return [row for rows in spec.ROWS.values() for row in rows]


def row(*names: str):
    """Mark a test as showing rows; a name that is no row is an error at once."""
    known = {name for spec in SPECS.values() for name in rows_of(spec)}
    unknown = set(names) - known
    if unknown:
        raise ValueError(f"no specification has the rows {sorted(unknown)}")

    def mark(test):
        for name in names:
            test = pytest.mark.row(name)(test)
        return test

    return mark


def tests_by_row(items: Iterable[pytest.Item]) -> dict[str, list[str]]:
    """Return the names of the tests that show each row, parameters left out."""
    found: dict[str, dict[str, None]] = {}
    for item in items:
        for marker in item.iter_markers("row"):
            name = f"{item.path.name}::{item.originalname}"
            found.setdefault(marker.args[0], {})[name] = None
    return {row_name: list(tests) for row_name, tests in found.items()}


def listing(items: Iterable[pytest.Item]) -> str:
    shown = tests_by_row(items)
    lines = []
    for title, spec in SPECS.items():
        lines.append(f"{title}: {len(rows_of(spec))} rows")
        for section, rows in spec.ROWS.items():
            lines.append(f"\n{section}")
            for name in rows:
                lines += _row_lines(name, shown.get(name, []), spec.ELSEWHERE, spec.NOT_YET)
    return "\n".join(lines)


def _row_lines(
    name: str, tests: list[str], elsewhere: Mapping[str, str], not_yet: Mapping[str, str]
) -> list[str]:
    if name in not_yet:
        tests = [f"NOT YET: {not_yet[name]}", *tests]
    if name in elsewhere:
        tests = [*tests, elsewhere[name]]
    first, *others = tests or ["NO TEST"]
    return [f"  {name}: {first}", *(f"  {'':{len(name)}}  {test}" for test in others)]
