"""No row of a specification is without a test, and nothing that the code has is without a row."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from conformance import SPECS, listing, rows_of

import quire.datadist
from quire.config import SchedulerConfig
from quire.kv.connectors.interface import KVConnector
from quire.scheduling import SchedulerInterface
from quire.status import FinishReason, RequestStatus


def shown_rows() -> set[str]:
    here = Path(__file__).parent
    files = [*here.glob("test_*_spec.py"), *(here.parent / "datadist").glob("test_*.py")]
    modules = [importlib.import_module(path.stem) for path in files]
    tests = [test for module in modules for name, test in vars(module).items() if name.startswith("test_")]
    return {mark.args[0] for test in tests for mark in getattr(test, "pytestmark", ()) if mark.name == "row"}


@pytest.mark.parametrize("title", SPECS)
def test_every_row_has_a_test(title):
    spec = SPECS[title]
    assert len(set(rows_of(spec))) == len(rows_of(spec)), "a row is there twice"
    assert set(rows_of(spec)) - shown_rows() - set(spec.ELSEWHERE) == set()
    assert set(spec.ELSEWHERE) | set(spec.NOT_YET) <= set(rows_of(spec))


def test_nothing_in_the_code_is_without_a_row():
    rows = set(rows_of(SPECS["scheduler interface and configuration"]))
    rows |= {name.split()[0].rstrip(":") for name in rows}
    for cls in (SchedulerInterface, KVConnector):
        assert {name for name in vars(cls) if not name.startswith("_")} <= rows
    assert {field.name for field in dataclasses.fields(SchedulerConfig)} <= rows
    assert {status.name for status in RequestStatus} <= rows
    assert {f"reason {reason}" for reason in FinishReason} <= rows
    assert set(quire.datadist.__all__) <= set(rows_of(SPECS["LLMDataDist"]))


def test_the_list_names_each_row_its_tests_and_what_is_missing(request, monkeypatch):
    monkeypatch.setitem(SPECS["scheduler interface and configuration"].NOT_YET, "watermark", "too dry")
    text = listing(request.session.items)
    assert all(f"  {name}: " in text for spec in SPECS.values() for name in rows_of(spec))
    assert "watermark: NOT YET: too dry" in text


def test_a_test_for_a_row_that_is_none_is_an_error():
    from conformance import row

    with pytest.raises(ValueError, match="no specification has the rows"):
        row("shedule")
