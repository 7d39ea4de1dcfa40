"""Counters and invariants: what can be seen of a scheduler from outside, besides explanations."""

from __future__ import annotations

import dataclasses

import msgspec

from quire.config import SchedulerConfig
from quire.scheduling.accounts.deadlines import Deadlines
from quire.scheduling.accounts.fences import Fences
from quire.scheduling.accounts.kv_holdings import KVHoldings
from quire.scheduling.accounts.remote_loads import RemoteLoads
from quire.scheduling.accounts.state import SchedulerState
from quire.scheduling.accounts.steps_in_flight import StepsInFlight
from quire.scheduling.guards.connector_calls import ConnectorCalls
from quire.scheduling.outputs import SchedulerStats


@dataclasses.dataclass(eq=False, kw_only=True)
class Inspection:
    """Reads all accounts and changes none."""

    config: SchedulerConfig
    connector: ConnectorCalls
    state: SchedulerState
    in_flight: StepsInFlight
    fences: Fences
    loads: RemoteLoads
    holdings: KVHoldings
    deadlines: Deadlines
    stats: SchedulerStats

    def make_stats(self) -> SchedulerStats:
        """Return the present state and the counters since the start."""
        num_running, num_waiting = self.state.request_counts()
        pool = self.state.kv.pool
        return msgspec.structs.replace(
            self.stats,
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_blocks=pool.num_free,
            num_idle_blocks=pool.num_idle,
            prefix_evicted_blocks=pool.num_evicted,
            num_steps=self.in_flight.next_step,
            num_leased_blocks=self.holdings.num_leased_blocks,
            num_awaiting=self.state.waiting.num_awaiting + self.connector.num_unanswered,
            num_loading=self.loads.num_coming,
        )

    def check_invariants(self) -> None:
        """Check invariants 1, 2, 5 and 8 as far as this side can see them; for tests, it is not fast.

        Raises:
            AssertionError: names what does not hold.
        """
        config, running, waiting = self.config, self.state.running, self.state.waiting
        self.state.kv.check(self.holdings.held_blocks())
        self._check_all_can_go_on()
        if config.use_cache_eviction:
            self._check_evicted_blocks_are_gone()
        assert len(running) <= config.max_num_seqs, "invariant 5: more sequences than max_num_seqs"
        assert running.num_free + len(running) + self.fences.num_slots == config.max_num_seqs, (
            "invariant 8: a slot leaks"
        )
        assert self.state.kv.num_open_slots <= len(running), "invariant 8: an empty slot holds blocks"
        if config.enable_prefix_caching:
            num_requests = sum(self.state.request_counts())
            assert self.state.kv.num_known_requests == num_requests, "invariant 8: prefix keys leak"
        if not len(running) + len(waiting):
            assert not len(self.deadlines), "invariant 8: a deadline leaks"
            assert not len(self.loads), "invariant 8: a load leaks"

    def _check_evicted_blocks_are_gone(self) -> None:
        """Check that each table has the blocks of what is computed and not evicted, and none more."""
        running, kv = self.state.running, self.state.kv
        slots = running.in_order()
        num_kept = running.num_computed[slots] - running.num_evicted[slots]
        num_needed = -(-num_kept // kv.block_size)
        names = running.request_ids[slots[kv.num_blocks[slots] != num_needed]].tolist()
        assert not names, f"invariant 2: {names} hold more or fewer blocks than what they keep needs"

    def _check_all_can_go_on(self) -> None:
        """Check, as far as invariant 3 goes, that each running request has tokens left to compute."""
        running = self.state.running
        slots = running.in_order()
        if self.in_flight or not slots.size:
            return
        is_stuck = (running.num_computed[slots] >= running.num_tokens[slots]) & ~running.is_beam[slots]
        stuck = running.request_ids[slots[is_stuck]].tolist()
        assert not stuck, f"invariant 3: all tokens of {stuck} are computed, so no step will schedule them"
