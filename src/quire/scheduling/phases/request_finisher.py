"""How requests end, wherever they are: afterwards, they hold nothing but leases of peers."""

from __future__ import annotations

import dataclasses

from quire.request import Request
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.phases.slot_manager import SlotManager
from quire.status import RequestStatus
from quire.step import IntArray


@dataclasses.dataclass(eq=False)
class RequestFinisher:
    """Ends requests and releases everything that was held for them."""

    accounts: Accounts
    slots: SlotManager

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request that runs or waits."""
        accounts = self.accounts
        request_id = request.request_id
        slot = accounts.running.slot_of(request_id)
        request.status = status
        self._tell_connector(request, slot)
        if slot is not None:
            self.slots.leave(slot)
        else:
            accounts.waiting.remove(request_id)
            accounts.holdings.drop_load(request_id)
            accounts.waiting.release_followers(request_id)
        accounts.kv.forget(request_id)
        accounts.deadlines.forget(request_id)
        accounts.grammars.forget(request_id)
        accounts.outbox.add_finished(request_id)
        accounts.stats.num_finished += 1

    def fail(
        self, request: Request, error: str, error_type: str = "", *, error_param: str | None = None
    ) -> None:
        """End a request with an error that is no step's result, and tell its client."""
        self.finish(request, RequestStatus.FINISHED_ERROR)
        self.accounts.outbox.add_error(request, error, error_type, error_param)

    def fail_for_lack_of_memory(self, request: Request) -> None:
        """End a request that does not fit into memory, although no other request will give any back."""
        pool = self.accounts.kv.pools.first
        self.fail(
            request,
            f"the request does not fit into the {pool.num_committed} KV blocks that there is memory for now, "
            f"of {pool.num_blocks} that were planned; free memory on the machine, or set num_kv_blocks",
        )

    def _tell_connector(self, request: Request, slot: int | None) -> None:
        """Inform the connector of a request's end, and hold its blocks for a peer if it says so."""
        accounts = self.accounts
        if slot is not None:
            accounts.running.update_request(slot)
        held = self._held_blocks(request.request_id, slot)
        checkpoint, state = (
            (None, None) if accounts.states is None else accounts.states.behind_prompt(request)
        )
        is_read_later, params = accounts.connector.finish(request, held, checkpoint)
        request.kv_transfer_params = params  # what came with it said where to load from
        if is_read_later and held.size:
            accounts.holdings.hold_for_peer(request.request_id, held, state)

    def _held_blocks(self, request_id: str, slot: int | None) -> IntArray:
        if slot is not None:
            return self.accounts.kv.table(slot)
        load = self.accounts.loads.get(request_id)
        return self.accounts.kv.no_prefix.block_ids if load is None else load.block_ids
