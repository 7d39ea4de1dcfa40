"""Quire's scheduler: continuous batching by one rule, chunked prefill, prefix reuse, preemption by recompute.

The rule: a request knows `num_tokens` tokens and has the KV of `num_computed` of them; each step hands out
tokens, within a budget, so that computed catches up. A request that catches up samples its next token.

The oldest running request always finds its blocks (later ones are preempted for it, and nothing is accepted
that the whole cache could not hold), so some request always moves; that is invariant 3.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import msgspec
import numpy as np

from quire.config import SchedulerConfig
from quire.errors import DuplicateRequestError
from quire.kv.manager import KVCacheManager
from quire.request import Request, RequestStatus
from quire.scheduling.admission import (
    refuse_if_never_fits,
    refuse_if_queue_is_full,
    refuse_priority_without_policy,
)
from quire.scheduling.interface import PauseState, SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutputs, SchedulerStats, output_of
from quire.scheduling.queue import ORDERS, OrderKey, WaitingQueue
from quire.scheduling.slots import RunningSlots
from quire.step import (
    NO_TOKEN,
    BoolArray,
    CachedRequestData,
    IntArray,
    ModelRunnerOutput,
    NewRequestData,
    ResumedRequestData,
    SchedulerOutput,
)


@dataclasses.dataclass(slots=True)
class _Plan:
    """One step in the making: which slots get how many tokens, and what of the budget is left."""

    slots: IntArray  # [R] in order of service
    num_tokens: IntArray  # [R], 0 for a running request that the budget does not reach
    budget: int  # tokens
    new_blocks: tuple[IntArray, IntArray, IntArray]  # slot, index in the table, block id; [new blocks] each
    new: list[NewRequestData]
    resumed: list[ResumedRequestData]
    preempted: bool = False


class Scheduler(SchedulerInterface):
    """See the module. Time per step is a few numpy operations over the running requests."""

    def __init__(self, config: SchedulerConfig, *, num_blocks: int, max_model_len: int) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._order_of = ORDERS[config.policy]
        self._kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._watermark_blocks = int(config.watermark * num_blocks)
        self._running = RunningSlots(config.max_num_seqs, max_model_len)
        self._waiting = WaitingQueue()
        self._arrivals = itertools.count()
        self._step_in_flight: int | None = None
        # Left while a step was in flight, which may still write to their blocks.
        self._fenced_slots: list[int] = []
        self._finished_req_ids: list[str] = []  # to be told to the runner
        self._preempted_req_ids: list[str] = []
        self._pause_state = PauseState.UNPAUSED
        self._stats = SchedulerStats(num_blocks=num_blocks)

    # -- one step ------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """See `SchedulerInterface.schedule`. A step that was scheduled but never applied is dropped first."""
        self._land_step()
        plan = self._plan_running(throttle_prefills)
        self._preempt_until_it_fits(plan)
        self._extend_tables(plan)
        if self._pause_state is PauseState.UNPAUSED and not (throttle_prefills or plan.preempted):
            self._admit_waiting(plan)
        return self._commit(plan)

    def _plan_running(self, throttle_prefills: bool) -> _Plan:
        """Hand the budget to the running requests in order."""
        running = self._running
        slots = running.in_order()
        if self._pause_state is PauseState.PAUSED_ALL:
            slots = slots[:0]
        wanted = running.num_tokens[slots] - running.num_computed[slots]
        if throttle_prefills:
            slots, wanted = slots[wanted == 1], wanted[wanted == 1]
        wanted = np.minimum(wanted, self._chunk_limit())
        handed_out_before = np.cumsum(wanted) - wanted
        budget = self._config.max_num_batched_tokens
        num_tokens = np.clip(budget - handed_out_before, 0, wanted).astype(np.int32)
        empty = np.empty(0, dtype=np.int32)
        return _Plan(slots, num_tokens, budget - int(num_tokens.sum()), (empty, empty, empty), [], [])

    def _chunk_limit(self) -> int:
        """Most tokens of one request in one step."""
        return self._config.long_prefill_token_threshold or self._config.max_num_batched_tokens

    def _preempt_until_it_fits(self, plan: _Plan) -> None:
        """Preempt running requests, last in order first, until the plan's new blocks are free."""
        while self._missing_blocks(plan).sum() > self._kv.pool.num_free:
            victim = self._running.last()
            plan.budget += int(plan.num_tokens[plan.slots == victim].sum())
            plan.num_tokens = plan.num_tokens[plan.slots != victim]
            plan.slots = plan.slots[plan.slots != victim]
            plan.preempted = True
            self._preempt(victim)

    def _missing_blocks(self, plan: _Plan) -> IntArray:
        return self._kv.missing_blocks(plan.slots, self._running.num_computed[plan.slots] + plan.num_tokens)

    def _extend_tables(self, plan: _Plan) -> None:
        missing = self._missing_blocks(plan)
        if missing.any():
            plan.new_blocks = self._kv.grow(plan.slots, missing)

    def _admit_waiting(self, plan: _Plan) -> None:
        """Admit waiting requests in order, until one does not fit: nobody is overtaken."""
        reserved = self._blocks_reserved_for_prompts()
        admitted: list[tuple[int, int]] = []
        while plan.budget > 0 and self._running.has_free_slot and (request := self._waiting.head()):
            prefix = self._find_prefix(request)
            num_computed = len(prefix) * self._config.block_size
            num_tokens = min(request.num_tokens - num_computed, plan.budget, self._chunk_limit())
            chunk_blocks = self._kv.blocks_for(num_computed + num_tokens)
            prompt_blocks = self._kv.blocks_for(request.num_tokens)
            needed = prompt_blocks if self._config.reserve_full_prompt else chunk_blocks
            if needed - len(prefix) > self._blocks_for_newcomers(prefix, reserved):
                break
            reserved += needed - chunk_blocks
            slot = self._admit(plan, request, prefix, chunk_blocks)
            plan.budget -= num_tokens
            admitted.append((slot, num_tokens))
        if admitted:
            slots, num_tokens_of = np.array(admitted, dtype=np.int32).T
            plan.slots = np.concatenate((plan.slots, slots))
            plan.num_tokens = np.concatenate((plan.num_tokens, num_tokens_of))

    def _blocks_reserved_for_prompts(self) -> int:
        """Blocks that requests in the middle of their prompt were promised but do not hold yet."""
        if not self._config.reserve_full_prompt:
            return 0
        slots = self._running.in_order()
        return int(self._kv.missing_blocks(slots, self._running.num_tokens[slots]).sum())

    def _blocks_for_newcomers(self, prefix: list[int], reserved: int) -> int:
        """Free blocks that an admission may take. An idle engine withholds none: something must run."""
        withheld = reserved + self._watermark_blocks if len(self._running) else 0
        return self._kv.num_free_after_acquiring(prefix) - withheld

    def _find_prefix(self, request: Request) -> list[int]:
        # Prompt log-probabilities need every prompt position computed, so nothing may be skipped.
        if request.sampling_params.prompt_logprobs is not None:
            return []
        return self._kv.find_prefix(request.request_id, request.num_tokens)

    def _admit(self, plan: _Plan, request: Request, prefix: list[int], num_blocks: int) -> int:
        self._waiting.remove(request.request_id)
        request.num_computed_tokens = len(prefix) * self._config.block_size
        slot = self._running.occupy(request, self._key_of(request), self._max_model_len)
        self._kv.open(slot, prefix, num_blocks)
        data = (slot, self._kv.table(slot), request.num_computed_tokens)
        if request.status is RequestStatus.PREEMPTED:
            plan.resumed.append(ResumedRequestData(request.request_id, *data, request.num_tokens))
        else:
            plan.new.append(self._new_request_data(request, *data))
            self._count_prefix_hit(request)
        request.status = RequestStatus.RUNNING
        return slot

    def _new_request_data(
        self, request: Request, slot: int, block_ids: IntArray, num_computed_tokens: int
    ) -> NewRequestData:
        return NewRequestData(
            request_id=request.request_id,
            slot=slot,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            eos_token_ids=request.eos_token_ids,
            block_ids=block_ids,
            num_computed_tokens=num_computed_tokens,
        )

    def _count_prefix_hit(self, request: Request) -> None:
        request.num_cached_tokens = request.num_computed_tokens
        self._stats.prefix_queried_tokens += request.num_prompt_tokens
        self._stats.prefix_hit_tokens += request.num_cached_tokens

    def _commit(self, plan: _Plan) -> SchedulerOutput:
        """Turn the plan into the step in flight."""
        scheduled = plan.num_tokens > 0
        slots, num_tokens = plan.slots[scheduled], plan.num_tokens[scheduled]
        output = SchedulerOutput(
            step=self._stats.num_steps,
            request_ids=[self._running.request_at(slot).request_id for slot in slots.tolist()],
            slots=slots,
            num_tokens=num_tokens,
            num_computed_tokens=self._running.num_computed[slots],
            scheduled_new_reqs=plan.new,
            scheduled_cached_reqs=CachedRequestData(*plan.new_blocks, plan.resumed),
            finished_req_ids=self._finished_req_ids,
            preempted_req_ids=self._preempted_req_ids,
        )
        self._finished_req_ids = []
        self._preempted_req_ids = []
        self._step_in_flight = output.step
        self._stats.num_steps += 1
        self._stats.num_scheduled_tokens += int(num_tokens.sum())
        return output

    # -- what a step computed ------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See `SchedulerInterface.update_from_output`. Requests that ended meanwhile are passed over.

        Raises:
            ValueError: the output is not that of the step in flight.
        """
        if scheduler_output.step != self._step_in_flight:
            raise ValueError(f"step {scheduler_output.step} applied, but {self._step_in_flight} is in flight")
        # A slot that was left is fenced until the step lands, so it cannot hold another request yet.
        rows = np.flatnonzero(self._running.occupied[scheduler_output.slots])
        slots = scheduler_output.slots[rows]
        sampled = model_runner_output.sampled_token_ids[rows]
        ended = self._failed(model_runner_output.errors)
        sound = ~np.isin(slots, list(ended))
        self._running.num_computed[slots] += scheduler_output.num_tokens[rows]
        self._cache_full_blocks(slots[sound])
        num_new = self._append_sampled(slots, sampled, sound, ended)
        outputs: dict[int, EngineCoreOutputs] = {}
        for slot, tokens, count in zip(slots.tolist(), sampled.tolist(), num_new.tolist(), strict=True):
            request = self._running.request_at(slot)
            output = output_of(request, tokens[:count], ended.get(slot), model_runner_output)
            if output is not None:
                outputs.setdefault(request.client_index, EngineCoreOutputs([])).outputs.append(output)
        for slot, status in ended.items():
            self._finish(self._retire(slot), status)
        self._land_step()
        return outputs

    def _failed(self, errors: dict[str, str]) -> dict[int, RequestStatus]:
        slots = [self._running.slot_of(request_id) for request_id in errors]
        return {slot: RequestStatus.FINISHED_ERROR for slot in slots if slot is not None}

    def _cache_full_blocks(self, slots: IntArray) -> None:
        num_computed = self._running.num_computed[slots]
        for position in self._kv.positions_with_new_full_blocks(slots, num_computed).tolist():
            slot = int(slots[position])
            computed = self._running.token_ids[slot, : num_computed[position]]
            self._kv.cache_full_blocks(self._running.request_at(slot).request_id, slot, computed)

    def _append_sampled(
        self, slots: IntArray, sampled: IntArray, goes_on: BoolArray, ended: dict[int, RequestStatus]
    ) -> IntArray:
        """Append each row's tokens up to the one that ends its request; return how many were: [R]."""
        running = self._running
        num_appended = np.zeros(len(slots), dtype=np.int32)
        for column in range(sampled.shape[1]):
            goes_on = goes_on & (sampled[:, column] != NO_TOKEN)
            rows = np.flatnonzero(goes_on)
            row_slots, token_ids = slots[rows], sampled[rows, column]
            running.append(row_slots, token_ids)
            num_appended[rows] += 1
            stopped, capped = running.hits_stop_id(row_slots, token_ids), running.hits_limit(row_slots)
            for row in np.flatnonzero(stopped | capped).tolist():
                slot = int(row_slots[row])
                if stopped[row]:
                    _note_stop_token(running.request_at(slot), int(token_ids[row]))
                    ended[slot] = RequestStatus.FINISHED_STOPPED
                else:
                    ended[slot] = RequestStatus.FINISHED_LENGTH_CAPPED
            goes_on[rows[stopped | capped]] = False
        return num_appended

    # -- arrivals and ends ---------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """See `SchedulerInterface.add_request`."""
        if self.has_request(request.request_id):
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is in use by a request that has not ended",
                param="request_id",
            )
        refuse_priority_without_policy(request, self._config)
        refuse_if_never_fits(request, self._config, self._stats.num_blocks, self._max_model_len)
        refuse_if_queue_is_full(request, self._config, self._waiting)
        request.arrival = next(self._arrivals)
        prompt = np.array(request.prompt_token_ids, dtype=np.int32)
        self._kv.register(request.request_id, prompt, request.cache_salt)
        self._waiting.push(self._key_of(request), request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """See `SchedulerInterface.finish_requests`."""
        if request_ids is None:
            request_ids = self._all_request_ids()
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        finished = []
        for request_id in request_ids:
            request = self._take_out(request_id)
            if request is not None:
                self._finish(request, finished_status)
                finished.append(request)
        return finished

    def _key_of(self, request: Request) -> OrderKey:
        return self._order_of(request, request.arrival)

    def _all_request_ids(self) -> list[str]:
        running = [self._running.request_at(slot).request_id for slot in self._running.in_order().tolist()]
        return running + [request.request_id for request in self._waiting]

    def _take_out(self, request_id: str) -> Request | None:
        slot = self._running.slot_of(request_id)
        if slot is not None:
            return self._retire(slot)
        request = self._waiting.get(request_id)
        if request is not None:
            self._waiting.remove(request_id)
        return request

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self._kv.forget(request.request_id)
        self._finished_req_ids.append(request.request_id)
        self._stats.num_finished += 1

    def _preempt(self, slot: int) -> None:
        """Send a running request back to the front of its priority; its KV is computed again later."""
        request = self._retire(slot)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self._waiting.push(self._key_of(request), request)
        self._preempted_req_ids.append(request.request_id)
        self._stats.num_preemptions += 1

    def _retire(self, slot: int) -> Request:
        """Take a request out of its slot; slot and blocks are free now, or when the step in flight lands."""
        request = self._running.leave(slot)
        if self._step_in_flight is not None:
            self._fenced_slots.append(slot)
        else:
            self._free_slot(slot)
        return request

    def _land_step(self) -> None:
        self._step_in_flight = None
        for slot in self._fenced_slots:
            self._free_slot(slot)
        self._fenced_slots.clear()

    def _free_slot(self, slot: int) -> None:
        self._kv.close(slot)
        self._running.free(slot)

    # -- control and insight -------------------------------------------------------------------------------

    def has_request(self, request_id: str) -> bool:
        """See `SchedulerInterface.has_request`."""
        return request_id in self._waiting or self._running.slot_of(request_id) is not None

    def get_num_unfinished_requests(self) -> int:
        """See `SchedulerInterface.get_num_unfinished_requests`."""
        return len(self._running) + len(self._waiting)

    def has_finished_requests(self) -> bool:
        """See `SchedulerInterface.has_finished_requests`."""
        return bool(self._finished_req_ids)

    def get_request_counts(self) -> tuple[int, int]:
        """See `SchedulerInterface.get_request_counts`."""
        return len(self._running), len(self._waiting)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `SchedulerInterface.reset_prefix_cache`."""
        if reset_running_requests:
            for slot in self._running.in_order()[::-1].tolist():
                self._preempt(slot)
        elif self._kv.pool.num_in_use:
            return False
        self._kv.pool.forget_contents()
        return True

    @property
    def pause_state(self) -> PauseState:
        """See `SchedulerInterface.pause_state`."""
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        """See `SchedulerInterface.set_pause_state`."""
        self._pause_state = pause_state

    def get_kv_cache_usage(self) -> float:
        """See `SchedulerInterface.get_kv_cache_usage`."""
        return self._kv.pool.num_in_use / self._stats.num_blocks

    def make_stats(self) -> SchedulerStats:
        """See `SchedulerInterface.make_stats`."""
        stats = self._stats
        stats.num_running, stats.num_waiting = self.get_request_counts()
        stats.num_free_blocks = self._kv.pool.num_free
        return msgspec.structs.replace(stats)

    def shutdown(self) -> None:
        """See `SchedulerInterface.shutdown`."""
        self.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._land_step()

    def check_invariants(self) -> None:
        """Check invariants 1, 2, 5 and 8 as far as this side can see them; for tests, it is not fast.

        Raises:
            AssertionError: names what does not hold.
        """
        self._kv.check()
        num_running, num_waiting = self.get_request_counts()
        assert num_running <= self._config.max_num_seqs, "invariant 5: more sequences than max_num_seqs"
        assert self._kv.num_open_slots == num_running + len(self._fenced_slots), "invariant 8: a slot leaks"
        if self._config.enable_prefix_caching:
            assert self._kv.num_known_requests == num_running + num_waiting, "invariant 8: prefix keys leak"


def _note_stop_token(request: Request, token_id: int) -> None:
    params = request.sampling_params
    if token_id in params.stop_token_ids and (params.ignore_eos or token_id not in request.eos_token_ids):
        request.stop_reason = token_id
