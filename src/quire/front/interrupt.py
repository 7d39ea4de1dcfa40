"""Ctrl-C between steps, not within one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold a first SIGINT back until the block ends, so that the block is not torn in the middle.

    A second one is not held back. Does nothing outside the main thread, where Python runs no handlers, or
    if SIGINT is not Python's to handle.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    held_back: list[tuple[int, FrameType | None]] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        held_back.append((number, frame))
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held_back:
        signal.raise_signal(signal.SIGINT)
