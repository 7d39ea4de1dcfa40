"""What a step computed: tokens are appended, full blocks are cached, and finished requests end."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from typing import TypeVar

import numpy as np

from quire.errors import QuireError
from quire.request import Request
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    error_fields,
    grammar_error_fields,
)
from quire.scheduling.phases.beams import BeamPhase
from quire.scheduling.phases.drafting import Drafting
from quire.scheduling.phases.lost_steps import LostSteps
from quire.scheduling.phases.request_finisher import RequestFinisher
from quire.scheduling.phases.runner_faults import checked, valid_connector_output, without_past_errors
from quire.scheduling.phases.slot_manager import SlotManager
from quire.scheduling.phases.transfers import TransferPhase
from quire.status import FinishReason, RequestStatus
from quire.step import (
    NO_TOKEN,
    BoolArray,
    DraftTokenIds,
    IntArray,
    ModelRunnerOutput,
    SchedulerOutput,
)

Given = TypeVar("Given")


@dataclasses.dataclass(slots=True, frozen=True)
class End:
    """Why a request ends with this step."""

    status: RequestStatus
    error: str | None = None
    error_type: str = ""
    error_param: str | None = None

    @classmethod
    def by_grammar(cls, error: QuireError) -> End:
        """Return the end of a request whose grammar cannot be followed any further."""
        return cls(RequestStatus.FINISHED_ERROR, str(error), *grammar_error_fields(error))


@dataclasses.dataclass(slots=True)
class _StepResults:
    """The rows of a step whose requests still run; arrays [R]."""

    slots: IntArray
    sampled: IntArray  # [R, most sampled tokens]
    num_computed: IntArray  # by this and all earlier steps, rejected drafts not counted
    num_new: IntArray  # tokens appended
    ended: dict[int, End]  # by slot


@dataclasses.dataclass(eq=False)
class ResultsPhase:
    """Applies steps in the order in which they were planned."""

    accounts: Accounts
    slots: SlotManager
    finisher: RequestFinisher
    lost_steps: LostSteps
    beam_phase: BeamPhase
    transfer_phase: TransferPhase
    drafting: Drafting

    def apply(
        self, scheduler_output: SchedulerOutput, computed: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Apply one step and return its outputs by client; requests that have ended are skipped."""
        accounts = self.accounts
        computed = checked(scheduler_output, computed, accounts.running)
        computed = self._without_suspects(scheduler_output, computed)
        self._note_applied(scheduler_output, computed)
        if computed.kv_connector_output is not None:
            news = valid_connector_output(computed.kv_connector_output, accounts.kv.pools.first.num_blocks)
            self.transfer_phase.take(news, scheduler_output)
        if not computed.is_applied:
            self.transfer_phase.give_up_asked_for_in(scheduler_output)
        self._send_back_followers(scheduler_output, computed)
        computed = without_past_errors(scheduler_output, computed, accounts.running)
        self.beam_phase.fail(computed)
        results = self._settle(scheduler_output, computed)
        self._append(results)
        if computed.pooled:
            self._end_pooled(results, computed)
        self._advance_grammars(results)
        self._cache_full_blocks(results)
        if accounts.states is not None:
            failed = [slot for slot, end in results.ended.items() if end.error is not None]
            accounts.states.land(scheduler_output.step, failed)
        self.beam_phase.take(results.slots, computed)
        self._take_drafts(results, scheduler_output, computed)
        outputs = self._outputs(results, computed)
        self.beam_phase.finish_done()
        accounts.fences.lift(scheduler_output.step)
        accounts.outbox.add_notices_to(outputs)
        return outputs

    def propose(self, draft_token_ids: DraftTokenIds) -> None:
        """Take drafts for running requests, see `SchedulerInterface.update_draft_token_ids`."""
        request_ids = draft_token_ids.request_ids
        slots, drafts = self._of_running(request_ids, draft_token_ids.draft_token_ids)
        self._propose(slots, _padded(drafts))
        if draft_token_ids.num_steps_without_drafts is not None:
            slots, pauses = self._of_running(request_ids, draft_token_ids.num_steps_without_drafts)
            self.drafting.pause(slots, np.array(pauses, np.int32))

    def _of_running(self, request_ids: list[str], given: list[Given]) -> tuple[IntArray, list[Given]]:
        """Return the slots of those requests that run, and what is given for each."""
        running, found = self.accounts.running, zip(request_ids, given, strict=True)
        by_slot = {slot: one for name, one in found if (slot := running.slot_of(name)) is not None}
        return np.array(list(by_slot), np.int32), list(by_slot.values())

    def replace_drafts(self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput) -> None:
        """Replace the drafts in the newest step in flight; a request keeps at most as many as it had."""
        accounts = self.accounts
        given = dict(zip(draft_token_ids.request_ids, draft_token_ids.draft_token_ids, strict=True))
        planned = scheduler_output.num_drafts
        rows = np.flatnonzero(planned)
        request_ids = [scheduler_output.request_ids[row] for row in rows.tolist()]
        drafts = _padded([given.get(request_id, []) for request_id in request_ids])
        for row, request_id, ids in zip(rows.tolist(), request_ids, drafts.tolist(), strict=True):
            kept = _without_padding(ids)[: planned[row]]
            if request_id in accounts.grammars:
                kept = accounts.grammars.valid_drafts(request_id, kept)
            scheduler_output.draft_token_ids[row] = NO_TOKEN
            scheduler_output.draft_token_ids[row, : len(kept)] = kept
            num_fewer = int(planned[row]) - len(kept)
            scheduler_output.num_tokens[row] -= num_fewer
            self._take_back(scheduler_output.slots[row : row + 1], num_fewer)
            accounts.stats.num_scheduled_tokens -= num_fewer

    # -- counts and tokens ---------------------------------------------------------------------------------

    def _without_suspects(
        self, scheduler_output: SchedulerOutput, computed: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        """Give the error of a step that failed to the request at fault; all others are computed again."""
        accounts = self.accounts
        if not computed.failure:
            if computed.is_applied and len(accounts.suspects):
                accounts.suspects.clear(self._live_request_ids(scheduler_output))
            return computed
        request_ids = self._live_request_ids(scheduler_output)
        if not request_ids:  # a step before this one has failed, and all have gone back
            return computed
        at_fault = accounts.suspects.cause_of_failure(request_ids)
        for slot in accounts.running.in_order()[::-1].tolist():
            if accounts.running.occupied[slot] and self._request_id_at(slot) != at_fault:
                self.slots.preempt_if_running(slot)
        errors = {} if at_fault is None else {at_fault: computed.failure}
        return dataclasses.replace(computed, errors=errors)

    def _live_request_ids(self, scheduler_output: SchedulerOutput) -> list[str]:
        """Return the requests of a step that still run; a beam search counts once."""
        slots = scheduler_output.slots[self.accounts.running.occupied[scheduler_output.slots]]
        return list(dict.fromkeys(map(self._request_id_at, slots.tolist())))

    def _request_id_at(self, slot: int) -> str:
        group = self.accounts.beams.at(slot)
        return (self.accounts.running.request_at(slot) if group is None else group.request).request_id

    def _note_applied(self, scheduler_output: SchedulerOutput, computed: ModelRunnerOutput) -> None:
        if not computed.is_applied:
            self.lost_steps.void(scheduler_output, at_fault=computed.errors)
            return
        running = self.accounts.running
        for new in scheduler_output.scheduled_new_reqs:
            # By slot, because its id may be another request's by now. One that was preempted is sent again.
            if running.occupied[new.slot]:
                running.request_at(new.slot).is_known_to_runner = True

    def _send_back_followers(self, scheduler_output: SchedulerOutput, computed: ModelRunnerOutput) -> None:
        """Preempt the requests that used blocks of a request of the same step that has failed."""
        rows = zip(scheduler_output.request_ids, scheduler_output.slots.tolist(), strict=True)
        failed = [slot for name, slot in rows if name in computed.errors] if computed.errors else []
        for slot in self.accounts.sharing.end_step(scheduler_output.step, failed):
            self.slots.preempt_if_running(slot)

    def _settle(self, scheduler_output: SchedulerOutput, computed: ModelRunnerOutput) -> _StepResults:
        """Bring the counts of the rows whose requests still run in line with what was computed."""
        accounts = self.accounts
        running = accounts.running
        # A slot that was left is fenced until this step has been applied, so no other request is in it yet.
        rows = running.occupied[scheduler_output.slots].nonzero()[0]
        slots = scheduler_output.slots[rows]
        sampled = computed.sampled_token_ids[rows]
        num_computed = (scheduler_output.num_computed_tokens + scheduler_output.num_tokens)[rows]
        running.num_pending[slots] -= scheduler_output.samples[rows]
        if scheduler_output.draft_token_ids.shape[1]:
            num_drafts = scheduler_output.num_drafts[rows]
            num_accepted = np.maximum(np.count_nonzero(sampled != NO_TOKEN, axis=1) - 1, 0)
            num_rejected = num_drafts - np.minimum(num_accepted, num_drafts)
            self._take_back(slots, num_rejected)
            num_computed = num_computed - num_rejected
            accounts.stats.num_draft_tokens += int(num_drafts.sum())
            accounts.stats.num_accepted_tokens += int((num_drafts - num_rejected).sum())
        ended = {
            slot: End(
                RequestStatus.FINISHED_ERROR, error, *error_fields(computed.error_params.get(request_id))
            )
            for request_id, error in computed.errors.items()
            if (slot := running.slot_of(request_id)) is not None
        }
        return _StepResults(slots, sampled, num_computed, np.zeros(len(slots), dtype=np.int32), ended)

    def _take_back(self, slots: IntArray, num_drafts: IntArray | int) -> None:
        """Count drafts of `slots`, which no state has taken in, as not computed."""
        running = self.accounts.running
        running.num_computed[slots] -= num_drafts
        if self.accounts.states is not None:
            running.num_to_repeat[slots] -= num_drafts

    def _append(self, results: _StepResults) -> None:
        """Append each row's tokens up to the one that ends its request."""
        running, slots = self.accounts.running, results.slots
        goes_on: BoolArray = ~running.is_beam[slots]
        if results.ended:
            goes_on &= ~running.are_among(slots, list(results.ended))
        for column in range(results.sampled.shape[1]):
            goes_on = goes_on & (results.sampled[:, column] != NO_TOKEN)
            rows = goes_on.nonzero()[0]
            if not rows.size:
                return
            row_slots, token_ids = slots[rows], results.sampled[rows, column]
            running.append(row_slots, token_ids)
            results.num_new[rows] += 1
            stopped, capped = running.hits_stop_id(row_slots, token_ids), running.hits_limit(row_slots)
            done = stopped | capped
            for row in done.nonzero()[0].tolist():
                slot = int(row_slots[row])
                if stopped[row]:
                    _note_stop_token(running.request_at(slot), int(token_ids[row]))
                    results.ended[slot] = End(RequestStatus.FINISHED_STOPPED)
                else:
                    results.ended[slot] = End(RequestStatus.FINISHED_LENGTH_CAPPED)
            goes_on[rows[done]] = False

    def _end_pooled(self, results: _StepResults, computed: ModelRunnerOutput) -> None:
        """End the requests whose prompts have become rows."""
        names = self.accounts.running.request_ids[results.slots].tolist()
        for slot, name in zip(results.slots.tolist(), names, strict=True):
            if name in computed.pooled:
                results.ended.setdefault(slot, End(RequestStatus.FINISHED_STOPPED))

    def _advance_grammars(self, results: _StepResults) -> None:
        grammars, running = self.accounts.grammars, self.accounts.running
        if not grammars.num_live:
            return
        structured = running.has_grammar[results.slots] & (results.num_new > 0)
        for row in structured.nonzero()[0].tolist():
            slot = int(results.slots[row])
            request_id = running.request_at(slot).request_id
            token_ids = results.sampled[row, : results.num_new[row]].tolist()
            if request_id in grammars and not grammars.accept(request_id, token_ids):
                results.num_new[row] = 0  # the client gets no token that breaks the grammar
                error = grammars.error(request_id)
                assert error is not None
                results.ended[slot] = End.by_grammar(error)

    def _cache_full_blocks(self, results: _StepResults) -> None:
        accounts = self.accounts
        running, kv = accounts.running, accounts.kv
        num_computed = np.minimum(results.num_computed, running.num_tokens[results.slots])
        if accounts.beams:  # a beam's output may be replaced by another beam's
            num_prompt = running.num_prompt[results.slots]
            is_output = running.is_beam[results.slots] & (num_computed > num_prompt)
            num_computed = np.where(is_output, num_prompt, num_computed)
        if accounts.eviction is not None:
            num_computed = accounts.eviction.findable(num_computed)
        rows = kv.rows_with_new_full_blocks(results.slots, num_computed)
        if results.ended:
            failed = [slot for slot, end in results.ended.items() if end.error is not None]
            rows = rows[~running.are_among(results.slots[rows], failed)]
        if rows.size:
            slots = results.slots[rows]
            kv.cache_full_blocks(
                running.request_ids[slots].tolist(), slots, num_computed[rows], running.token_ids
            )

    # -- drafts --------------------------------------------------------------------------------------------

    def _take_drafts(
        self, results: _StepResults, scheduler_output: SchedulerOutput, computed: ModelRunnerOutput
    ) -> None:
        occupied = self.accounts.running.occupied[scheduler_output.slots]
        if computed.num_steps_without_drafts is not None:
            self.drafting.pause(results.slots, computed.num_steps_without_drafts[occupied])
        if computed.draft_token_ids is None:
            return
        has_ended = self.accounts.running.are_among(results.slots, list(results.ended))
        goes_on = (results.num_new > 0) & ~has_ended
        self._propose(results.slots[goes_on], computed.draft_token_ids[occupied][goes_on])

    def _propose(self, slots: IntArray, draft_ids: IntArray) -> None:
        accounts = self.accounts
        running, grammars = accounts.running, accounts.grammars
        if accounts.eviction is not None:
            return  # what goes after a step cannot come back when a draft is rejected
        for row in np.flatnonzero(running.has_grammar[slots] | running.is_beam[slots]).tolist():
            request_id = running.request_at(int(slots[row])).request_id
            proposed = draft_ids[row][draft_ids[row] != NO_TOKEN].tolist()
            valid = grammars.valid_drafts(request_id, proposed) if request_id in grammars else []
            draft_ids[row, len(valid) :] = NO_TOKEN
        running.propose(slots, draft_ids)

    # -- outputs -------------------------------------------------------------------------------------------

    def _outputs(self, results: _StepResults, computed: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """End finished requests and return the outputs by client; most rows have just one new token."""
        running = self.accounts.running
        rows, is_special = self._rows_with_output(results, computed)
        names = running.request_ids[results.slots[rows]].tolist()
        outputs = list(map(EngineCoreOutput, names, results.sampled[rows].tolist()))
        clients = running.client_index[results.slots[rows]].tolist()
        if special := is_special.nonzero()[0].tolist():
            with self.accounts.kv.closing_together():
                for position in special:
                    outputs[position] = self._special_output(int(rows[position]), results, computed)
        if len(set(clients)) == 1:
            return {clients[0]: EngineCoreOutputs(outputs)}
        by_client: dict[int, EngineCoreOutputs] = {}
        for client, output in zip(clients, outputs, strict=True):
            by_client.setdefault(client, EngineCoreOutputs([])).outputs.append(output)
        return by_client

    def _rows_with_output(
        self, results: _StepResults, computed: ModelRunnerOutput
    ) -> tuple[IntArray, BoolArray]:
        """Return the rows with output, and which of them have more than one new token."""
        running, slots = self.accounts.running, results.slots
        speaks: BoolArray = results.num_new > 0
        special: BoolArray = (results.num_new != results.sampled.shape[1]) | running.awaits_first_token[slots]
        if results.ended:
            has_ended = running.are_among(slots, list(results.ended))
            speaks, special = speaks | has_ended, special | has_ended
        if computed.prompt_logprobs:
            has_logprobs = np.isin(running.request_ids[slots], list(computed.prompt_logprobs))
            speaks, special = speaks | has_logprobs, special | has_logprobs
        if computed.logprobs:
            special |= np.isin(running.request_ids[slots], list(computed.logprobs))
        rows: IntArray = speaks.nonzero()[0].astype(np.int32)
        return rows, special[rows]

    def _special_output(
        self, row: int, results: _StepResults, computed: ModelRunnerOutput
    ) -> EngineCoreOutput:
        slot, num_new = int(results.slots[row]), int(results.num_new[row])
        request = self.accounts.running.request_at(slot)
        end = results.ended.get(slot)
        pooled = computed.pooled.get(request.request_id)
        if (num_new or pooled is not None) and self.accounts.running.awaits_first_token[slot]:
            self.slots.prompt_is_computed(slot)
        if end is not None:
            self.finisher.finish(request, end.status)
        logprobs = computed.logprobs.get(request.request_id)
        prompt_logprobs = computed.prompt_logprobs.get(request.request_id)
        if prompt_logprobs is not None:
            request.num_prompt_logprobs += len(prompt_logprobs)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=results.sampled[row, :num_new].tolist(),
            finish_reason=None if end is None else FinishReason.of(end.status),
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            logprobs=None if logprobs is None else logprobs[:num_new],
            prompt_logprobs=prompt_logprobs,
            error=None if end is None else end.error,
            error_type="" if end is None else end.error_type,
            error_param=None if end is None else end.error_param,
            kv_transfer_params=None if end is None else request.kv_transfer_params,
            pooled=pooled,
        )


def _padded(drafts: Collection[list[int]]) -> IntArray:
    """Return rows of drafts as an array [rows, most drafts]; raises if any of them is no number."""
    width = max(map(len, drafts), default=0)
    padded = [[*ids, *[NO_TOKEN] * (width - len(ids))] for ids in drafts]
    return np.array(padded, np.int32).reshape(len(drafts), width)


def _without_padding(draft_ids: list[int]) -> list[int]:
    return list(itertools.takewhile(lambda token_id: token_id >= 0, draft_ids))


def _note_stop_token(request: Request, token_id: int) -> None:
    params = request.sampling_params
    if token_id in params.stop_token_ids and (params.ignore_eos or token_id not in request.eos_token_ids):
        request.stop_reason = token_id
