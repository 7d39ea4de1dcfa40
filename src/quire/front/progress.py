"""Progress bars on standard error; `rich` is imported only when one is shown."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def batch_progress(total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; yield a function to call with (requests finished, tokens generated) so far."""
    if not shown:
        yield lambda done, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("[bold]generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]:.0f} tokens/s"),
    )
    started = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=total, speed=0.0)

        def update(done: int, tokens: int) -> None:
            elapsed = max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=done, speed=tokens / elapsed)

        yield update
