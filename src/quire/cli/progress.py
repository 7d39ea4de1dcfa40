"""Progress bar for loading a model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from quire.cli.console import stderr_is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress

SHOW_AFTER = 0.5  # seconds of loading before the bar is shown, as most models load faster


class LoadingBar:
    """Shows on stderr how much of the weights has been read, if loading is slow and stderr is a terminal.

    Call it with (bytes read, total bytes), inside its own `with` block around the loading.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._started = time.monotonic()
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes have been read."""
        if self._progress is None:
            is_slow = done < total and time.monotonic() - self._started > SHOW_AFTER
            if not (is_slow and stderr_is_terminal()):
                return
            self._progress = self._shown(total)
        self._progress.update(self._progress.task_ids[0], completed=done)

    def _shown(self, total: int) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.add_task(f"Loading {self._model}", total=total)
        progress.start()
        return progress
