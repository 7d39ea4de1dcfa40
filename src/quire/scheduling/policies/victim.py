"""Whom to preempt when blocks run out: one method to write, `VictimPolicy.choose`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from typing_extensions import override

from quire.step import IntArray


class RunningView(NamedTuple):
    """The running requests in order of service, without the first of them: [R - 1] each, at least one."""

    num_tokens: IntArray  # prompt and output
    num_computed_tokens: IntArray  # of those, in the cache
    num_blocks: IntArray  # held


class VictimPolicy(ABC):
    """Chooses the request to preempt.

    The first in the order of service is never offered. It cannot be preempted, so it always moves and ends,
    and then the next one is first: that is how progress is kept, whatever a policy chooses.
    """

    @abstractmethod
    def choose(self, running: RunningView) -> int:
        """Return the index of the victim."""


class Last(VictimPolicy):
    """The last in the order of service: the newest, under `priority` the newest of the least important."""

    @override
    def choose(self, running: RunningView) -> int:
        return len(running.num_tokens) - 1


class FewestComputed(VictimPolicy):
    """The one with the fewest computed tokens: the cheapest to compute again. Of several the last."""

    @override
    def choose(self, running: RunningView) -> int:
        return len(running.num_tokens) - 1 - int(running.num_computed_tokens[::-1].argmin())
