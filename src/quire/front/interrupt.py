"""Deferring Ctrl-C until a critical section ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class deferred_interrupt:  # noqa: N801
    """Context manager that defers the first SIGINT until its block ends.

    A second SIGINT is not deferred, nor is one within `interruptible`. Has no effect outside the main thread,
    where Python runs no handlers, if SIGINT has no Python handler, or within another one, which defers it
    longer. The object itself is the handler.
    """

    previous: Any = None
    is_pending = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if previous is not None and not isinstance(previous, deferred_interrupt):
                self.previous = previous
                signal.signal(signal.SIGINT, self)

    def __exit__(self, *exception: object) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
            if self.is_pending and exception[0] is None:
                signal.raise_signal(signal.SIGINT)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; pass others to the previous handler."""
        if not self.is_pending:
            self.is_pending = True
            return
        signal.signal(number, self.previous)
        signal.raise_signal(number)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt a block inside `deferred_interrupt`, one that only waits."""
    deferral = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not isinstance(
        deferral, deferred_interrupt
    ):
        yield
        return
    was_pending, deferral.is_pending = deferral.is_pending, False
    signal.signal(signal.SIGINT, deferral.previous)
    try:
        if was_pending:
            signal.raise_signal(signal.SIGINT)
        yield
    finally:
        signal.signal(signal.SIGINT, deferral)
