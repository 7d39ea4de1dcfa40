"""KV that comes from elsewhere or is read by others: what has arrived, failed, or timed out."""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.request import Request
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.accounts.remote_loads import RemoteLoad
from quire.scheduling.accounts.sequence_states import SequenceStates
from quire.scheduling.phases.request_finisher import RequestFinisher
from quire.scheduling.phases.slot_manager import SlotManager
from quire.status import RequestStatus
from quire.step import IntArray, KVConnectorOutput, SchedulerOutput


@dataclasses.dataclass(eq=False)
class TransferPhase:
    """Ends loads and leases, when the connector says so or their deadline has passed."""

    accounts: Accounts
    slots: SlotManager
    finisher: RequestFinisher

    def take(self, output: KVConnectorOutput, step: SchedulerOutput) -> None:
        """Apply what the connector's worker side has reported with a step."""
        accounts = self.accounts
        if failed := output.failed_block_ids and accounts.connector.take_failed(output.failed_block_ids):
            self._fail_blocks(failed, step.slots)
        for request_id in sorted(output.finished_receiving):
            load = accounts.loads.get(request_id)
            if load is not None and not load.has_arrived and load.first_step <= step.step:
                self._arrive(load)
        for request_id in sorted(output.finished_sending):
            accounts.holdings.end_lease(request_id)

    def expire(self) -> None:
        """Give up the loads that have timed out, and end the leases that were not renewed."""
        accounts = self.accounts
        for load in accounts.loads.due(accounts.clock.now):
            self.give_up(load, "did not arrive within kv_transfer_timeout")
        accounts.holdings.renew(accounts.connector.leases_renewed())
        accounts.holdings.end_expired_leases()

    def give_up_asked_for_in(self, lost: SchedulerOutput) -> None:
        """Give up the loads that a step has asked for which the runner may not have seen."""
        for load in [load for load in self.accounts.loads.loading() if load.first_step == lost.step]:
            self.give_up(load, "was asked for in a step that failed")

    def cancel_all_loads(self) -> None:
        """Give up all loads of waiting requests: what they bring is out of date."""
        for load in list(self.accounts.loads):
            self.accounts.holdings.drop_load(load.request.request_id)
            if not load.has_arrived:
                self._queue(load.request)

    def _arrive(self, load: RemoteLoad) -> None:
        """Queue a request whose load has ended, with what of it is valid."""
        accounts = self.accounts
        request, block_size, pools = load.request, accounts.config.block_size, accounts.kv.pools
        accounts.loads.arrive(load)
        useless = load.drop_failed(block_size, pools)
        pools.release(useless[:, ::-1])
        pools.leave_windows(load.block_ids, load.num_tokens)
        accounts.stats.num_loaded_tokens += max(0, load.num_tokens - load.num_local_blocks * block_size)
        if load.num_blocks:
            self._cache(load)
        if accounts.states is not None:
            self._take_state(load, accounts.states, is_whole=not useless.size)
        elif not load.num_blocks:
            accounts.holdings.drop_load(request.request_id)
        if useless.size:
            self._go_on_without(request, "could not be loaded")
        else:
            self._queue(request)

    def _cache(self, load: RemoteLoad) -> None:
        """Make the blocks of a load that has arrived findable: others may wait for them."""
        accounts = self.accounts
        num_tokens = load.num_tokens
        if accounts.eviction is not None:
            num_tokens = accounts.eviction.num_findable(num_tokens)
        accounts.kv.cache_loaded_blocks(load.request, load.block_ids, load.num_local_blocks, num_tokens)

    def _take_state(self, load: RemoteLoad, states: SequenceStates, *, is_whole: bool) -> None:
        """Make the state of a load findable; without it, the request begins behind an earlier one."""
        if is_whole:
            states.take_loaded(load)
        else:
            states.pool.give_back(load.checkpoint)
            load.checkpoint = -1
            self.accounts.holdings.drop_load(load.request.request_id)

    def _fail_blocks(self, block_ids: frozenset[int], slots: IntArray) -> None:
        """Void everything that was computed from blocks whose load has failed.

        Only requests that were in the step are affected: others may have been given the blocks since.
        """
        accounts = self.accounts
        for load in accounts.loads.loading():
            load.failed_block_ids |= block_ids
        accounts.kv.pools.forget_content(np.array(sorted(block_ids), dtype=np.int32))
        for slot in accounts.kv.slots_holding(block_ids, slots[accounts.running.occupied[slots]]):
            if not accounts.running.occupied[slot]:
                continue  # a beam of a search that has ended with another of its beams
            group = accounts.beams.at(slot)
            request = accounts.running.request_at(slot) if group is None else group.request
            if not self.fails(request, "could not be loaded"):
                self.slots.preempt_if_running(slot)

    def give_up(self, load: RemoteLoad, what_happened: str) -> None:
        """Cancel a load; its request computes the tokens, or ends."""
        self.accounts.holdings.drop_load(load.request.request_id)
        self._go_on_without(load.request, what_happened)

    def _go_on_without(self, request: Request, what_happened: str) -> None:
        if not self.fails(request, what_happened):
            self._queue(request)

    def fails(self, request: Request, what_happened: str) -> bool:
        """Note a failed load; end its request if that is what `kv_load_failure` asks for."""
        self.accounts.stats.num_failed_loads += 1
        request.kv_load_failed = True
        if self.accounts.config.kv_load_failure == "recompute":
            return False
        self.finisher.fail(
            request,
            f"KV of this request {what_happened}; with kv_load_failure 'recompute' it would have been "
            "computed here instead",
        )
        return True

    def _queue(self, request: Request) -> None:
        known = request.is_known_to_runner
        request.status = RequestStatus.PREEMPTED if known else RequestStatus.WAITING
        self.accounts.waiting.queue.push(request)
