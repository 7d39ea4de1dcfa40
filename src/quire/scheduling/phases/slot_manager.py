"""How requests get into slots and out of them; each way keeps all accounts."""

from __future__ import annotations

import dataclasses

from quire.request import Request
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.accounts.beam_groups import BeamGroup
from quire.scheduling.accounts.running_slots import token_limit
from quire.scheduling.beam_search import BeamSearch
from quire.scheduling.policies import AdmissionPolicy
from quire.status import RequestStatus


@dataclasses.dataclass(eq=False)
class SlotManager:
    """Moves requests into slots, out of them, and back to the queue."""

    accounts: Accounts
    admission_policy: AdmissionPolicy

    def enter(self, request: Request) -> int:
        """Move a request, which has left the queue, into a free slot and return that."""
        accounts = self.accounts
        slot = accounts.running.occupy(request, accounts.order.running_key(request))
        accounts.running.has_grammar[slot] = request.request_id in accounts.grammars
        if accounts.kv.pools.windows:
            is_new = request.status is not RequestStatus.PREEMPTED and not request.sampling_params.beam_width
            accounts.running.lends_prompt[slot] = is_new and accounts.connector.lends_prompt(request)
        accounts.order.admitted(request)
        request.status = RequestStatus.RUNNING
        return slot

    def open_beams(self, request: Request, slot: int) -> list[Request]:
        """Begin the beam search of a request in `slot`: the other beams get slots without blocks.

        Returns:
            The requests of the other beams.
        """
        accounts = self.accounts
        params = request.sampling_params
        num_output = token_limit(request, accounts.max_model_len) - request.num_prompt_tokens
        search = BeamSearch(params, eos_token_ids=request.eos_token_ids, max_tokens=num_output)
        others = [  # NUL: no client's request has such an id
            Request(f"{request.request_id}\0beam-{place}", request.prompt_array, params, flow=request.flow)
            for place in range(1, params.beam_width)
        ]
        group = BeamGroup(request, search, [slot])
        for place, other in enumerate(others, 1):
            other.status = RequestStatus.RUNNING
            other.num_computed_tokens = other.num_tokens
            group.slots.append(accounts.running.occupy(other, (*accounts.running.key_of(slot), place)))
        accounts.running.is_beam[group.slots] = True
        accounts.beams.add(group)
        return others

    def leave(self, slot: int) -> Request:
        """Take a request, with all its beams if it has any, out of its slot, and free its blocks."""
        accounts = self.accounts
        request = self._vacate(slot)
        group = accounts.beams.take(request.request_id)
        if group is not None:
            for other in group.slots[1:]:
                accounts.outbox.add_finished(self._vacate(other).request_id)
            if request.status is RequestStatus.PREEMPTED:
                request.output_token_ids = []  # of whichever beam was in this slot: the search starts over
        accounts.order.left(request)
        self.admission_policy.left(request)
        accounts.waiting.release_followers(request.request_id)
        return request

    def _vacate(self, slot: int) -> Request:
        """Empty a slot. Its blocks may be given away at once, because steps are computed in order."""
        accounts = self.accounts
        request = accounts.running.leave(slot)
        accounts.kv.close(slot, request.priority)
        accounts.fences.free_slot(slot)
        return request

    def prompt_is_computed(self, slot: int) -> None:
        """Queue the requests that waited for a request's prompt, and pin it if that was asked for."""
        accounts = self.accounts
        request = accounts.running.request_at(slot)
        accounts.running.awaits_first_token[slot] = False
        accounts.waiting.release_followers(request.request_id)
        if request.pin_prefix:
            accounts.holdings.pin(request)

    def preempt(self, slot: int) -> None:
        """Send a running request back to the front of its priority; its KV is computed again later."""
        accounts = self.accounts
        accounts.running.request_at(slot).status = RequestStatus.PREEMPTED
        request = self.leave(slot)
        request.num_computed_tokens = 0
        accounts.outbox.add_preempted(request.request_id)
        accounts.waiting.queue.push(request)
        accounts.stats.num_preemptions += 1

    def preempt_if_running(self, slot: int) -> None:
        """Preempt whatever has this slot, if anything; a beam search leaves all of its slots at once."""
        if self.accounts.running.occupied[slot]:
            group = self.accounts.beams.at(slot)
            self.preempt(slot if group is None else group.slots[0])
