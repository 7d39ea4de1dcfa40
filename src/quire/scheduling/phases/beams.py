"""Carrying out what beam searches decide: shared blocks, copied blocks, and the tokens sent to the runner.

The search itself, which beams continue with which tokens, is in `beam_search`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.accounts.beam_groups import BeamGroup
from quire.scheduling.accounts.plan import Plan
from quire.scheduling.beam_search import BeamCandidates, BeamStep
from quire.scheduling.outputs import EngineCoreOutput, error_fields
from quire.scheduling.phases.request_finisher import RequestFinisher
from quire.scheduling.phases.slot_manager import SlotManager
from quire.status import FinishReason, RequestStatus
from quire.step import ForkData, IntArray, ModelRunnerOutput


@dataclasses.dataclass(eq=False)
class BeamPhase:
    """Carries out what the searches decide."""

    accounts: Accounts
    slots: SlotManager
    finisher: RequestFinisher

    def place(self, plan: Plan, make_room: Callable[[Plan, int, BeamGroup], bool]) -> None:
        """Put the beams of searches that have advanced into their slots, with their new tokens.

        Args:
            plan: takes the forks, the copies and the tokens.
            make_room: frees that many blocks for a search; False if it cannot, or has preempted the search.
        """
        accounts = self.accounts
        for group in list(accounts.beams.values()):
            if group.step is None or accounts.beams.at(group.slots[0]) is not group:
                continue  # nothing to place, or preempted for the search before it
            if make_room(plan, self._max_new_blocks(group, group.step), group):
                self._place(plan, group, group.step)
                group.step = None
            elif accounts.beams.at(group.slots[0]) is group:
                plan.admission_closed = True
                self.slots.preempt(group.slots[0])

    def _max_new_blocks(self, group: BeamGroup, step: BeamStep) -> int:
        """Return how many blocks the copies of a step take at most.

        A beam that takes a dead beam's place reuses the dead beam's last block.
        """
        num_blocks = self.accounts.kv.num_blocks
        forked_to = [group.slots[place] for place, parent, _ in step.continuations if place != parent]
        return sum(not num_blocks[slot] for slot in forked_to)

    def _place(self, plan: Plan, group: BeamGroup, step: BeamStep) -> None:
        running, kv = self.accounts.running, self.accounts.kv
        for place in step.emptied_places:
            kv.close(group.slots[place])
        for place, parent, _ in step.continuations:
            if place != parent:
                self._fork(plan, group.slots[parent], group.slots[place])
        slots = np.array([group.slots[place] for place, _, _ in step.continuations], dtype=np.int32)
        token_ids = np.array([token_id for _, _, token_id in step.continuations], dtype=np.int32)
        running.append(slots, token_ids)
        plan.chosen += zip(slots.tolist(), token_ids.tolist(), strict=True)

    def _fork(self, plan: Plan, parent: int, slot: int) -> None:
        running, kv = self.accounts.running, self.accounts.kv
        num_tokens = int(running.num_tokens[parent])
        copied = kv.fork(parent, slot, num_tokens)
        if copied is not None:
            plan.block_copies.append(copied)
        running.token_ids[slot, :num_tokens] = running.token_ids[parent, :num_tokens]
        running.num_tokens[slot] = running.num_computed[slot] = num_tokens
        plan.forks.append(ForkData(slot, parent, kv.table(slot), num_tokens + 1, num_tokens))

    def take(self, slots: IntArray, computed: ModelRunnerOutput) -> None:
        """Take the candidates of a step; a search advances when those of all its beams are there."""
        running, beams = self.accounts.running, self.accounts.beams
        for slot in slots[running.is_beam[slots]].tolist():
            group = beams.at(slot)
            positions = computed.logprobs.get(running.request_at(slot).request_id)
            if group is None or positions is None:
                continue
            if running.awaits_first_token[slot]:
                self.slots.prompt_is_computed(slot)
            group.candidates[group.slots.index(slot)] = BeamCandidates.of(positions[0])
            if len(group.candidates) == len(group.search.live_places):
                group.step = group.search.advance(group.candidates)
                group.candidates = {}

    def fail(self, computed: ModelRunnerOutput) -> None:
        """End the searches that have a beam which could not be computed."""
        for request_id, error in computed.errors.items():
            slot = self.accounts.running.slot_of(request_id)
            group = None if slot is None else self.accounts.beams.at(slot)
            if group is not None:
                kind, param = error_fields(computed.error_params.get(request_id))
                self.finisher.fail(group.request, error, kind, error_param=param)

    def finish_done(self) -> None:
        """End the requests whose search has ended, with their best hypotheses."""
        for group in list(self.accounts.beams.values()):
            if group.step is not None and group.step.ends_search:
                self._finish(group)

    def _finish(self, group: BeamGroup) -> None:
        request = group.request
        self.finisher.finish(request, RequestStatus.FINISHED_STOPPED)
        hypotheses = iter(group.search.hypotheses())
        for sequence_id in request.beam_sequence_ids or (request.request_id,):
            output = EngineCoreOutput(
                sequence_id,
                [],
                num_cached_tokens=request.num_cached_tokens,
                first_scheduled_time=request.first_scheduled_time,
            )
            hypothesis = next(hypotheses, None)
            if hypothesis is None:
                output.finish_reason = FinishReason.ERROR
                output.error = "the model gives the probability 0 to every further continuation"
            else:
                output.new_token_ids = hypothesis.token_ids
                output.finish_reason = hypothesis.finish_reason
                output.stop_reason = hypothesis.stop_reason
                output.cumulative_logprob = hypothesis.cumulative_logprob
            output.kv_transfer_params = request.kv_transfer_params
            self.accounts.outbox.add_output(request.client_index, output)
