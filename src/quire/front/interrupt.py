"""Deferring Ctrl-C to the end of a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer the first SIGINT until the block ends, so that the block is not interrupted.

    A second one is not deferred. Has no effect outside the main thread, where Python runs no handlers, or
    if SIGINT has no Python handler.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    held_back: list[tuple[int, FrameType | None]] = []

    def defer(number: int, frame: FrameType | None) -> None:
        held_back.append((number, frame))
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held_back:
        signal.raise_signal(signal.SIGINT)
