"""Terminal input of `quire chat`: turns of several lines, pasted text, and earlier turns from a file.

Only a chat in a terminal imports this module: prompt_toolkit is slow to import.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from quire.state_directory import state_directory

MAX_HISTORY_BYTES = 1 << 20
MAX_KEPT_TURN = 1 << 16  # characters; longer (probably pasted) ones are not kept


def history_file() -> Path:
    """Return the file of earlier turns: chat-history in the state directory."""
    return state_directory() / "chat-history"


class TerminalTurns:
    """Reads turns from the terminal.

    Args:
        runner: its event loop reads keys, so that other tasks there continue.
        file: the file of earlier turns, created if missing.
    """

    def __init__(self, runner: asyncio.Runner, file: Path) -> None:
        self._runner = runner
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(),
            history=TurnHistory(file) if _has_made(file) else None,
        )
        self._is_asked_to_quit = False

    def read(self) -> str | None:
        """Return the next turn; None after Ctrl-D, or Ctrl-C twice."""
        return self._runner.run(self._read())

    async def _read(self) -> str | None:
        while True:
            try:
                turn = await self._session.prompt_async()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self._is_asked_to_quit:
                    return None
                self._is_asked_to_quit = True
                typer.echo("Ctrl-C again quits, as Ctrl-D does.", err=True)
                continue
            self._is_asked_to_quit = False
            return turn


class TurnHistory(FileHistory):
    """Earlier turns in a file, without those that are too long."""

    def store_string(self, string: str) -> None:
        """Append a turn to the file; if that fails, it is only kept in memory."""
        if len(string) > MAX_KEPT_TURN:
            return
        try:
            super().store_string(string)
        except OSError as error:
            typer.echo(f"This turn is not kept for later: {error.strerror}.", err=True)


def _keys() -> KeyBindings:
    """Return the keys that differ from the library's: Enter ends a turn, Alt-Enter or Ctrl-J a line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _has_made(file: Path) -> bool:
    """Create the file of earlier turns, readable by its owner only, or shorten it; return success."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        content = file.read_bytes()
        if len(content) > MAX_HISTORY_BYTES:
            first_kept = content.find(b"\n\n# ", len(content) - MAX_HISTORY_BYTES // 2)
            file.write_bytes(content[first_kept:] if first_kept >= 0 else b"")
    except OSError as error:
        typer.echo(f"Turns are not kept for later: {file}: {error.strerror}.", err=True)
        return False
    return True
