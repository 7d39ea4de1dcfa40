"""How requests arrive: what can never be served is refused, everything else is numbered and waits."""

from __future__ import annotations

import dataclasses

from quire.config import SchedulerConfig
from quire.errors import DuplicateRequestError
from quire.grammar.manager import GrammarManager
from quire.kv.blocks.manager import NO_PREFIX, KVCacheManager
from quire.request import Request
from quire.request_options import require_text
from quire.scheduling.accounts.cache_eviction import CacheEviction
from quire.scheduling.accounts.kv_holdings import KVHoldings
from quire.scheduling.accounts.state import SchedulerState
from quire.scheduling.accounts.waiting import WaitingRequests
from quire.scheduling.guards.connector_calls import ConnectorCalls
from quire.scheduling.phases.refusals import (
    refuse_beams_beside_eviction,
    refuse_ids_out_of_range,
    refuse_if_beams_never_fit,
    refuse_if_never_fits,
    refuse_if_queue_is_full,
    refuse_unread_priority,
)
from quire.scheduling.phases.timeouts import TimeoutPhase


@dataclasses.dataclass(eq=False, kw_only=True)
class Arrivals:
    """Lets requests in.

    `reads_priority` says whether any of the policies reads priorities.
    """

    config: SchedulerConfig
    max_model_len: int
    reads_priority: bool
    state: SchedulerState
    kv: KVCacheManager
    waiting: WaitingRequests
    holdings: KVHoldings
    grammars: GrammarManager
    timeouts: TimeoutPhase
    connector: ConnectorCalls
    eviction: CacheEviction | None

    def add(self, request: Request) -> None:
        """Let a request in, see `SchedulerInterface.add_request`."""
        self._refuse(request)
        now = self.waiting.number(request)
        try:
            self.kv.register(request.request_id, request.prompt_array, request.cache_salt)
            self.timeouts.start(request, now)
            self.waiting.enter(request)
        except BaseException:
            self._take_back(request)
            raise

    def _take_back(self, request: Request) -> None:
        """Forget a request that could not be let in to the end."""
        request_id = request.request_id
        self.waiting.remove(request_id)
        self.grammars.forget(request_id)
        self.timeouts.deadlines.forget(request_id)
        self.kv.forget(request_id)
        self.connector.finish(request, NO_PREFIX.block_ids)

    def _refuse(self, request: Request) -> None:
        """Raise the error about a request that cannot be served, or not now."""
        request_id = request.request_id
        if self.state.find(request_id) is not None or self.holdings.has_lease(request_id):
            raise DuplicateRequestError(
                f"request id {request_id!r} is in use by a request that has not ended, or whose KV is still "
                "held for a transfer",
                param="request_id",
            )
        require_text(request.cache_salt, "cache_salt")
        require_text(request.tenant, "tenant")
        refuse_ids_out_of_range(request)
        self.grammars.refuse_without_backend(request)
        if not self.reads_priority:
            refuse_unread_priority(request, self.config)
        bounds = {"num_blocks": self.kv.pool.num_blocks, "max_model_len": self.max_model_len}
        lengths = None if self.eviction is None else self.eviction.lengths
        refuse_if_never_fits(request, self.config, eviction=lengths, **bounds)
        if request.sampling_params.beam_width:
            refuse_beams_beside_eviction(request, self.config)
            refuse_if_beams_never_fit(request, self.config, **bounds)
        if not request.is_resumed:
            refuse_if_queue_is_full(
                request,
                self.config,
                num_waiting=len(self.waiting),
                num_waiting_tokens=self.waiting.num_tokens,
                retry_after=self.waiting.drain_rate.retry_after,
            )
        self.connector.arrive(request)
