"""The steps that have been planned and not been applied yet."""

from __future__ import annotations

from collections import deque

import numpy as np

from quire.step import SchedulerOutput


class StepsInFlight:
    """Planned steps, oldest first; steps are numbered from 0 in the order in which they are planned."""

    def __init__(self) -> None:
        self._steps: deque[SchedulerOutput] = deque()
        self.next_step = 0  # number of the step that is planned next

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def await_tokens(self) -> bool:
        """Whether requests wait for the tokens of one of the steps, for drafts."""
        return any(step.may_have_drafts and step.awaits_tokens.any() for step in self._steps)

    def num_computed_before(self, slot: int) -> int | None:
        """Return how many tokens of a slot had been computed before these steps; None: it is in none."""
        for step in self._steps:
            for row in np.flatnonzero(step.slots == slot).tolist():
                return int(step.num_computed_tokens[row])
        return None

    def launch(self, step: SchedulerOutput) -> None:
        """Add the step that has just been planned."""
        self._steps.append(step)
        self.next_step += 1

    def land(self, step: SchedulerOutput) -> None:
        """Remove the oldest step, which is about to be applied.

        Raises:
            ValueError: `step` is another one.
        """
        if not self._steps or step.step != self._steps[0].step:
            expected = self._steps[0].step if self._steps else None
            raise ValueError(f"step {step.step} applied, but {expected} is in flight")
        self._steps.popleft()

    def withdraw_newest(self) -> SchedulerOutput:
        """Remove the step that was planned last, and return it."""
        return self._steps.pop()

    def require_newest(self, step: SchedulerOutput) -> None:
        """Raise `ValueError` unless `step` is the newest in flight."""
        if not self._steps or step.step != self._steps[-1].step:
            raise ValueError(f"step {step.step} is not the newest step in flight")

    def clear(self) -> list[SchedulerOutput]:
        """Remove all steps and return them."""
        steps = list(self._steps)
        self._steps.clear()
        return steps
