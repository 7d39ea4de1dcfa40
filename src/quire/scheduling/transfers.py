"""KV that comes from elsewhere or is read by others: what has arrived, failed, or was not heard of again."""

from __future__ import annotations

import numpy as np

from quire.request import Request
from quire.scheduling.remote_loads import RemoteLoad
from quire.scheduling.state import SchedulerState
from quire.status import RequestStatus
from quire.step import IntArray, KVConnectorOutput


class TransferPhase:
    """Ends loads and leases, by news from the connector or by their deadlines."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def take(self, output: KVConnectorOutput, slots: IntArray) -> None:
        """Apply what the connector's worker side has reported with a step that computed `slots`."""
        if output.failed_block_ids:
            self._fail_blocks(output.failed_block_ids, slots)
        for request_id in sorted(output.finished_receiving):
            load = self._state.waiting.loads.get(request_id)
            if load is not None and not load.has_arrived:
                self._arrive(load)
        for request_id in sorted(output.finished_sending):
            self._state.end_lease(request_id)

    def expire(self) -> None:
        """Give up the loads that have not been heard of, and end the leases that nobody renewed."""
        state = self._state
        for load in state.waiting.loads.on_their_way():
            if load.deadline <= state.now:
                state.drop_load(load.request.request_id)
                self._go_on_without(load.request, "did not arrive within kv_transfer_timeout")
        if state.context.connector is not None:
            deadline = state.now + state.config.kv_transfer_timeout
            for request_id in sorted(state.context.connector.leases_renewed()):
                state.leases.renew(request_id, deadline)
        for lease_id in state.leases.expired(state.now):
            state.end_lease(lease_id)

    def call_off(self) -> None:
        """Give up all loads of requests that wait: what they bring is not wanted any more."""
        for load in list(self._state.waiting.loads):
            self._state.drop_load(load.request.request_id)
            if not load.has_arrived:
                self._queue(load.request)

    def _arrive(self, load: RemoteLoad) -> None:
        """Queue a request whose load has ended, with what of it is valid."""
        state, request = self._state, load.request
        useless = load.drop_failed(state.config.block_size)
        load.has_arrived = True
        state.pool.release(useless[::-1])
        state.stats.num_loaded_tokens += max(0, load.num_tokens - load.num_local_blocks * state.kv.block_size)
        if not len(load.block_ids):
            state.drop_load(request.request_id)
        if len(useless):
            self._go_on_without(request, "could not be loaded")
        else:
            self._queue(request)

    def _fail_blocks(self, block_ids: frozenset[int], slots: IntArray) -> None:
        """Void everything that was computed from blocks whose content has turned out not to be valid.

        Only what was in the step counts: others may have been given the blocks since.
        """
        state = self._state
        for load in state.waiting.loads.on_their_way():
            load.failed_block_ids |= block_ids
        state.pool.forget_content(np.array(sorted(block_ids), dtype=np.int32))
        for slot in state.kv.slots_holding(block_ids, slots[state.running.occupied[slots]]):
            if not state.running.occupied[slot]:
                continue  # a beam of a search that has ended with another of its beams
            group = state.beams.at(slot)
            request = state.running.request_at(slot) if group is None else group.request
            if not self._fails(request, "could not be loaded"):
                request.kv_load_failed = True
                state.preempt_if_running(slot)

    def _go_on_without(self, request: Request, what_happened: str) -> None:
        if not self._fails(request, what_happened):
            request.kv_load_failed = True
            self._queue(request)

    def _fails(self, request: Request, what_happened: str) -> bool:
        """Note a failed load; end its request if that is what `kv_load_failure` asks for."""
        state = self._state
        state.stats.num_failed_loads += 1
        if state.config.kv_load_failure == "recompute":
            return False
        state.fail(
            request,
            f"KV of this request {what_happened}; with kv_load_failure 'recompute' it would have been "
            "computed here instead",
        )
        return True

    def _queue(self, request: Request) -> None:
        known = request.is_known_to_runner
        request.status = RequestStatus.PREEMPTED if known else RequestStatus.WAITING
        self._state.waiting.queue.push(request)
