"""Deferring Ctrl-C to the end of what must not be interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer the first SIGINT until the block ends, so that the block is not interrupted.

    A second one is not deferred, nor is one within `interruptible`. Has no effect outside the main thread,
    where Python runs no handlers, or if SIGINT has no Python handler.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    deferral = _Deferral(previous)
    signal.signal(signal.SIGINT, deferral)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if deferral.is_pending:
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt a block although it is deferred around it: one that waits, and changes nothing."""
    deferral = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not isinstance(deferral, _Deferral):
        yield
        return
    was_pending, handler = False, deferral
    while isinstance(handler, _Deferral):
        was_pending |= handler.is_pending
        handler.is_pending = False
        handler = handler.previous
    signal.signal(signal.SIGINT, handler)
    try:
        if was_pending:
            signal.raise_signal(signal.SIGINT)
        yield
    finally:
        signal.signal(signal.SIGINT, deferral)


class _Deferral:
    """A handler that notes the first signal, and leaves others to the handler before."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.is_pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.is_pending:
            self.is_pending = True
            return
        signal.signal(number, self.previous)
        signal.raise_signal(number)
