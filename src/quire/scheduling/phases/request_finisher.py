"""How requests end, wherever they are: after that, nothing is held for them but what a peer was promised."""

from __future__ import annotations

import dataclasses

from quire.grammar.manager import GrammarManager
from quire.kv.blocks.manager import NO_PREFIX, KVCacheManager
from quire.request import Request
from quire.scheduling.accounts.deadlines import Deadlines
from quire.scheduling.accounts.kv_holdings import KVHoldings
from quire.scheduling.accounts.outbox import Outbox
from quire.scheduling.accounts.remote_loads import RemoteLoads
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.scheduling.accounts.waiting import WaitingRequests
from quire.scheduling.guards.connector_calls import ConnectorCalls
from quire.scheduling.outputs import SchedulerStats
from quire.scheduling.phases.slot_manager import SlotManager
from quire.status import RequestStatus
from quire.step import IntArray


@dataclasses.dataclass(eq=False, kw_only=True)
class RequestFinisher:
    """Ends requests and lets go of everything that was held for them."""

    kv: KVCacheManager
    running: RunningSlots
    waiting: WaitingRequests
    loads: RemoteLoads
    holdings: KVHoldings
    slots: SlotManager
    deadlines: Deadlines
    grammars: GrammarManager
    connector: ConnectorCalls
    outbox: Outbox
    stats: SchedulerStats

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request that runs or waits."""
        request_id = request.request_id
        slot = self.running.slot_of(request_id)
        request.status = status
        self._tell_connector(request, slot)
        if slot is not None:
            self.slots.leave(slot)
        else:
            self.waiting.remove(request_id)
            self.holdings.drop_load(request_id)
            self.waiting.release_followers(request_id)
        self.kv.forget(request_id)
        self.deadlines.forget(request_id)
        self.grammars.forget(request_id)
        self.outbox.add_finished(request_id)
        self.stats.num_finished += 1

    def fail(
        self, request: Request, error: str, error_type: str = "", *, error_param: str | None = None
    ) -> None:
        """End a request with an error that is no step's result, and tell its client."""
        self.finish(request, RequestStatus.FINISHED_ERROR)
        self.outbox.add_error(request, error, error_type, error_param)

    def fail_for_lack_of_memory(self, request: Request) -> None:
        """End a request that does not fit into memory, although nobody else has any that will come back."""
        pool = self.kv.pool
        self.fail(
            request,
            f"the request does not fit into the {pool.num_committed} KV blocks that there is memory for now, "
            f"of {pool.num_blocks} that were planned; free memory on the machine, or set num_kv_blocks",
        )

    def _tell_connector(self, request: Request, slot: int | None) -> None:
        """Tell the connector that a request has ended, and hold its blocks for a peer if it says so."""
        if slot is not None:
            self.running.update_request(slot)
        held = self._held_blocks(request.request_id, slot)
        is_read_later, params = self.connector.finish(request, held)
        request.kv_transfer_params = params  # what came with it said where to load from
        if is_read_later and len(held):
            self.holdings.hold_for_peer(request.request_id, held)

    def _held_blocks(self, request_id: str, slot: int | None) -> IntArray:
        if slot is not None:
            return self.kv.table(slot)
        load = self.loads.get(request_id)
        return NO_PREFIX.block_ids if load is None else load.block_ids
