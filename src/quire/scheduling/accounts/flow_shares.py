"""Shares of large flows in a step: as much as all others together, so that a step at most doubles.

A step with hundreds of sequences takes many times as long as one with a few, and a client with one sequence
waits for all of it. A flow that fills the batch is therefore bounded as soon as another one is served. Alone
it has the whole machine, but only after some steps: a client that sends one request after another is missing
for a moment only.
"""

from __future__ import annotations

import numpy as np

from quire.config import SchedulerConfig
from quire.request import Request
from quire.scheduling.accounts.ready_queue import ReadyQueue
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.step import BoolArray, IntArray

MIN_SHARE = 32
"""Part of a step's tokens that large flows always get: reading the weights takes as long as some tokens."""


class FlowShares:
    """Bounds the tokens of large flows in each step: those with more sequences than their least share.

    Flows of at most as important requests are bounded by those of the others, equal ones in equal parts.
    Within a flow, the first sequences in the order of service get theirs, and the others wait in their slots.

    Args:
        config: of the scheduler.
        running: the requests that run, and their flows.
        queue: has the other requests of these flows.
    """

    def __init__(self, config: SchedulerConfig, running: RunningSlots, queue: ReadyQueue) -> None:
        self._running = running
        self._queue = queue
        self._splits_prompts = config.dynamic_split_fuse
        self._whole_step = config.max_num_batched_tokens
        self._least = max(1, config.max_num_batched_tokens // MIN_SHARE)
        self._is_large: BoolArray = np.zeros(config.max_num_seqs, dtype=np.bool_)  # by number of the flow
        self._grown = self._least  # tokens of a flow that is alone in the step
        self._left: dict[str, int] = {}  # of what large flows may have in this step, tokens
        self._num_others = 0  # tokens of all other flows in this step
        self._others_wait = False
        self._lacks_blocks = False

    def bound(self, slots: IntArray, wanted: IntArray) -> IntArray:
        """Return how many tokens running requests may have in this step: [R].

        Args:
            slots: in the order of service, [R].
            wanted: tokens, [R].
        """
        self._left.clear()
        if not self._is_large.any():
            self._num_others = int(wanted.sum())
            return wanted
        flows = self._running.flow[slots]
        is_large = self._is_large[flows]
        self._num_others = int(wanted[~is_large].sum())
        bounded = wanted.copy()
        large = np.unique(flows[is_large]).tolist()
        is_shared = False
        for flow in large:
            rows = (flows == flow).nonzero()[0]
            limit, others = self._limit(slots, wanted, is_large, int(slots[rows[0]]), len(large))
            is_shared |= others
            before = np.cumsum(wanted[rows]) - wanted[rows]
            bounded[rows] = np.clip(limit - before, 0, wanted[rows])
            name = self._running.request_at(int(slots[rows[0]])).flow
            self._left[name] = limit - int(bounded[rows].sum())
        self._grown = self._least if is_shared else min(2 * self._grown, self._whole_step)
        return bounded

    def _limit(
        self, slots: IntArray, wanted: IntArray, is_large: BoolArray, slot: int, num_large: int
    ) -> tuple[int, bool]:
        """Return the tokens of a large flow, and whether it shares the step with others."""
        priority = self._running.priority
        num_others = int(wanted[~is_large & (priority[slots] <= priority[slot])].sum())
        limit = max(self._least, num_others) if num_others else self._grown
        return max(1, limit // num_large), num_others > 0

    def left_for(self, request: Request, budget: int) -> int:
        """Return how many tokens of the budget a request may start with; 0: its flow has had its share."""
        flow = request.flow
        if not self._is_of_large(request):
            return budget
        if self._others_wait and self._running.num_in_flow(flow) >= self._least:
            return 0
        if flow not in self._left:
            self._left[flow] = max(self._least, self._num_others) if self._num_others else self._grown
        if not self._splits_prompts:
            return budget if self._left[flow] > 0 else 0
        return max(0, min(budget, self._left[flow]))

    def _is_of_large(self, request: Request) -> bool:
        num_running = self._running.num_in_flow(request.flow)
        return num_running + self._queue.num_in_line(request) >= self._least

    def note_lack(self, request: Request) -> None:
        """Record that the next request to be admitted lacked blocks in this step."""
        self._lacks_blocks = not self._is_of_large(request)

    def slot_to_clear(self, num_held_back: int) -> int | None:
        """Return the slot of a large flow that is to make room for others before the next step; None: none.

        That is the last one in the order of service, if a request of a flow that is not large finds no slot,
        or has not found enough blocks. What runs of a large flow beyond its least share waits for its turn
        in the step, and can as well do so in the queue.

        Args:
            num_held_back: slots that will be free without that.
        """
        lacks_blocks, self._lacks_blocks = self._lacks_blocks, False
        running = self._running
        other = self._first_other() if running.has_flow_of(self._least) else None
        self._others_wait = other is not None
        if other is None:
            return None
        num_slots = max(1, other.sampling_params.beam_width)
        if not lacks_blocks and running.num_free + num_held_back >= num_slots:
            return None
        order: list[int] = running.in_order().tolist()
        for slot in reversed(order):
            victim = running.request_at(slot)
            may_leave = victim.priority >= other.priority and not running.is_beam[slot]
            if may_leave and running.num_in_flow(victim.flow) > self._least:
                return slot
        return None

    def _first_other(self) -> Request | None:
        """Return the request of the queue that is served first among those that are not of a large flow."""
        queue = self._queue
        try:
            while (head := queue.head()) is not None and self._is_of_large(head):
                queue.pass_over(head.request_id)
        finally:
            queue.restore()
        return head

    def note_start(self, slot: int, num_tokens: int) -> None:
        """Count what a request gets in this step that has just been admitted to a slot."""
        flow = self._running.request_at(slot).flow
        self._is_large[self._running.flow[slot]] = flow in self._left
        if flow in self._left:
            self._left[flow] -= num_tokens
