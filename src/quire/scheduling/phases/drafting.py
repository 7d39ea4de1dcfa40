"""Which requests are to get drafts after a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.scheduling.accounts.running_slots import RunningSlots
from quire.step import BoolArray, IntArray


class Drafting:
    """Asks for drafts, except in steps for which the runner has said that a request gets none.

    A request that drafts may follow waits: it is in no further step until its tokens are known. One that gets
    none goes on in the next step, which is begun before that, and after which there are no drafts. So all
    that wait do so in the same steps: split over two, each would take as long as one with all of them.

    Args:
        length: tokens to propose per request, given the number of running requests.
        running: the requests.
    """

    def __init__(self, length: Callable[[int], int], running: RunningSlots) -> None:
        self._length = length
        self._running = running

    def is_due(self, slots: IntArray) -> BoolArray:
        """Return which of `slots` may be given drafts after the next step that they sample in: [slots]."""
        running = self._running
        is_due: BoolArray = (running.num_steps_without_drafts[slots] == 0) & ~running.is_beam[slots]
        return is_due

    def wanted(self, slots: IntArray, samples: BoolArray) -> IntArray | None:
        """Return how many tokens to propose for each of `slots` after a step about to be launched: [slots].

        Args:
            slots: of the step.
            samples: [slots] which of them get a token.

        Returns:
            None if nothing is to be proposed.
        """
        running = self._running
        length = self._length(len(running))
        if not length:
            return None
        is_wanted = samples & self.is_due(slots)
        left = running.num_steps_without_drafts[slots]
        if left.any():
            running.num_steps_without_drafts[slots] = np.maximum(left - samples, 0)
        return length * is_wanted.astype(np.int32) if is_wanted.any() else None

    def pause(self, slots: IntArray, num_steps: IntArray) -> None:
        """Record that no drafts follow in the next `num_steps` [slots] after a step that has been applied."""
        left = num_steps - self._running.num_pending[slots]  # the step in flight is one of them
        self._running.num_steps_without_drafts[slots] = np.maximum(left, 0)
