"""Steps that the runner may not have seen: their requests are preempted and their messages sent again."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.phases.slot_manager import SlotManager
from quire.step import SchedulerOutput


@dataclasses.dataclass(eq=False)
class LostSteps:
    """Takes back steps that were planned and have not been computed."""

    accounts: Accounts
    slots: SlotManager

    def drop(self, most_in_flight: int) -> list[SchedulerOutput]:
        """Take back all steps in flight, if they are more than there can be, and return them."""
        accounts = self.accounts
        if len(accounts.in_flight) <= most_in_flight:
            return []
        lost = list(accounts.in_flight)
        accounts.in_flight.clear()
        for step in lost:
            self.void(step)
        accounts.fences.lift(lost[-1].step)
        return lost

    def withdraw_newest(self) -> None:
        """Take back the step that was planned last."""
        self.void(self.accounts.in_flight.pop())

    def void(self, step: SchedulerOutput, at_fault: Container[str] = ()) -> None:
        """Take back a step that the runner may not have seen.

        Its requests, except those `at_fault`, are preempted. Its messages to the runner are sent again,
        unless a later step has made them untrue.
        """
        is_innocent = [request_id not in at_fault for request_id in step.request_ids]
        # Beams may have been placed by a step that had no tokens left for them.
        for slot in (*step.slots[is_innocent].tolist(), *step.chosen_tokens.slots.tolist()):
            self.slots.preempt_if_running(slot)
        if self.accounts.states is not None:
            self.accounts.states.void(step.step)
        self.accounts.outbox.requeue(step, self._has_no_slot)
        self.accounts.holdings.cancel_loads_again(step.step)

    def _has_no_slot(self, request_id: str) -> bool:
        return self.accounts.running.slot_of(request_id) is None
