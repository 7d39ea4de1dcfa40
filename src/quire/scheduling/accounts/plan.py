"""One step in the making, until it is committed as a `SchedulerOutput`."""

from __future__ import annotations

import numpy as np

from quire.step import ForkData, IntArray, NewRequestData, ResumedRequestData

NOTHING: IntArray = np.empty(0, dtype=np.int32)


class Plan:
    """Which slots get how many tokens, and what of the budget is left.

    Attributes:
        slots: in order of service, [R].
        num_tokens: that each gets, 0 where the budget does not reach, [R].
        new_blocks: of every block that running requests are given, slot and index in the table, [blocks]
            each, and the block of each group, [G, blocks].
        chosen: (slot, token id) of tokens that the scheduler chose itself.
        block_copies: (from, to), [G] each.
        restored: (checkpoint, slot) of states that requests begin with.
    """

    def __init__(self, budget: int, no_blocks: IntArray, throttles_prefills: bool = False) -> None:
        self.budget = budget  # tokens
        self.throttles_prefills = throttles_prefills
        self.slots = self.num_tokens = NOTHING
        self.new_blocks: tuple[IntArray, IntArray, IntArray] = (NOTHING, NOTHING, no_blocks)
        self.new: list[NewRequestData] = []
        self.resumed: list[ResumedRequestData] = []
        self.forks: list[ForkData] = []
        self.chosen: list[tuple[int, int]] = []
        self.block_copies: list[tuple[IntArray, IntArray]] = []
        self.restored: list[tuple[int, int]] = []
        self.admission_closed = False  # a request was preempted, or the first one waits for blocks

    @property
    def has_admitted(self) -> bool:
        """Whether any request starts or resumes in this step."""
        return bool(self.new or self.resumed)

    def scheduled(self) -> tuple[IntArray, IntArray]:
        """Return the slots that get any tokens, and how many: [S] each."""
        gets_some = self.num_tokens > 0
        if gets_some.all():
            return self.slots, self.num_tokens
        return self.slots[gets_some], self.num_tokens[gets_some]

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
