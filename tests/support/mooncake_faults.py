"""Stores of `fake_mooncake`: directories with a file for each block, and another for faults."""

from __future__ import annotations

from pathlib import Path

FAKE = Path(__file__).parent / "fake_mooncake"


def use_fake_mooncake(monkeypatch) -> None:
    """Let this process and those that it starts find the stand-in in place of Mooncake."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("PYTHONPATH", str(FAKE), prepend=":")


def blocks_in(store: Path) -> list[Path]:
    return sorted(store.glob("quire@*"))


def break_store(store: Path, faults: str) -> None:
    """Let the next calls do something else, see `fake_mooncake`; empty: nothing but their work."""
    new = store / "new-faults"
    new.write_text(faults)
    new.rename(store / "faults")
