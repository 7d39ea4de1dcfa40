"""Durations of steps, also where a device computes them asynchronously."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from quire.kv.connectors.load_costs import LoadCosts


class StepMark(Protocol):
    """A point between two steps."""

    @property
    def is_reached(self) -> bool:
        """Whether `wait` returns at once; may be asked from any thread."""

    def wait(self) -> None:
        """Return when the steps before it have been computed; may be called from any thread.

        Raises:
            Exception: the device has failed.
        """

    def seconds_since(self, earlier: Any) -> float | None:
        """Return how long computing took from an earlier mark to this; None: that is not over yet."""


class HostMark:
    """A time: steps on the host are over when they return."""

    def __init__(self, now: float) -> None:
        self._now = now

    @property
    def is_reached(self) -> bool:
        """Whether `wait` returns at once."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def seconds_since(self, earlier: HostMark) -> float:
        """Return the time in between."""
        return self._now - earlier._now


def host_mark() -> HostMark:
    """Return the present time."""
    return HostMark(time.monotonic())


class _TimedStep(NamedTuple):
    began: StepMark
    ended: StepMark
    num_tokens: int


class StepTimes:
    """Takes note of what steps cost when they have been computed. One thread calls it.

    Args:
        mark: returns the point behind all steps so far.
        costs: are told.
    """

    def __init__(self, mark: Callable[[], StepMark], costs: LoadCosts) -> None:
        self._mark = mark
        self._costs = costs
        self._begun: tuple[StepMark, int] | None = None
        self._steps: deque[_TimedStep] = deque()  # that a device may still compute

    def begin(self, num_tokens: int) -> StepMark:
        """Return the point before a step that computes `num_tokens`, which comes next."""
        began = self._mark()
        self._begun = began, num_tokens
        return began

    def end(self) -> StepMark:
        """Return the point behind the step that was begun last, if any, and all before."""
        ended = self._mark()
        if self._begun is not None:
            self._steps.append(_TimedStep(self._begun[0], ended, self._begun[1]))
            self._begun = None
        self._note_steps()
        return ended

    def _note_steps(self) -> None:
        while self._steps:
            step = self._steps[0]
            seconds = step.ended.seconds_since(step.began)
            if seconds is None:
                return
            self._costs.note_step(seconds, step.num_tokens)
            self._steps.popleft()
