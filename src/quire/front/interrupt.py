"""Deferring Ctrl-C until a critical section ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, ClassVar


class deferred_interrupt:  # noqa: N801
    """Context manager that defers the first SIGINT until its block ends.

    A second SIGINT is not deferred, nor is one within `interruptible`. Has no effect outside the main thread,
    where Python runs no handlers, if SIGINT has no Python handler, or within another one, which defers it
    longer. The object itself is the handler.
    """

    outermost: ClassVar[deferred_interrupt | None] = None
    """The main thread's, whose block is running."""

    previous: Any = None
    is_pending = False

    def __enter__(self) -> deferred_interrupt:
        if self.outermost is None and threading.current_thread() is threading.main_thread():
            self.previous = signal.getsignal(signal.SIGINT)
            if self.previous is not None:
                signal.signal(signal.SIGINT, self)
                deferred_interrupt.outermost = self
        return self

    def __exit__(self, *exception: object) -> None:
        if self.outermost is self:
            deferred_interrupt.outermost = None
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

    def deliver(self) -> None:
        """Let a signal come that has been deferred so far."""
        if self.is_pending:
            with interruptible():
                pass


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt a block inside `deferred_interrupt`, one that only waits."""
    deferral = deferred_interrupt.outermost
    if deferral is None or threading.current_thread() is not threading.main_thread():
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
