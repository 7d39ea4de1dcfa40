"""Turns typed in a terminal: lines, pasted text, Ctrl-C, and the file of earlier turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from quire.cli.commands.chat_terminal import (
    MAX_HISTORY_BYTES,
    MAX_KEPT_TURN,
    TerminalTurns,
    TurnHistory,
    history_file,
)

CTRL_C, CTRL_D, ALT_ENTER, CTRL_J, UP = "\x03", "\x04", "\x1b\r", "\n", "\x1b[A"


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "chat-history"


def turns(runner: asyncio.Runner, file: Path, keys: str) -> list[str | None]:
    """Return the turns that keys make; None: the user quits."""
    read: list[str | None] = []
    with create_pipe_input() as terminal, create_app_session(input=terminal, output=DummyOutput()):
        terminal.send_text(keys)
        reader = TerminalTurns(runner, file)
        while not read or read[-1] is not None:
            read.append(reader.read())
    return read


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("one\rtwo\r" + CTRL_D, ["one", "two", None]),
        (f"a{ALT_ENTER}b{CTRL_J}c\r{CTRL_D}", ["a\nb\nc", None]),
        (f"\x1b[200~def f():\r\n    pass\n\x1b[201~\r{CTRL_D}", ["def f():\n    pass\n", None]),
        (f"half{CTRL_C}one\r{CTRL_C}{CTRL_C}", ["one", None]),
        (f"{CTRL_C}{CTRL_C}", [None]),
    ],
    ids=["lines", "several lines", "paste", "Ctrl-C between", "Ctrl-C twice"],
)
def test_turns(keys: str, expected: list[str | None], runner: asyncio.Runner, file: Path):
    assert turns(runner, file, keys) == expected


def test_ctrl_c_says_how_to_quit(runner: asyncio.Runner, file: Path, capsys: pytest.CaptureFixture[str]):
    turns(runner, file, CTRL_C + CTRL_D)
    assert capsys.readouterr().err == "Ctrl-C again quits, as Ctrl-D does.\n"


def test_earlier_turns_are_kept_for_their_owner_only(runner: asyncio.Runner, file: Path):
    turns(runner, file, f"a{ALT_ENTER}b\r{CTRL_D}")
    assert file.stat().st_mode & 0o777 == 0o600
    assert turns(runner, file, f"{UP}\r{CTRL_D}") == ["a\nb", None]


def test_a_long_turn_is_not_kept(tmp_path: Path):
    history = TurnHistory(tmp_path / "chat-history")
    history.append_string("x" * (MAX_KEPT_TURN + 1))
    history.append_string("y" * MAX_KEPT_TURN)
    assert list(history.load_history_strings()) == ["y" * MAX_KEPT_TURN]
    assert len(history.get_strings()) == 2


def test_a_long_file_is_shortened_to_the_newest_turns(runner: asyncio.Runner, file: Path):
    file.parent.mkdir()
    entry = "\n# 2026-01-01\n+turn {:06}\n"
    file.write_text("".join(entry.format(index) for index in range(MAX_HISTORY_BYTES // 20)))
    turns(runner, file, CTRL_D)
    kept = list(FileHistory(str(file)).load_history_strings())
    assert kept[0] == f"turn {MAX_HISTORY_BYTES // 20 - 1:06}"
    assert 10_000 < len(kept) < MAX_HISTORY_BYTES // 40


def test_without_a_place_for_the_file_there_is_no_history(
    runner: asyncio.Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "state").write_text("a file")
    assert turns(runner, tmp_path / "state" / "chat-history", f"one\r{CTRL_D}") == ["one", None]
    assert "Turns are not kept for later" in capsys.readouterr().err


def test_the_file_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "quire" / "chat-history"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert history_file() == Path.home() / ".local" / "state" / "quire" / "chat-history"
