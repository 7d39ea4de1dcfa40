"""How a finished plan becomes the step in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.accounts.plan import Plan
from quire.scheduling.interface import StepWithdrawnError
from quire.scheduling.phases.drafting import Drafting
from quire.scheduling.phases.lost_steps import LostSteps
from quire.step import CachedRequestData, ChosenTokens, IntArray, SchedulerOutput


@dataclasses.dataclass(eq=False)
class CommitPhase:
    """Turns plans into data for the runner, and counts their tokens as computed from now on."""

    accounts: Accounts
    lost_steps: LostSteps
    drafting: Drafting

    def commit(self, plan: Plan) -> SchedulerOutput:
        """Launch the step that a plan describes and return it."""
        accounts = self.accounts
        running = accounts.running
        slots, num_tokens = plan.scheduled()
        start = running.next_start(slots)
        end = start + num_tokens
        num_known = running.num_tokens[slots] + running.num_pending[slots]
        num_drafts = np.maximum(end - num_known, 0)
        samples = end >= num_known
        eviction, in_flight = accounts.eviction, accounts.in_flight
        evictions = None if eviction is None else eviction.apply(slots, end)
        state_copies = None
        if accounts.states is not None:
            state_copies = accounts.states.copies(
                in_flight.next_step, plan.restored, slots, start, np.minimum(end, num_known)
            )
            running.num_to_repeat[slots] = num_tokens - state_copies.num_tokens
        finished_req_ids, preempted_req_ids = accounts.outbox.take_for_runner()
        output = SchedulerOutput(
            step=in_flight.next_step,
            request_ids=running.request_ids[slots].tolist(),
            slots=slots,
            num_tokens=num_tokens,
            num_computed_tokens=start,
            num_known_tokens=num_known,
            draft_token_ids=running.drafts_of(slots, num_drafts),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=preempted_req_ids,
            scheduled_new_reqs=plan.new,
            scheduled_cached_reqs=CachedRequestData(*plan.new_blocks, plan.resumed),
            forks=plan.forks,
            chosen_tokens=ChosenTokens(*_pairs(plan.chosen).T),
            block_copies=_pairs(plan.block_copies, len(accounts.kv.pools)),
            evictions=evictions,
            state_copies=state_copies,
            pending_structured_output_tokens=bool(in_flight)
            and bool((running.has_grammar[slots] & samples & (running.num_pending[slots] > 0)).any()),
            num_drafts_wanted=None if in_flight.await_tokens else self.drafting.wanted(slots, samples),
        )
        running.num_computed[slots] = end
        running.num_pending[slots] += samples
        running.num_drafts[slots] = 0
        running.awaits_tokens[slots] = output.awaits_tokens
        in_flight.launch(output)
        accounts.stats.num_scheduled_tokens += int(num_tokens.sum())
        return self._with_metadata(output)

    def _with_metadata(self, output: SchedulerOutput) -> SchedulerOutput:
        """Add what the connector's worker side must know; if the connector fails, take the step back."""
        try:
            metadata = self.accounts.connector.metadata_of(output)
        except Exception as error:
            self.lost_steps.withdraw_newest()
            raise StepWithdrawnError("the KV connector could not prepare the step") from error
        return output if metadata is None else dataclasses.replace(output, kv_connector_metadata=metadata)


def _pairs(found: Sequence[Any], *each: int) -> IntArray:
    """Return pairs of numbers, or of arrays of the shape `each`: [N, 2, *each]."""
    return np.array(found, dtype=np.int32) if found else np.empty((0, 2, *each), dtype=np.int32)
