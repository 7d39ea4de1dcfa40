"""One step in the making, until it is committed as a `SchedulerOutput`."""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.step import ForkData, IntArray, NewRequestData, ResumedRequestData


def _no_ints() -> IntArray:
    return np.empty(0, dtype=np.int32)


@dataclasses.dataclass(slots=True)
class Plan:
    """Which slots get how many tokens, and what of the budget is left.

    `new_blocks` holds slot, index in the table and block id of every block that a running request is given.
    """

    budget: int  # tokens
    throttles_prefills: bool = False
    slots: IntArray = dataclasses.field(default_factory=_no_ints)  # [R] in order of service
    num_tokens: IntArray = dataclasses.field(default_factory=_no_ints)  # [R] 0: the budget does not reach it
    new_blocks: tuple[IntArray, IntArray, IntArray] = dataclasses.field(
        default_factory=lambda: (_no_ints(), _no_ints(), _no_ints())
    )
    new: list[NewRequestData] = dataclasses.field(default_factory=list)
    resumed: list[ResumedRequestData] = dataclasses.field(default_factory=list)
    forks: list[ForkData] = dataclasses.field(default_factory=list)
    chosen: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # slot, token id
    block_copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # from, to
    has_preempted: bool = False

    @property
    def has_admitted(self) -> bool:
        """Whether any request starts or resumes in this step."""
        return bool(self.new or self.resumed)

    def add(self, admitted: list[tuple[int, int]]) -> None:
        """Give more slots their tokens: (slot, tokens) each."""
        if admitted:
            slots, num_tokens = np.array(admitted, dtype=np.int32).T
            self.slots = np.concatenate((self.slots, slots))
            self.num_tokens = np.concatenate((self.num_tokens, num_tokens))

    def drop(self, slot: int) -> None:
        """Take back what a slot was given: its request is preempted."""
        kept = self.slots != slot
        self.budget += int(self.num_tokens[~kept].sum())
        self.slots, self.num_tokens = self.slots[kept], self.num_tokens[kept]
        self.forks = [fork for fork in self.forks if fork.slot != slot]
        self.chosen = [chosen for chosen in self.chosen if chosen[0] != slot]
