"""The benchmark of a Mooncake store, with the built-in model and Mooncake itself, where it is installed."""

from __future__ import annotations

import re

import mooncake_store
import pytest

from quire.kv.connectors.load_costs import LoadCosts

pytest.importorskip(
    "mooncake.store", reason="Mooncake is not installed, see make test-mooncake", exc_type=ImportError
)


@pytest.mark.programs
def test_another_engine_reads_what_one_has_stored_until_the_master_dies(monkeypatch, capsys):
    monkeypatch.setattr(LoadCosts, "prefers_loading", lambda *_: True)  # on a busy machine too
    monkeypatch.setattr(
        "sys.argv", ["mooncake_store.py", "--model", "mini", "--prompt-len", "128", "--rounds", "2"]
    )
    mooncake_store.main()  # compares all answers
    report = capsys.readouterr().out
    assert " 21 blocks read" in report
    assert re.search(r" [1-4] blocks read, [3-6] reads failed", report), "the fourth read kills the master"
