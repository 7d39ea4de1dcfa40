"""Who starts: waiting requests in the order of the queue, until one does not fit."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from quire.kv.manager import NO_PREFIX, Prefix
from quire.request import Request
from quire.scheduling.plan import Plan
from quire.scheduling.policies.admission import Candidate, MemoryView, RunningMemory
from quire.scheduling.remote_loads import RemoteLoad
from quire.scheduling.running_slots import token_limit
from quire.scheduling.state import SchedulerState
from quire.scheduling.step_mix import StepMix
from quire.status import RequestStatus
from quire.step import IntArray, NewRequestData, ResumedRequestData


class _Admitted(NamedTuple):
    """A request that has a slot and is still to get its blocks."""

    request: Request
    slot: int
    chunk: int  # tokens of this step
    prefix: Prefix
    num_cached: int  # leading blocks that can be found already
    num_external: int  # tokens to be loaded in this step
    num_new_blocks: int
    beams: list[Request]  # what stands for the other beams of a search, in slots of their own


class AdmissionPhase:
    """Moves requests from the head of the queue into slots, as long as policy, blocks and budget allow.

    Nobody is overtaken: the first that does not fit ends the phase. Only a request whose KV may be elsewhere,
    while its connector does not know yet, is passed over for the step.
    """

    def __init__(self, state: SchedulerState, step_mix: StepMix) -> None:
        self._state = state
        self._step_mix = step_mix
        self._num_promised = 0  # blocks of requests that were admitted in this step and do not have them yet

    def plan(self, plan: Plan) -> None:
        """Admit what fits into the rest of the budget, unless the plan admits nobody."""
        if plan.throttles_prefills or plan.admits_nobody or not len(self._state.waiting.queue):
            return
        passed_over: list[Request] = []
        admitted: list[_Admitted] = []
        try:
            self._admit_in_order(plan, admitted, passed_over)
        finally:  # also if a policy or a connector fails, what was promised is kept
            for request in passed_over:
                self._state.waiting.queue.push(request)
            self._carry_out(plan, admitted)

    def _admit_in_order(self, plan: Plan, admitted: list[_Admitted], passed_over: list[Request]) -> None:
        """Admit from the head of the queue until one does not fit."""
        queue = self._state.waiting.queue
        memory = self._memory_view()
        while plan.budget > 0 and (request := queue.head()) is not None:
            if not self._has_slots(request):
                break
            prefix = self._find_prefix(request)
            num_external, is_async = self._ask_connector(request, prefix)
            if num_external is None:
                queue.remove(request.request_id)
                passed_over.append(request)
                continue
            num_computed = prefix.num_tokens + num_external
            chunk = self._step_mix.first_chunk(request.num_tokens - num_computed, plan.budget)
            if not chunk:
                break
            if not self._fits(request, prefix, num_computed + (0 if is_async else chunk), memory):
                if self._ends_because_it_cannot_wait(request):
                    continue
                break
            queue.remove(request.request_id)
            if is_async:
                self._begin_load(request, prefix, num_external)
            else:
                admitted.append(self._admit(request, prefix, num_external, chunk))
                plan.budget -= chunk

    # -- what is there already -----------------------------------------------------------------------------

    def _find_prefix(self, request: Request) -> Prefix:
        """Return the KV that the request can begin with: its load, its leader's prompt, or cached blocks."""
        state = self._state
        load = state.waiting.loads.get(request.request_id)
        if load is not None:
            return load.prefix()
        # Prompt log-probabilities need every prompt position computed, so nothing may be skipped.
        if request.sampling_params.prompt_logprobs is not None:
            return NO_PREFIX
        leader = self._leader_of(request)
        if leader is not None:
            return state.kv.prefix_in_slot(leader, request.num_prompt_tokens - 1)
        return state.kv.find_prefix(request.request_id, request.all_token_array())

    def _leader_of(self, request: Request) -> int | None:
        """Return the slot of the request whose prompt this one shares, if the KV of that is there.

        It is not while the other one, having been preempted, computes its prompt again. The prompts are
        compared: an id may be in use anew by a request that has nothing to do with this one.
        """
        running = self._state.running
        slot = running.slot_of(request.shares_prompt_with) if request.shares_prompt_with else None
        if slot is None or running.awaits_first_token[slot] or request.output_token_ids:
            return None
        leader = running.request_at(slot)
        is_same = np.array_equal(leader.prompt_array, request.prompt_array)
        if not is_same or leader.cache_salt != request.cache_salt:
            return None
        num_there = min(int(running.num_computed[slot]), self._state.kv.capacity(slot))
        return slot if num_there >= request.num_prompt_tokens - 1 else None

    def _ask_connector(self, request: Request, prefix: Prefix) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded (None: ask later), and whether they are waited for."""
        connector = self._state.context.connector
        is_settled = prefix.is_held or prefix.copy_from is not None or request.kv_load_failed
        if connector is None or is_settled or request.sampling_params.prompt_logprobs is not None:
            return 0, False
        count, is_async = connector.get_num_new_matched_tokens(request, prefix.num_tokens)
        if count is None:
            return None, False
        # The last token is always computed, for its logits.
        count = max(0, min(count, request.num_tokens - 1 - prefix.num_tokens))
        return count, is_async and count > 0

    # -- whether it fits -----------------------------------------------------------------------------------

    def _has_slots(self, request: Request) -> bool:
        return self._state.running.num_free >= max(1, request.sampling_params.beam_width)

    def _memory_view(self) -> MemoryView:
        state = self._state
        return MemoryView(
            block_size=state.config.block_size,
            num_blocks=state.num_blocks,
            num_free=state.pool.num_free,
            read_running=functools.partial(self._running_memory, state.running.in_order()),
        )

    def _running_memory(self, slots: IntArray) -> RunningMemory:
        running, num_blocks = self._state.running, self._state.kv.num_blocks
        slots = slots[~running.is_beam[slots] | (num_blocks[slots] > 0)]
        num_tokens = running.num_tokens[slots]
        return RunningMemory(
            num_tokens=num_tokens,
            num_output_tokens=num_tokens - running.num_prompt[slots],
            token_limit=running.token_limit[slots],
            num_blocks=num_blocks[slots],
        )

    def _fits(self, request: Request, prefix: Prefix, num_held_tokens: int, memory: MemoryView) -> bool:
        """Return whether there are blocks for the request; the first `num_held_tokens` get theirs now.

        If nothing runs, the request starts whatever the policy says, for else it would wait for ever.
        """
        state = self._state
        candidate = Candidate(
            num_tokens=request.num_tokens,
            token_limit=token_limit(request, state.max_model_len),
            num_cached_blocks=len(prefix.block_ids),
            num_chunk_blocks=state.kv.blocks_for(num_held_tokens),
            num_output_tokens=len(request.output_token_ids),
        )
        # What is loaded takes no budget, so there may be more of it than was seen to ahead of the step.
        needed = candidate.num_chunk_blocks - candidate.num_cached_blocks
        state.pool.commit_ahead(self._num_promised + needed)
        memory.num_free = self._num_free_for(prefix)
        if len(state.running):
            fits = state.admission.admits(candidate, memory)
        else:
            fits = self._make_room(request, prefix, needed)
        if fits:
            memory.add(candidate)
        return fits

    def _num_free_for(self, prefix: Prefix) -> int:
        """Return the blocks that are free once the prefix is in use."""
        num_free = self._state.pool.num_free - self._num_promised
        return num_free if prefix.is_held else num_free - self._state.pool.count_idle(prefix.block_ids)

    def _make_room(self, request: Request, prefix: Prefix, needed: int) -> bool:
        """Free what others hold without running, until `needed` blocks are free; False if that fails."""
        state = self._state
        while needed > self._num_free_for(prefix):
            others = [load for load in state.waiting.loads.arrived() if load.request is not request]
            if others:
                state.drop_load(others[-1].request.request_id)
            elif not state.break_pins():
                return False
        return True

    def _ends_because_it_cannot_wait(self, request: Request) -> bool:
        """End a request that does not fit although nothing runs and nobody will give back a block."""
        state = self._state
        if len(state.running) or state.num_blocks_in_transfer:
            return False
        state.fail_for_lack_of_memory(request)
        return True

    # -- carrying it out -----------------------------------------------------------------------------------

    def _begin_load(self, request: Request, prefix: Prefix, num_external: int) -> None:
        state, connector = self._state, self._state.context.connector
        assert connector is not None
        num_tokens = prefix.num_tokens + num_external
        state.pool.acquire(prefix.block_ids)
        missing = state.kv.blocks_for(num_tokens) - len(prefix.block_ids)
        block_ids = np.concatenate((prefix.block_ids, state.pool.allocate(missing)))
        deadline = state.now + state.config.kv_transfer_timeout
        load = RemoteLoad(request, block_ids, len(prefix.block_ids), num_tokens, deadline)
        state.waiting.loads.begin(load)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        connector.update_state_after_alloc(request, block_ids.tolist(), num_external)

    def _admit(self, request: Request, prefix: Prefix, num_external: int, chunk: int) -> _Admitted:
        """Give a request that has left the queue a slot, and promise it its blocks."""
        state = self._state
        load = state.waiting.loads.pop(request.request_id)
        num_cached = len(prefix.block_ids) if load is None else load.num_local_blocks
        if not prefix.is_held:
            state.pool.acquire(prefix.block_ids)
        if num_cached:
            state.pool.count_hit(prefix.block_ids[:num_cached])
        request.num_computed_tokens = prefix.num_tokens + num_external
        if request.status is not RequestStatus.PREEMPTED:
            self._count_prefix_hit(request)
        slot = state.enter_slot(request)
        num_new_blocks = state.kv.blocks_for(request.num_computed_tokens + chunk) - len(prefix.block_ids)
        self._num_promised += num_new_blocks
        beams = state.open_beams(request, slot) if request.sampling_params.beam_width else []
        return _Admitted(request, slot, chunk, prefix, num_cached, num_external, num_new_blocks, beams)

    def _carry_out(self, plan: Plan, admitted: list[_Admitted]) -> None:
        """Give all requests that were admitted their blocks, in one operation, and tell the runner."""
        state = self._state
        fresh = state.pool.allocate(self._num_promised)
        start = self._num_promised = 0
        for one in admitted:
            end = start + one.num_new_blocks
            state.kv.open(one.slot, one.prefix.block_ids, fresh[start:end], num_cached=one.num_cached)
            start = end
            table = state.kv.table(one.slot)
            if one.prefix.copy_from is not None:
                plan.block_copies.append((one.prefix.copy_from, int(table[len(one.prefix.block_ids)])))
            if one.num_external:
                assert state.context.connector is not None
                state.context.connector.update_state_after_alloc(
                    one.request, table.tolist(), one.num_external
                )
                state.stats.num_loaded_tokens += one.num_external
            self._tell_runner(plan, one, table)
        plan.add([(one.slot, one.chunk) for one in admitted])

    def _tell_runner(self, plan: Plan, one: _Admitted, table: IntArray) -> None:
        request = one.request
        if request.is_known_to_runner:
            data = (one.slot, table, request.num_computed_tokens, request.num_tokens)
            plan.resumed.append(ResumedRequestData(request.request_id, *data))
        else:
            plan.new.append(new_request_data(request, one.slot, table))
        for other in one.beams:
            other_slot = self._state.running.slot_of(other.request_id)
            assert other_slot is not None
            plan.new.append(new_request_data(other, other_slot, np.empty(0, dtype=np.int32)))

    def _count_prefix_hit(self, request: Request) -> None:
        request.num_cached_tokens = request.num_computed_tokens
        self._state.stats.prefix_queried_tokens += request.num_prompt_tokens
        self._state.stats.prefix_hit_tokens += request.num_cached_tokens


def new_request_data(request: Request, slot: int, block_ids: IntArray) -> NewRequestData:
    """Return everything about a request that the runner has not seen."""
    return NewRequestData(
        request_id=request.request_id,
        slot=slot,
        prompt_token_ids=request.prompt_array,
        output_token_ids=request.output_token_ids,
        sampling_params=request.sampling_params,
        eos_token_ids=request.eos_token_ids,
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens,
    )
