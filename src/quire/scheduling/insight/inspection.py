"""Counters and invariants: what can be seen of a scheduler from outside, besides explanations."""

from __future__ import annotations

import dataclasses

import msgspec

from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.outputs import SchedulerStats


@dataclasses.dataclass(eq=False)
class Inspection:
    """Reads all accounts and changes none."""

    accounts: Accounts

    def make_stats(self) -> SchedulerStats:
        """Return the present state and the counters since the start."""
        accounts = self.accounts
        num_running, num_waiting = accounts.request_counts()
        pools = accounts.kv.pools
        return msgspec.structs.replace(
            accounts.stats,
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_blocks=pools.first.num_free,
            num_idle_blocks=pools.first.num_idle,
            prefix_evicted_blocks=pools.first.num_evicted,
            num_steps=accounts.in_flight.next_step,
            num_leased_blocks=accounts.holdings.num_leased_blocks,
            num_awaiting=accounts.waiting.num_awaiting + accounts.connector.num_unanswered,
            num_loading=accounts.loads.num_loading,
        )

    def check_invariants(self) -> None:
        """Check invariants 1, 2, 5 and 8 as far as this side can see them; for tests, it is not fast.

        Raises:
            AssertionError: names what does not hold.
        """
        accounts = self.accounts
        config, running, waiting = accounts.config, accounts.running, accounts.waiting
        accounts.kv.check(accounts.holdings.held_blocks())
        if accounts.states is not None:
            accounts.states.check(accounts.holdings.loading_checkpoints())
        self._check_all_can_go_on()
        if config.use_cache_eviction:
            self._check_evicted_blocks_are_gone()
        assert len(running) <= config.max_num_seqs, "invariant 5: more sequences than max_num_seqs"
        assert running.num_free + len(running) + accounts.fences.num_slots == config.max_num_seqs, (
            "invariant 8: a slot leaks"
        )
        assert accounts.kv.num_open_slots <= len(running), "invariant 8: an empty slot holds blocks"
        if config.enable_prefix_caching:
            num_requests = sum(accounts.request_counts())
            assert accounts.kv.num_known_requests == num_requests, "invariant 8: prefix keys leak"
        if not len(running) + len(waiting):
            assert not len(accounts.deadlines), "invariant 8: a deadline leaks"
            assert not len(accounts.loads), "invariant 8: a load leaks"

    def _check_evicted_blocks_are_gone(self) -> None:
        """Check that each table has the blocks of what is computed and not evicted, and none more."""
        running, kv = self.accounts.running, self.accounts.kv
        slots = running.in_order()
        num_kept = running.num_computed[slots] - running.num_evicted[slots]
        num_needed = -(-num_kept // kv.block_size)
        names = running.request_ids[slots[kv.num_blocks[slots] != num_needed]].tolist()
        assert not names, f"invariant 2: {names} hold more or fewer blocks than what they keep needs"

    def _check_all_can_go_on(self) -> None:
        """Check that each running request has tokens left to compute (part of invariant 3)."""
        running = self.accounts.running
        slots = running.in_order()
        if self.accounts.in_flight or not slots.size:
            return
        is_stuck = (running.num_computed[slots] >= running.num_tokens[slots]) & ~running.is_beam[slots]
        stuck = running.request_ids[slots[is_stuck]].tolist()
        assert not stuck, f"invariant 3: all tokens of {stuck} are computed, so no step will schedule them"
