"""How requests arrive: what can never be served is refused, everything else is numbered and waits."""

from __future__ import annotations

import dataclasses

from quire.errors import DuplicateRequestError
from quire.kv.blocks.manager import NO_PREFIX
from quire.request import Request
from quire.request_options import require_text
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.phases.refusals import (
    refuse_beams_beside_eviction,
    refuse_ids_out_of_range,
    refuse_if_beams_never_fit,
    refuse_if_never_fits,
    refuse_if_queue_is_full,
    refuse_unread_priority,
)
from quire.scheduling.phases.timeouts import TimeoutPhase


@dataclasses.dataclass(eq=False)
class Arrivals:
    """Lets requests in."""

    accounts: Accounts
    timeouts: TimeoutPhase

    def add(self, request: Request) -> None:
        """Let a request in, see `SchedulerInterface.add_request`."""
        accounts = self.accounts
        self._refuse(request)
        now = accounts.waiting.number(request)
        try:
            accounts.kv.register(request.request_id, request.prompt_array, request.cache_salt)
            self.timeouts.start(request, now)
            accounts.waiting.enter(request)
        except BaseException:
            self._take_back(request)
            raise

    def _take_back(self, request: Request) -> None:
        """Forget a request that could not be let in to the end."""
        accounts = self.accounts
        request_id = request.request_id
        accounts.waiting.remove(request_id)
        accounts.grammars.forget(request_id)
        accounts.deadlines.forget(request_id)
        accounts.kv.forget(request_id)
        accounts.connector.finish(request, NO_PREFIX.block_ids)

    def _refuse(self, request: Request) -> None:
        """Raise the error about a request that cannot be served, or not now."""
        accounts, request_id = self.accounts, request.request_id
        if accounts.find(request_id) is not None or accounts.holdings.has_lease(request_id):
            raise DuplicateRequestError(
                f"request id {request_id!r} is in use by a request that has not ended, or whose KV is still "
                "held for a transfer",
                param="request_id",
            )
        require_text(request.cache_salt, "cache_salt")
        require_text(request.tenant, "tenant")
        refuse_ids_out_of_range(request)
        accounts.grammars.refuse_without_backend(request)
        refuse_unread_priority(request, accounts)
        refuse_if_never_fits(request, accounts)
        if request.sampling_params.beam_width:
            refuse_beams_beside_eviction(request, accounts)
            refuse_if_beams_never_fit(request, accounts)
        if not request.is_resumed:
            refuse_if_queue_is_full(request, accounts)
        accounts.connector.arrive(request)
