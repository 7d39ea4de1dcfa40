"""Who starts: waiting requests in the order of the queue, until one does not fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.kv.blocks.manager import LOOKUP_BLOCKS, Prefix
from quire.request import Request
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.accounts.plan import Plan
from quire.scheduling.accounts.remote_loads import RemoteLoad
from quire.scheduling.accounts.running_slots import token_limit
from quire.scheduling.phases.request_finisher import RequestFinisher
from quire.scheduling.phases.slot_manager import SlotManager
from quire.scheduling.phases.step_mix import StepMix
from quire.scheduling.phases.transfers import TransferPhase
from quire.scheduling.policies.admission import AdmissionPolicy, Candidate, MemoryView, RunningMemory
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


@dataclasses.dataclass(eq=False)
class AdmissionPhase:
    """Moves requests from the head of the queue into slots, as long as policy, blocks and budget allow.

    No request overtakes another: the first that does not fit ends the phase. Only a request of a large flow
    that has had its share, or one whose KV may be elsewhere, while its connector does not know yet, or is on
    its way for another request, is passed over for the step. While others run, a step looks for
    `LOOKUP_BLOCKS` more cached blocks of a request at most: to hash a very long prompt takes longer than they
    should wait, and so it is admitted some steps later.
    """

    accounts: Accounts
    slots: SlotManager
    finisher: RequestFinisher
    transfer_phase: TransferPhase
    step_mix: StepMix
    policy: AdmissionPolicy
    _num_promised: int = dataclasses.field(default=0, init=False)  # blocks to be given out in this step
    # The arrival number of a request that was not looked up to its end, and how many blocks were found.
    _half_found: tuple[int, int] = dataclasses.field(default=(-1, 0), init=False)

    def plan(self, plan: Plan) -> None:
        """Admit what fits into the rest of the budget, unless the plan admits no request."""
        accounts = self.accounts
        if plan.throttles_prefills or plan.admission_closed or not len(accounts.waiting.queue):
            return
        accounts.sharing.begin(plan.slots, plan.num_tokens)
        self._num_promised = 0
        admitted: list[_Admitted] = []
        try:
            self._admit_in_order(plan, admitted)
        finally:  # promises are kept whatever raised
            accounts.waiting.queue.restore()
            self._place(plan, admitted)

    def _admit_in_order(self, plan: Plan, admitted: list[_Admitted]) -> None:
        """Admit from the head of the queue until one does not fit."""
        accounts = self.accounts
        queue = accounts.waiting.queue
        memory = self._memory_view()
        may_start = accounts.suspects.may_start(self._is_live)
        while plan.budget > 0 and (request := queue.head()) is not None:
            is_suspended = may_start is not None and request.request_id not in may_start
            if is_suspended or not (budget := accounts.flow_shares.left_for(request, plan.budget)):
                queue.pass_over(request.request_id)
                continue
            if accounts.loads.is_loading(request.awaited_load):
                self._put_off(request)
                continue
            if not self._has_slots(request):
                break
            prefix = self._find_prefix(request)
            if prefix is None:
                break
            num_external, is_async = self._ask_connector(request, prefix)
            may_wait = is_async or not num_external
            if num_external is None or (may_wait and self._awaits_load(request, prefix)):
                self._put_off(request)
                continue
            if not num_external:
                prefix = self._with_filling(request, prefix)
            num_computed = prefix.num_tokens + num_external
            chunk = self.step_mix.first_chunk(self._num_wanted(request, prefix, num_computed), budget)
            if not chunk:
                break
            candidate = self._candidate(request, prefix, num_computed + (0 if is_async else chunk))
            pools = accounts.kv.pools
            unneeded = pools.unneeded(prefix.num_blocks, num_computed) if is_async else pools.all_needed
            if not self._find_blocks(candidate, request, prefix, memory, unneeded):
                if self._goes_on_without_waiting(request, is_async=is_async):
                    continue
                accounts.flow_shares.note_lack(request)
                break
            if is_async:
                accounts.waiting.begin_load(request)
                self._begin_load(request, prefix, num_external, unneeded)
            else:
                accounts.waiting.admit(request)
                admitted.append(self._admit(request, prefix, num_external, chunk))
                plan.budget -= chunk

    def _put_off(self, request: Request) -> None:
        """Pass over a request that waits for KV; those behind it in its flow need not wait for that."""
        self.accounts.waiting.queue.let_next_up(request)
        self.accounts.waiting.queue.pass_over(request.request_id)

    def _is_live(self, request_id: str) -> bool:
        return self.accounts.running.slot_of(request_id) is not None or request_id in self.accounts.waiting

    def _num_wanted(self, request: Request, prefix: Prefix, num_computed: int) -> int:
        """Return how many tokens a request could start with after `num_computed` that are there."""
        wanted = request.num_tokens - num_computed
        if self.accounts.states is not None:
            return min(wanted, self.accounts.states.first_chunk_bound(request, prefix))
        if self.accounts.eviction is None:
            return wanted
        return min(wanted, self.accounts.eviction.first_chunk_bound(request, num_computed))

    # -- what is there already -----------------------------------------------------------------------------

    def _find_prefix(self, request: Request) -> Prefix | None:
        """Return the KV that the request can begin with: its load, its leader's prompt, or cached blocks.

        None if there may be more cached blocks than this step has looked up.
        """
        load = self.accounts.loads.get(request.request_id)
        loaded = None if load is None else self._loaded_prefix(load)
        if loaded is not None:
            return loaded
        if request.needs_whole_prompt:
            return self.accounts.kv.no_prefix
        leader = self._leader_of(request)
        if leader is not None:
            return self.accounts.kv.prefix_in_slot(leader, request.num_prompt_tokens - 1)
        return self._find_cached(request)

    def _loaded_prefix(self, load: RemoteLoad) -> Prefix | None:
        """Return what a load has brought; None: its state is gone, and so it is given up."""
        if self.accounts.states is None:
            return load.prefix()
        prefix = self.accounts.states.prefix_of(load)
        if prefix is None:
            self.accounts.holdings.drop_load(load.request.request_id)
            load.request.kv_load_failed = True
        return prefix

    def _find_cached(self, request: Request) -> Prefix | None:
        """Return the cached blocks at the request's start; None: there may be more than were looked for."""
        if len(self.accounts.running) and not self._is_looked_up(request):
            return None
        return self.accounts.kv.find_prefix(request.request_id, request.all_token_array())

    def _is_looked_up(self, request: Request) -> bool:
        """Look for the next blocks of a long prompt; False if they are all there and more may be."""
        arrival, num_found = self._half_found
        num_found = num_found if arrival == request.arrival else 0
        end = num_found + LOOKUP_BLOCKS
        if (request.num_tokens - 1) // self.accounts.kv.block_size <= end:
            return True
        num_found += self.accounts.kv.count_findable(request.request_id, num_found, end)
        self._half_found = request.arrival, num_found
        return num_found < end

    def _leader_of(self, request: Request) -> int | None:
        """Return the slot of the request whose prompt this one shares, if the KV of that is there.

        It is not while the other one, having been preempted, computes its prompt again, nor until the step
        that ends it has been applied: what that loads or computes may fail. The prompts are compared: an id
        may have been reused by a request that has nothing to do with this one.
        """
        accounts = self.accounts
        running = accounts.running
        if accounts.eviction is not None or accounts.states is not None:
            return None  # it would lack the scores that the leader has of its prompt, or the state
        slot = running.slot_of(request.shares_prompt_with) if request.shares_prompt_with else None
        if slot is None or running.awaits_first_token[slot] or request.output_token_ids:
            return None
        leader = running.request_at(slot)
        is_same = np.array_equal(leader.prompt_array, request.prompt_array)
        if not is_same or leader.cache_salt != request.cache_salt:
            return None
        num_computed = accounts.in_flight.num_computed_before(slot)
        if num_computed is None:
            num_computed = int(running.num_computed[slot])
        num_tokens = request.num_prompt_tokens - 1
        return slot if num_computed >= num_tokens and accounts.kv.can_share(slot, num_tokens) else None

    def _with_filling(self, request: Request, prefix: Prefix) -> Prefix:
        """Add the blocks that this step fills, unless the request begins with a load or a leader's prompt."""
        may_follow = prefix.is_cached and self.accounts.states is None  # whose state is not there yet
        return self.accounts.sharing.extended(request, prefix) if may_follow else prefix

    def _ask_connector(self, request: Request, prefix: Prefix) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded (None: ask later), and whether they are waited for."""
        if request.kv_load_failed or not self._may_load_more(request, prefix):
            return 0, False
        count, is_async = self.accounts.connector.find(request, prefix.num_tokens)
        if count is None:
            return None, False
        # The last token is always computed, for its logits.
        count = max(0, min(count, request.num_tokens - 1 - prefix.num_tokens))
        if self.accounts.states is not None and not (is_async and self.accounts.states.can_follow(count)):
            return 0, False
        return count, is_async and count > 0

    def _may_load_more(self, request: Request, prefix: Prefix) -> bool:
        """Whether KV from elsewhere may follow a prefix: not where every prompt position is computed."""
        return prefix.is_cached and not request.needs_whole_prompt

    def _awaits_load(self, request: Request, prefix: Prefix) -> bool:
        """Whether to wait for another request's load, which has much of what this one lacks.

        A request does so once: peers that fall silent would otherwise hold it up one after the other. What
        names where its own KV is may find that sooner, and what has begun its answer does not pause.
        """
        accounts = self.accounts
        if request.awaited_load or request.kv_transfer_params is not None or request.output_token_ids:
            return False
        if not self._may_load_more(request, prefix):
            return False
        start, last = prefix.num_full, (request.num_tokens - 1) // accounts.kv.block_size
        end = min(last, start + LOOKUP_BLOCKS)
        load = accounts.loads.covering(accounts.kv.digests(request.request_id, start, end))
        if load is None:
            return False
        request.awaited_load = load.number
        return True

    # -- whether it fits -----------------------------------------------------------------------------------

    def _has_slots(self, request: Request) -> bool:
        return self.accounts.running.num_free >= max(1, request.sampling_params.beam_width)

    def _memory_view(self) -> MemoryView:
        accounts = self.accounts
        return MemoryView(
            block_size=accounts.config.block_size,
            num_blocks=accounts.kv.pools.first.num_blocks,
            num_free=accounts.kv.pools.num_free,
            num_reserved_for_loads=accounts.loads.num_missing_blocks,
            read_running=functools.partial(self._running_memory, accounts.running.in_order()),
        )

    def _running_memory(self, slots: IntArray) -> RunningMemory:
        accounts = self.accounts
        running, num_blocks = accounts.running, accounts.kv.num_blocks
        slots = slots[~running.is_beam[slots] | (num_blocks[slots] > 0)]
        num_tokens, limit = running.num_tokens[slots], running.token_limit[slots]
        num_output = num_tokens - running.num_prompt[slots]
        if accounts.eviction is not None:
            num_tokens = accounts.eviction.num_held(slots)
            limit = accounts.eviction.max_held(running.num_prompt[slots], limit)
        return RunningMemory(num_tokens, num_output, limit, num_blocks[slots])

    def _candidate(self, request: Request, prefix: Prefix, num_held_tokens: int) -> Candidate:
        """Describe a request to the policy; its first `num_held_tokens` tokens get their blocks now."""
        accounts = self.accounts
        num_tokens, limit = request.num_tokens, token_limit(request, accounts.max_model_len)
        if accounts.eviction is not None:
            num_tokens = accounts.eviction.max_held_by(request, num_tokens)
            limit = accounts.eviction.max_held_by(request, limit)
        return Candidate(
            num_tokens=num_tokens,
            token_limit=limit,
            num_cached_blocks=prefix.num_blocks,
            num_chunk_blocks=accounts.kv.blocks_for(num_held_tokens),
            num_output_tokens=len(request.output_token_ids),
        )

    def _find_blocks(
        self,
        candidate: Candidate,
        request: Request,
        prefix: Prefix,
        memory: MemoryView,
        unneeded: Sequence[int],
    ) -> bool:
        """Ask the policy whether the candidate may start; if the engine is idle, make room for it.

        An idle engine starts the request whatever the policy says, because otherwise it would wait for ever.
        It is not idle while loads are on their way: they arrive, or time out.
        """
        accounts = self.accounts
        # Loaded tokens take no budget, so they may need more blocks than were committed ahead of the step.
        needed = candidate.num_chunk_blocks - candidate.num_cached_blocks
        accounts.kv.pools.commit_ahead(self._num_promised + needed, unneeded)
        memory.num_free = self._num_free_for(prefix, unneeded)
        if len(accounts.running) or accounts.loads.num_loading:
            is_admitted = self.policy.admits(candidate, memory)
        else:
            is_admitted = self._make_room(request, prefix, needed, unneeded)
        if is_admitted:
            memory.add(candidate)
        return is_admitted

    def _num_free_for(self, prefix: Prefix, unneeded: Sequence[int]) -> int:
        """Return how many blocks, `unneeded` ones included, can be had once the prefix is in use."""
        pools = self.accounts.kv.pools
        num_free = pools.num_free if prefix.is_held else pools.num_free_beside(prefix.block_ids, unneeded)
        return num_free - self._num_promised

    def _make_room(self, request: Request, prefix: Prefix, needed: int, unneeded: Sequence[int]) -> bool:
        """Drop other requests' loads and break pins until `needed` blocks are free; False if that fails."""
        holdings = self.accounts.holdings
        while needed > self._num_free_for(prefix, unneeded):
            if not (holdings.drop_newest_load(spared=request) or holdings.break_pins()):
                return False
        return True

    def _goes_on_without_waiting(self, request: Request, *, is_async: bool) -> bool:
        """Decide on a request that does not fit although nothing runs and no transfer will give back a block.

        It ends, unless that is for a load, which needs more blocks of groups with windows than to compute its
        tokens does: then those are computed.
        """
        if len(self.accounts.running) or self.accounts.holdings.num_blocks_in_transfer:
            return False
        if is_async and self.accounts.kv.pools.windows:
            request.kv_load_failed = True
        else:
            self.finisher.fail_for_lack_of_memory(request)
        return True

    # -- admitting -----------------------------------------------------------------------------------------

    def _begin_load(
        self, request: Request, prefix: Prefix, num_external: int, unneeded: Sequence[int]
    ) -> None:
        accounts = self.accounts
        num_tokens = prefix.num_tokens + num_external
        local = self._local_blocks(request, prefix, num_tokens)
        num_local = local.shape[1]
        accounts.kv.pools.acquire(local)
        fresh = accounts.kv.pools.allocate(accounts.kv.blocks_for(num_tokens) - num_local, unneeded)
        block_ids = np.concatenate((local, fresh), axis=1)
        deadline = accounts.holdings.transfer_deadline
        num_missing = accounts.kv.blocks_for(request.num_tokens) - block_ids.shape[1]
        load = RemoteLoad(
            request=request,
            block_ids=block_ids,
            num_local_blocks=num_local,
            num_tokens=num_tokens,
            num_missing_blocks=num_missing,
            deadline=deadline,
            first_step=accounts.in_flight.next_step,
            shared_digest=self._shared_digest(request, prefix.num_full, num_tokens),
        )
        if accounts.states is not None:
            checkpoint = accounts.states.pool.take()
            assert checkpoint is not None, "what was asked when the connector was"
            load.checkpoint = checkpoint
        accounts.loads.begin(load)
        num_local_tokens = num_local * accounts.kv.block_size
        if not accounts.connector.begin_load(
            request, block_ids, num_external, load.checkpoint, num_local_tokens
        ):
            self.transfer_phase.give_up(load, "could not be loaded")

    def _local_blocks(self, request: Request, prefix: Prefix, num_tokens: int) -> IntArray:
        """Return the blocks [G, N] with which a load of so many tokens begins.

        They are those of the prefix, and with states also those that the cache has behind its checkpoint. The
        last block is loaded in any case: it is reported as failed if the state is not there. Groups with
        windows might not have the blocks that are needed beside those.
        """
        if prefix.num_findable <= prefix.num_full or self.accounts.kv.pools.windows:
            return prefix.block_ids
        token_ids = request.all_token_array()[: num_tokens - self.accounts.kv.block_size]
        return self.accounts.kv.find_full_blocks(request.request_id, token_ids)[0]

    def _shared_digest(self, request: Request, first_block: int, num_tokens: int) -> bytes | None:
        """Return the digest of the block that ends the first half of a load's full blocks.

        Beside windows it is that of the last one: behind fewer, groups lack what is seen from there. So it is
        beside states, as the load has the one behind it. None if there is none, or if it is so far back that
        waiting requests would not look for it.
        """
        accounts = self.accounts
        if accounts.eviction is not None:
            num_tokens = accounts.eviction.num_findable(num_tokens)
        count = num_tokens // accounts.kv.block_size - first_block
        if not accounts.kv.pools.windows and accounts.states is None:
            count = -(-count // 2)
        if not 0 < count <= LOOKUP_BLOCKS:
            return None
        end = first_block + count
        return next(iter(accounts.kv.digests(request.request_id, end - 1, end)), None)

    def _admit(self, request: Request, prefix: Prefix, num_external: int, chunk: int) -> _Admitted:
        """Give a request that has left the queue a slot, and promise it its blocks."""
        accounts = self.accounts
        load = accounts.loads.pop(request.request_id)
        num_cached = prefix.num_full if load is None else load.num_local_blocks
        if not prefix.is_held:
            accounts.kv.pools.acquire(prefix.block_ids)
        if num_cached:
            accounts.kv.pools.count_hit(prefix.block_ids[:, :num_cached])
        request.num_computed_tokens = prefix.num_tokens + num_external
        self._count_prefix_hit(
            request, prefix.num_tokens if load is None else num_cached * accounts.kv.block_size
        )
        accounts.deadlines.forget_queue(request.request_id)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = accounts.clock.now
        slot = self.slots.enter(request)
        accounts.flow_shares.note_start(slot, chunk)
        num_new_blocks = accounts.kv.blocks_for(request.num_computed_tokens + chunk) - prefix.num_blocks
        self._num_promised += num_new_blocks
        if prefix.owner is not None:
            accounts.sharing.follow(slot, prefix.owner)
        if not num_external:
            accounts.sharing.add(slot, prefix.num_tokens, chunk)
        beams = self.slots.open_beams(request, slot) if request.sampling_params.beam_width else []
        return _Admitted(request, slot, chunk, prefix, num_cached, num_external, num_new_blocks, beams)

    def _place(self, plan: Plan, admitted: list[_Admitted]) -> None:
        """Allocate the admitted requests' blocks, and inform runner and connector."""
        self._give_blocks(admitted)
        admitted = self._start_loads(admitted)
        for one in admitted:
            if self.accounts.states is not None:
                self.accounts.states.enter(one.slot, one.request, one.prefix)
                if one.prefix.checkpoint >= 0:
                    plan.restored.append((one.prefix.checkpoint, one.slot))
            table = self.accounts.kv.table(one.slot)
            if one.prefix.copy_from is not None:
                plan.block_copies.append((one.prefix.copy_from, table[:, one.prefix.num_full]))
            self._tell_runner(plan, one, table)
        plan.add([(one.slot, one.chunk) for one in admitted])

    def _give_blocks(self, admitted: list[_Admitted]) -> None:
        """Open the block tables of all admitted requests, with one allocation for all of them."""
        fresh = self.accounts.kv.pools.allocate(sum(one.num_new_blocks for one in admitted))
        start = 0
        for one in admitted:
            end = start + one.num_new_blocks
            held = self._held_blocks(one.prefix)
            self.accounts.kv.open(one.slot, held, fresh[:, start:end], num_cached=one.num_cached)
            start = end

    def _held_blocks(self, prefix: Prefix) -> IntArray:
        """Return the blocks of a prefix, with a reference to each; who fills any of them has its table."""
        if prefix.owner is None:
            return prefix.block_ids
        filling = self.accounts.kv.table(prefix.owner)[:, prefix.num_full : prefix.num_blocks]
        self.accounts.kv.pools.acquire(filling)
        return np.concatenate((prefix.block_ids, filling), axis=1)

    def _start_loads(self, admitted: list[_Admitted]) -> list[_Admitted]:
        """Ask the connector to load what the step waits for; return who takes part in the step."""
        return [one for one in admitted if not one.num_external or self._starts_load(one)]

    def _starts_load(self, one: _Admitted) -> bool:
        """Begin the load of an admitted request; False if that fails and its request ends.

        A request whose load fails has the blocks for its tokens all the same, and computes them.
        """
        accounts = self.accounts
        request, table = one.request, accounts.kv.table(one.slot)
        if accounts.connector.begin_load(request, table, one.num_external):
            accounts.stats.num_loaded_tokens += one.num_external
            return True
        request.num_computed_tokens = one.prefix.num_tokens
        request.num_cached_tokens = min(request.num_cached_tokens, one.prefix.num_tokens)
        accounts.running.num_computed[one.slot] = one.prefix.num_tokens
        return not self.transfer_phase.fails(request, "could not be loaded")

    def _tell_runner(self, plan: Plan, one: _Admitted, table: IntArray) -> None:
        request = one.request
        if request.is_known_to_runner:
            resumed = ResumedRequestData(
                request_id=request.request_id,
                slot=one.slot,
                block_ids=table,
                num_computed_tokens=request.num_computed_tokens,
                num_tokens=request.num_tokens,
                num_prompt_logprobs=request.num_prompt_logprobs,
            )
            plan.resumed.append(resumed)
        else:
            plan.new.append(new_request_data(request, one.slot, table))
        for other in one.beams:
            other_slot = self.accounts.running.slot_of(other.request_id)
            assert other_slot is not None
            plan.new.append(new_request_data(other, other_slot, self.accounts.kv.no_prefix.block_ids))

    def _count_prefix_hit(self, request: Request, num_local_tokens: int) -> None:
        """Count the prefix hit of a request; `num_local_tokens` of that are from this engine's own cache."""
        stats, is_caching = self.accounts.stats, self.accounts.config.enable_prefix_caching
        is_resumed = request.status is RequestStatus.PREEMPTED or bool(request.output_token_ids)
        if not is_resumed:
            request.num_cached_tokens = request.num_computed_tokens
        if not is_caching or request.needs_whole_prompt:
            return  # not looked up
        if is_resumed:
            stats.resumed_queried_tokens += request.num_tokens
            stats.resumed_hit_tokens += num_local_tokens
        elif request.shares_prompt_with is None:  # a prompt counts once, and finding one's own is no hit
            stats.prefix_queried_tokens += request.num_prompt_tokens
            stats.prefix_hit_tokens += num_local_tokens


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
        draft_scope=(request.tenant, request.cache_salt),
        pooling_params=request.pooling_params,
    )
