"""The running requests' share of a step: tokens in the order of service, and blocks for them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.accounts.beam_groups import BeamGroup
from quire.scheduling.accounts.plan import Plan
from quire.scheduling.phases.beams import BeamPhase
from quire.scheduling.phases.drafting import Drafting
from quire.scheduling.phases.request_finisher import RequestFinisher
from quire.scheduling.phases.slot_manager import SlotManager
from quire.scheduling.policies.victim import RunningView, VictimPolicy
from quire.step import BoolArray, IntArray


@dataclasses.dataclass(eq=False)
class RunningPhase:
    """Hands the token budget to the running requests, and frees the blocks that they need for it."""

    accounts: Accounts
    slots: SlotManager
    finisher: RequestFinisher
    beam_phase: BeamPhase
    drafting: Drafting
    victim_policy: VictimPolicy

    def plan(self, plan: Plan) -> None:
        """Hand the budget to the running requests in order, and preempt until their new blocks are free."""
        if not len(self.accounts.running):
            return
        if self.accounts.kv.pools.windows:
            self._leave_windows()
        self.beam_phase.place(plan, self._make_room)
        self._hand_out_tokens(plan)
        missing = self._preempt_until_it_fits(plan)
        if missing.any():
            plan.new_blocks = self.accounts.kv.grow(plan.slots, missing)

    def _leave_windows(self) -> None:
        """Free the blocks before windows that no later step reads; steps are computed in order.

        Tokens in flight that are drafts may be computed again, and a block in flight is not cached yet. What
        a beam has added to its prompt is never cached.
        """
        running = self.accounts.running
        slots = running.in_order()
        slots = slots[~(running.awaits_tokens[slots] & (running.num_pending[slots] > 0))]
        self.accounts.kv.leave_windows(
            slots,
            running.next_start(slots),
            num_prompt=running.num_prompt[slots],
            priorities=running.priority[slots],
            waits_to_be_cached=~running.is_beam[slots]
            | (running.num_computed[slots] <= running.num_prompt[slots]),
            lends_prompt=running.lends_prompt[slots],
        )

    def _hand_out_tokens(self, plan: Plan) -> None:
        accounts = self.accounts
        running = accounts.running
        slots = running.in_order()
        known = running.num_tokens[slots] + running.num_pending[slots]
        wanted = known + running.num_drafts[slots] - running.next_start(slots)
        if accounts.in_flight:
            wanted[self._skips_step(slots, known)] = 0
        if plan.throttles_prefills:
            wanted[running.num_computed[slots] + 1 < known] = 0
        if accounts.eviction is not None:
            wanted = accounts.eviction.limit_chunks(slots, wanted)
        if accounts.states is not None:
            wanted = accounts.states.limit_chunks(slots, wanted)
        chunk_limit = accounts.config.long_prefill_token_threshold or plan.budget
        wanted = accounts.flow_shares.bound(slots, np.minimum(np.maximum(wanted, 0), chunk_limit))
        left_before = plan.budget - (wanted.cumsum() - wanted)
        plan.slots = slots
        plan.num_tokens = np.minimum(np.maximum(left_before, 0), wanted).astype(np.int32)
        plan.budget -= int(plan.num_tokens.sum())

    def _skips_step(self, slots: IntArray, known: IntArray) -> BoolArray:
        """Return which slots are not scheduled before the step in flight has been applied: [slots].

        Args:
            slots: of running requests.
            known: [slots] their tokens, those on their way included.
        """
        running = self.accounts.running
        is_pending = running.num_pending[slots] > 0
        is_last = known >= running.token_limit[slots]
        needs_tokens = running.is_beam[slots] | running.awaits_tokens[slots] | is_last
        skips: BoolArray = is_pending & needs_tokens
        if self.accounts.in_flight.await_tokens:
            has_drafts, decodes = running.num_drafts[slots] > 0, known - running.num_computed[slots] == 1
            skips |= has_drafts | (decodes & self.drafting.is_due(slots))
        return skips

    def _missing_blocks(self, plan: Plan) -> IntArray:
        accounts = self.accounts
        num_tokens = accounts.running.next_start(plan.slots) + plan.num_tokens
        if accounts.eviction is not None:
            num_tokens -= accounts.running.num_evicted[plan.slots]
        missing = accounts.kv.missing_blocks(plan.slots, num_tokens)
        return np.where(plan.num_tokens, missing, 0)

    def _preempt_until_it_fits(self, plan: Plan) -> IntArray:
        """Free blocks, the cheapest way first, until there are enough; return the missing blocks: [R]."""
        while self._lacks(int((missing := self._missing_blocks(plan)).sum())):
            if not (self._drop_drafts(plan) or self._free_something(plan, self._first_slots())):
                self._stall_or_fail(plan, self._first_slots())
        return missing

    def _stall_or_fail(self, plan: Plan, first: list[int]) -> None:
        """Let the first request, the only one left, wait for transfers; if there are none, end it.

        One that keeps blocks to lend them starts again without that.
        """
        if not self.accounts.holdings.num_blocks_in_transfer:
            if self.accounts.running.lends_prompt[first[0]]:
                self.slots.preempt(first[0])
            else:
                self.finisher.fail_for_lack_of_memory(self.accounts.running.request_at(first[0]))
            for slot in first:
                plan.drop(slot)
            self._drop_copies_to_free_blocks(plan)
        plan.budget += int(plan.num_tokens.sum())
        plan.num_tokens = np.zeros_like(plan.num_tokens)
        plan.admission_closed = True

    def _first_slots(self) -> list[int]:
        """Return the slots of the first request in the order of service, which is never preempted."""
        first = int(self.accounts.running.in_order()[0])
        group = self.accounts.beams.at(first)
        return [first] if group is None else group.slots

    def _make_room(self, plan: Plan, num_blocks: int, group: BeamGroup) -> bool:
        """Free blocks until a search has `num_blocks`; False if that fails or preempts the search itself.

        A search that is first in order ends if no transfer will give back a block.
        """
        while self._lacks(num_blocks):
            first = self._first_slots()
            if not self._free_something(plan, first):
                if first == group.slots and not self.accounts.holdings.num_blocks_in_transfer:
                    self.finisher.fail_for_lack_of_memory(group.request)
                return False
            if self.accounts.beams.at(group.slots[0]) is not group:
                return False
        return True

    def _lacks(self, num_blocks: int) -> bool:
        """Whether fewer blocks are free, even after asking again for memory that was refused."""
        pools = self.accounts.kv.pools
        if not num_blocks or num_blocks <= pools.num_free:
            return False
        pools.commit_ahead(num_blocks)
        return num_blocks > pools.num_free

    def _free_something(self, plan: Plan, spared: list[int]) -> bool:
        """Free what costs least; False if there is nothing.

        The newest load of a request that still waits; else a running request, as the policy chooses, but not
        one in the slots `spared`; else all pins.
        """
        return (
            self.accounts.holdings.drop_newest_load()
            or self._preempt_a_victim(plan, spared)
            or self.accounts.holdings.break_pins()
        )

    def _drop_drafts(self, plan: Plan) -> bool:
        """Take the drafts out of the plan: they are not worth a preemption."""
        running = self.accounts.running
        if not running.num_drafts[plan.slots].any():
            return False
        running.num_drafts[plan.slots] = 0
        known = running.num_tokens[plan.slots] + running.num_pending[plan.slots]
        num_tokens = np.minimum(plan.num_tokens, np.maximum(known - running.next_start(plan.slots), 0))
        plan.budget += int((plan.num_tokens - num_tokens).sum())
        plan.num_tokens = num_tokens
        return True

    def _preempt_a_victim(self, plan: Plan, spared: list[int]) -> bool:
        """Preempt one request, by the policy; its tokens leave the plan."""
        accounts = self.accounts
        running, beams = accounts.running, accounts.beams
        in_order = running.in_order()
        candidates = in_order[~np.isin(in_order, spared)]
        if not candidates.size:
            return False
        view = RunningView(
            num_tokens=running.num_tokens[candidates],
            num_computed_tokens=running.num_computed[candidates],
            num_blocks=accounts.kv.num_blocks[candidates],
        )
        victim = int(candidates[self.victim_policy.choose(view)])
        group = beams.at(victim)
        for slot in [victim] if group is None else group.slots:
            plan.drop(slot)
        self.slots.preempt_if_running(victim)
        plan.admission_closed = True
        self._drop_copies_to_free_blocks(plan)
        return True

    def _drop_copies_to_free_blocks(self, plan: Plan) -> None:
        """Drop the copies for a search that was preempted: its blocks may be reused in this step."""
        if plan.block_copies:
            targets = np.array([target[0] for _, target in plan.block_copies], dtype=np.int32)
            is_held = self.accounts.kv.pools.first.reference_counts(targets) > 0
            plan.block_copies = list(itertools.compress(plan.block_copies, is_held))
