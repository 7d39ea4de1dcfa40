"""What the scheduler knows, and the ways in which a request changes place, each of which keeps all accounts.

The phases of a step (`running`, `admission`, `landing`, `beams`, `transfers`) work on this state.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Container, Iterator

import numpy as np

from quire.config import SchedulerConfig
from quire.grammar.manager import Grammars
from quire.kv.block_pool import BlockPool
from quire.kv.leases import LeaseKind, LeaseTable
from quire.kv.manager import NO_PREFIX, KVCacheManager
from quire.request import Request
from quire.scheduling.beam_groups import BeamGroup, BeamGroups
from quire.scheduling.beam_search import BeamSearch
from quire.scheduling.context import SchedulerContext
from quire.scheduling.deadlines import Deadlines
from quire.scheduling.drain_rate import DrainRate
from quire.scheduling.outputs import EngineCoreOutput, SchedulerStats
from quire.scheduling.policies import ADMISSIONS, ORDERS, VICTIMS
from quire.scheduling.running_slots import RunningSlots, token_limit
from quire.scheduling.waiting import WaitingRequests
from quire.status import FinishReason, RequestStatus
from quire.step import IntArray, SchedulerOutput

logger = logging.getLogger(__name__)


class SchedulerState:
    """The rooms of one scheduler; see `SchedulerInterface` for the arguments."""

    def __init__(
        self, config: SchedulerConfig, *, num_blocks: int, max_model_len: int, context: SchedulerContext
    ) -> None:
        self.config = config
        self.context = context
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.kv = KVCacheManager(
            BlockPool(
                num_blocks,
                config.block_size,
                retention=config.prefix_retention,
                commit=context.commit_blocks,
                events=context.kv_events,
            ),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.running = RunningSlots(config.max_num_seqs, max_model_len)
        self.beams = BeamGroups()
        self.grammars = Grammars(context.grammars, clock=context.clock, executor=context.executor)
        self.order = ORDERS.build(config.policy, config=config, find_cached=self._find_cached)
        self.admission = ADMISSIONS.build(config.admission, config=config)
        self.victims = VICTIMS.build(config.victim)
        self.waiting = WaitingRequests(self.order, self.grammars, self._is_computing_prompt)
        self.leases = LeaseTable()
        self.deadlines = Deadlines()
        self.drain_rate = DrainRate(context.clock)
        self.arrivals = itertools.count()
        self.now = context.clock()  # seconds, as of the step being planned
        self.in_flight: deque[SchedulerOutput] = deque()
        self.finished_req_ids: list[str] = []  # to be told to the runner
        self.preempted_req_ids: list[str] = []
        self.notices: list[tuple[int, EngineCoreOutput]] = []  # (client, output) that no step brings about
        self.stats = SchedulerStats(num_blocks=num_blocks)
        # Left while steps were in flight whose outputs still name them, with the last of those steps.
        self._fenced_slots: deque[tuple[int, int]] = deque()
        # Given up while a transfer may still write to them, with the step that calls it off and its request.
        self._fenced_blocks: deque[tuple[int, str, IntArray]] = deque()

    @property
    def pool(self) -> BlockPool:
        """The block pool."""
        return self.kv.pool

    @property
    def next_step(self) -> int:
        """Number of the step that is planned next."""
        return self.stats.num_steps

    def find(self, request_id: str) -> Request | None:
        """Return a request that waits or runs, or None."""
        slot = self.running.slot_of(request_id)
        return self.waiting.get(request_id) if slot is None else self.running.request_at(slot)

    # -- in and out of slots -------------------------------------------------------------------------------

    def enter_slot(self, request: Request) -> int:
        """Move a request, which has left the waiting room, into a free slot and return that."""
        if request.status is not RequestStatus.PREEMPTED:
            self.drain_rate.note(request.num_tokens, 1, queue_is_empty=not len(self.waiting.queue))
        self.deadlines.forget_queue(request.request_id)
        slot = self.running.occupy(request, self.order.running_key(request))
        self.running.awaits_tokens[slot] = request.request_id in self.grammars
        self.order.admitted(request)
        request.status = RequestStatus.RUNNING
        return slot

    def open_beams(self, request: Request, slot: int) -> list[Request]:
        """Begin the beam search of a request in `slot`: the other beams get slots without blocks.

        Returns:
            The requests that stand for the other beams.
        """
        params = request.sampling_params
        num_output = token_limit(request, self.max_model_len) - request.num_prompt_tokens
        search = BeamSearch(params, eos_token_ids=request.eos_token_ids, max_tokens=num_output)
        others = [  # NUL: no client's request has such an id
            Request(f"{request.request_id}\0beam-{place}", request.prompt_array, params)
            for place in range(1, params.beam_width)
        ]
        group = BeamGroup(request, search, [slot])
        for place, other in enumerate(others, 1):
            other.status = RequestStatus.RUNNING
            other.num_computed_tokens = other.num_tokens
            group.slots.append(self.running.occupy(other, (*self.running.key_of(slot), place)))
        self.running.is_beam[group.slots] = True
        self.running.awaits_tokens[group.slots] = True
        self.beams.add(group)
        return others

    def leave_slot(self, slot: int) -> Request:
        """Take a request out of its slot, with all its beams if it has any, and its blocks back."""
        request = self._vacate(slot)
        group = self.beams.pop(request.request_id)
        if group is not None:
            for other in group.slots[1:]:
                self.finished_req_ids.append(self._vacate(other).request_id)
            if request.status is RequestStatus.PREEMPTED:
                request.output_token_ids = []  # of whichever beam was in this slot: the search begins anew
        self.order.left(request)
        self.admission.left(request)
        self.waiting.release_followers(request.request_id)
        return request

    def _vacate(self, slot: int) -> Request:
        """Empty a slot.

        The blocks may be given away at once, because steps are computed in order. The slot cannot, as long as
        the outputs of steps in flight name it.
        """
        request = self.running.leave(slot)
        self.kv.close(slot, request.priority)
        if self.in_flight:
            self._fenced_slots.append((self.in_flight[-1].step, slot))
        else:
            self.running.free(slot)
        return request

    def prompt_is_computed(self, slot: int) -> None:
        """Let those go on who waited for a request's prompt, and pin it if that was asked for."""
        request = self.running.request_at(slot)
        self.running.awaits_first_token[slot] = False
        self.waiting.release_followers(request.request_id)
        if request.pin_prefix:
            self._pin(request)

    def _pin(self, request: Request) -> None:
        """Hold what can be found of a request's prompt; pins of the same blocks are one, to the later end."""
        block_ids, digest = self.kv.find_full_blocks(request.request_id, request.prompt_array)
        if not len(block_ids):
            return
        lease_id = f"pin {digest.hex()}"
        deadline = self.now + request.pin_prefix
        if not self.leases.renew(lease_id, deadline):
            self.pool.acquire(block_ids)
            self.leases.grant(lease_id, LeaseKind.PIN, block_ids.tolist(), deadline)

    def preempt(self, slot: int) -> None:
        """Send a running request back to the front of its priority; its KV is computed again later."""
        self.running.request_at(slot).status = RequestStatus.PREEMPTED
        request = self.leave_slot(slot)
        request.num_computed_tokens = 0
        self.preempted_req_ids.append(request.request_id)
        self.waiting.queue.push(request)
        self.stats.num_preemptions += 1

    def preempt_if_running(self, slot: int) -> None:
        """Preempt whatever has this slot, if anything; a beam search leaves all of its slots at once."""
        if self.running.occupied[slot]:
            group = self.beams.at(slot)
            self.preempt(slot if group is None else group.slots[0])

    # -- ends ----------------------------------------------------------------------------------------------

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request wherever it is; after this, nothing is held for it but what a peer was promised."""
        request_id = request.request_id
        slot = self.running.slot_of(request_id)
        request.status = status
        self._hand_over(request, slot)
        if slot is not None:
            self.leave_slot(slot)
        else:
            self.waiting.remove(request_id)
            self.drop_load(request_id)
            self.waiting.release_followers(request_id)
        self.kv.forget(request_id)
        self.deadlines.forget(request_id)
        self.grammars.forget(request_id)
        self.finished_req_ids.append(request_id)
        self.stats.num_finished += 1

    def fail(
        self, request: Request, error: str, error_type: str = "", *, error_param: str | None = None
    ) -> None:
        """End a request with an error that no step brings about, and note it for its client."""
        self.finish(request, RequestStatus.FINISHED_ERROR)
        for sequence_id in request.beam_sequence_ids or (request.request_id,):
            output = EngineCoreOutput(
                sequence_id,
                [],
                finish_reason=FinishReason.ERROR,
                error=error,
                error_type=error_type,
                error_param=error_param,
            )
            self.notices.append((request.client_index, output))

    def fail_for_lack_of_memory(self, request: Request) -> None:
        """End a request for which there is no memory, although nobody else has any that will come back."""
        pool = self.pool
        self.fail(
            request,
            f"the request does not fit into the {pool.num_committed} KV blocks that there is memory for now, "
            f"of {pool.num_blocks} that were planned; free memory on the machine, or set num_kv_blocks",
        )

    def _held_blocks(self, request_id: str, slot: int | None) -> IntArray:
        if slot is not None:
            return self.kv.table(slot)
        load = self.waiting.loads.get(request_id)
        return NO_PREFIX.block_ids if load is None else load.block_ids

    def _hand_over(self, request: Request, slot: int | None) -> None:
        """Tell the connector that a request has ended, and hold its blocks for a peer if it says so."""
        request.kv_transfer_params = None  # what came with it said where to load from
        if self.context.connector is None:
            return
        if slot is not None:
            self.running.update_request(slot)
        held = self._held_blocks(request.request_id, slot)
        block_ids: list[int] = held.tolist()
        try:
            delay_free, params = self.context.connector.request_finished(request, block_ids)
        except Exception:  # the client's answer must not depend on it
            logger.exception("the KV connector failed at the end of request %r", request.request_id)
            return
        request.kv_transfer_params = params
        if delay_free and block_ids:
            self.pool.acquire(held)
            deadline = self.now + self.config.kv_transfer_timeout
            self.leases.grant(request.request_id, LeaseKind.TRANSFER, block_ids, deadline)

    # -- loads and leases ----------------------------------------------------------------------------------

    def drop_load(self, request_id: str) -> None:
        """Give up what a waiting request has loaded or is loading.

        A transfer that is under way may write to its blocks until the runner has seen that it is called off.
        """
        load = self.waiting.loads.pop(request_id)
        if load is None:
            return
        if load.has_arrived:
            self.pool.release(load.block_ids[::-1])
        else:
            assert self.context.connector is not None
            self.context.connector.cancel_load(request_id)
            self._fenced_blocks.append((self.next_step, request_id, load.block_ids))

    def end_lease(self, lease_id: str) -> None:
        """Free the blocks of a lease, if it is still held."""
        self._release(self.leases.release(lease_id))

    def break_pins(self) -> bool:
        """Free all pinned blocks, because a request cannot go on without them; whether there were any."""
        pins = self.leases.break_pins()
        for pin in pins:
            self._release(pin.block_ids)
        return bool(pins)

    def _release(self, block_ids: tuple[int, ...]) -> None:
        self.pool.release(np.array(block_ids[::-1], dtype=np.int32))

    # -- steps in flight -----------------------------------------------------------------------------------

    def lift_fences(self, step: int) -> None:
        """Make usable again what only steps up to `step`, which have landed, could still touch."""
        while self._fenced_slots and self._fenced_slots[0][0] <= step:
            self.running.free(self._fenced_slots.popleft()[1])
        while self._fenced_blocks and self._fenced_blocks[0][0] <= step:
            self.pool.release(self._fenced_blocks.popleft()[2])

    def void(self, step: SchedulerOutput, at_fault: Container[str] = ()) -> None:
        """Take back a step that the runner may not have taken note of.

        Its requests are computed again, except those `at_fault`; and its news is told again, as far as no
        later step has made it untrue.
        """
        is_innocent = [request_id not in at_fault for request_id in step.request_ids]
        # A search may have been placed in a step that had no tokens left for its beams.
        for slot in (*step.slots[is_innocent].tolist(), *step.chosen_tokens.slots.tolist()):
            self.preempt_if_running(slot)
        has_left = self._has_no_slot
        self.finished_req_ids += filter(has_left, step.finished_req_ids)
        self.preempted_req_ids += filter(has_left, step.preempted_req_ids)
        self._call_off_again(step.step)

    def _has_no_slot(self, request_id: str) -> bool:
        return self.running.slot_of(request_id) is None

    def _call_off_again(self, step: int) -> None:
        """Call off once more what steps up to `step` did: the runner may not have seen them."""
        for index, (called_off_in, request_id, block_ids) in enumerate(self._fenced_blocks):
            if called_off_in <= step:
                assert self.context.connector is not None
                self.context.connector.cancel_load(request_id)
                self._fenced_blocks[index] = (self.next_step, request_id, block_ids)

    def held_outside_tables(self) -> Iterator[int]:
        """Yield every block reference that is not a running request's: for invariant 2."""
        yield from self.leases.held()
        yield from self.waiting.loads.held()
        for _, _, block_ids in self._fenced_blocks:
            yield from block_ids.tolist()

    @property
    def num_fenced_slots(self) -> int:
        """Slots that wait for a step to land: for leak checks."""
        return len(self._fenced_slots)

    @property
    def num_blocks_in_transfer(self) -> int:
        """Blocks that come back by themselves: a peer reads them, or a load writes to them."""
        fenced = sum(len(block_ids) for _, _, block_ids in self._fenced_blocks)
        loading = sum(len(load.block_ids) for load in self.waiting.loads.on_their_way())
        return fenced + loading + self.leases.num_blocks(LeaseKind.TRANSFER)

    def _find_cached(self, request: Request) -> int:
        return self.kv.find_prefix(request.request_id, request.all_token_array()).num_tokens

    def _is_computing_prompt(self, request_id: str) -> bool:
        slot = self.running.slot_of(request_id)
        if slot is None:
            leader = self.waiting.get(request_id)
            return leader is not None and not leader.output_token_ids
        return bool(self.running.awaits_first_token[slot])
