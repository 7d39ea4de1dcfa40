"""The time as of the step that is being planned."""

from __future__ import annotations

from collections.abc import Callable


class StepClock:
    """A clock that stands still between steps, so that one step has one time.

    Args:
        read: returns seconds; read when the clock is made, and once for each step.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self.now = read()  # seconds

    def advance(self) -> None:
        """Take the time of the step that is planned next."""
        self.now = self._read()
