"""Quire's scheduler: continuous batching by one rule, chunked prefill, prefix reuse, preemption by recompute.

The rule: a request knows `num_tokens` tokens (prompt, output and drafts) and has the KV of `num_computed` of
them; each step hands out tokens, within a budget, so that computed catches up. A request that catches up
samples its next token, or, with drafts, as many as are right and one more.

The first running request in the order of service finds its blocks: all others are preempted for it, pins are
broken, and nothing is accepted that the whole cache could not hold. What is held for transfers comes back by
itself, at the latest when their time is up; if there is no memory to come, the request ends with that as its
reason. So some request always moves: invariant 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import msgspec
import numpy as np

from quire.config import SchedulerConfig
from quire.errors import DuplicateRequestError, InvalidRequestError, RequestTimeoutError
from quire.kv.connector import KVConnector
from quire.kv.leases import LeaseKind
from quire.request import Request
from quire.scheduling.admission_phase import AdmissionPhase
from quire.scheduling.beams import BeamPhase
from quire.scheduling.context import SchedulerContext
from quire.scheduling.explanation import explain
from quire.scheduling.interface import PauseState, SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutputs, SchedulerStats
from quire.scheduling.plan import Plan
from quire.scheduling.refusals import (
    refuse_if_beams_never_fit,
    refuse_if_never_fits,
    refuse_if_queue_is_full,
    refuse_priority_without_policy,
)
from quire.scheduling.results import ResultsPhase
from quire.scheduling.running_phase import RunningPhase
from quire.scheduling.state import SchedulerState
from quire.scheduling.step_mix import step_mix
from quire.scheduling.transfers import TransferPhase
from quire.status import RequestStatus
from quire.step import (
    CachedRequestData,
    ChosenTokens,
    DraftTokenIds,
    GrammarOutput,
    IntArray,
    ModelRunnerOutput,
    SchedulerOutput,
)


class Scheduler(SchedulerInterface):
    """See the module. Time per step is a few numpy operations over the running requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        context: SchedulerContext | None = None,
    ) -> None:
        context = context or SchedulerContext()
        self._config = config
        self._context = context
        self._state = SchedulerState(
            config, num_blocks=num_blocks, max_model_len=max_model_len, context=context
        )
        self._step_mix = step_mix(config)
        beams = BeamPhase(self._state)
        self._transfers = TransferPhase(self._state)
        self._running = RunningPhase(self._state, beams)
        self._admission = AdmissionPhase(self._state, self._step_mix)
        self._results = ResultsPhase(self._state, beams, self._transfers)
        self._pause_state = PauseState.UNPAUSED

    # -- one step ------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """See `SchedulerInterface.schedule`.

        One step may be in flight, or two with `overlap_steps`. What was planned before that and never applied
        is taken for lost: its requests are preempted.
        """
        self._state.now = self._context.clock()
        self._drop_lost_steps()
        self._end_overdue()
        self._transfers.expire()
        self._queue_compiled()
        self._commit_memory_ahead()
        plan = Plan(self._config.max_num_batched_tokens, throttle_prefills)
        self._fill(plan)
        return self._commit(plan)

    def _drop_lost_steps(self) -> None:
        """Preempt the requests of steps that will not be applied any more, and tell again what they told."""
        state = self._state
        if len(state.in_flight) <= self._config.overlap_steps:
            return
        lost = list(state.in_flight)
        state.in_flight.clear()
        for step in lost:
            state.void(step)
        state.lift_fences(lost[-1].step)

    def _end_overdue(self) -> None:
        """End the requests whose time is up."""
        state = self._state
        for request_id, kind in state.deadlines.expired(state.now):
            request = state.find(request_id)
            if request is None:
                continue
            waited = state.now - request.arrival_time
            what, own, default = (
                ("started", "queue_timeout", "SchedulerConfig.queue_timeout")
                if kind == "queue"
                else ("ended", "timeout", "SchedulerConfig.request_timeout")
            )
            error = (
                f"the request had not {what} after {waited:.1f} s; raise its {own} if it has one of its own, "
                f"or {default}"
            )
            state.stats.num_timeouts += 1
            state.fail(request, error, RequestTimeoutError.__name__)

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar has been compiled; a grammar that is none ends its request."""
        for request, error in self._state.waiting.take_compiled():
            self._state.fail(request, error, InvalidRequestError.__name__, error_param="structured_outputs")

    def _commit_memory_ahead(self) -> None:
        """See to it that a growing cache has what this step can use at most."""
        config, pool = self._config, self._state.pool
        if pool.num_uncommitted:
            most_tokens = config.max_num_batched_tokens
            pool.commit_ahead(most_tokens // config.block_size + 2 * config.max_num_seqs)

    def _fill(self, plan: Plan) -> None:
        match self._pause_state:
            case PauseState.UNPAUSED:
                self._step_mix.fill(plan, self._running.plan, self._admission.plan)
            case PauseState.PAUSED_NEW:
                self._running.plan(plan)

    def _commit(self, plan: Plan) -> SchedulerOutput:
        """Turn the plan into the step in flight."""
        state, running = self._state, self._state.running
        slots, num_tokens = plan.scheduled()
        num_computed = running.num_computed[slots]
        num_known = running.num_tokens[slots] + running.num_pending[slots]
        num_drafts = np.maximum(num_computed + num_tokens - num_known, 0)
        output = SchedulerOutput(
            step=state.next_step,
            request_ids=running.request_ids[slots].tolist(),
            slots=slots,
            num_tokens=num_tokens,
            num_computed_tokens=num_computed,
            num_known_tokens=num_known,
            draft_token_ids=running.drafts_of(slots, num_drafts),
            finished_req_ids=state.finished_req_ids,
            preempted_req_ids=state.preempted_req_ids,
            scheduled_new_reqs=plan.new,
            scheduled_cached_reqs=CachedRequestData(*plan.new_blocks, plan.resumed),
            forks=plan.forks,
            chosen_tokens=ChosenTokens(*_pairs(plan.chosen).T),
            block_copies=_pairs(plan.block_copies),
            num_drafts_wanted=self._context.draft_length(len(running)),
        )
        if self._context.connector is not None:
            metadata = self._context.connector.build_connector_meta(output)
            output = dataclasses.replace(output, kv_connector_metadata=metadata)
        running.num_computed[slots] += num_tokens
        running.num_pending[slots] += num_computed + num_tokens >= num_known
        running.num_drafts[slots] = 0
        state.finished_req_ids = []
        state.preempted_req_ids = []
        state.in_flight.append(output)
        state.stats.num_steps += 1
        state.stats.num_scheduled_tokens += int(num_tokens.sum())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See `SchedulerInterface.update_from_output`. Requests that ended meanwhile are passed over.

        Raises:
            ValueError: the output is not that of the oldest step in flight.
        """
        in_flight = self._state.in_flight
        if not in_flight or scheduler_output.step != in_flight[0].step:
            expected = in_flight[0].step if in_flight else None
            raise ValueError(f"step {scheduler_output.step} applied, but {expected} is in flight")
        in_flight.popleft()
        return self._results.apply(scheduler_output, model_runner_output)

    # -- grammars and drafts -------------------------------------------------------------------------------

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """See `SchedulerInterface.get_grammar_bitmask`."""
        return self._state.grammars.bitmask(scheduler_output)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """See `SchedulerInterface.update_draft_token_ids`."""
        self._results.propose(draft_token_ids)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """See `SchedulerInterface.update_draft_token_ids_in_output`."""
        in_flight = self._state.in_flight
        if not in_flight or scheduler_output.step != in_flight[-1].step:
            raise ValueError(f"step {scheduler_output.step} is not the newest step in flight")
        self._results.replace_drafts(draft_token_ids, scheduler_output)

    # -- arrivals and ends ---------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """See `SchedulerInterface.add_request`."""
        state, config = self._state, self._config
        if self.has_request(request.request_id) or request.request_id in state.leases:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is in use by a request that has not ended, or whose KV "
                "is still held for a transfer",
                param="request_id",
            )
        state.grammars.refuse_without_backend(request)
        refuse_priority_without_policy(request, config)
        bounds = {"num_blocks": state.num_blocks, "max_model_len": state.max_model_len}
        refuse_if_never_fits(request, config, **bounds)
        if request.sampling_params.beam_width:
            refuse_if_beams_never_fit(request, config, **bounds)
        refuse_if_queue_is_full(
            request,
            config,
            num_waiting=len(state.waiting),
            num_waiting_tokens=state.waiting.num_tokens,
            retry_after=state.drain_rate.retry_after,
        )
        request.arrival = next(state.arrivals)
        request.arrival_time = self._context.clock()
        state.kv.register(request.request_id, request.prompt_array, request.cache_salt)
        state.waiting.enter(request)
        self._set_deadlines(request)

    def _set_deadlines(self, request: Request) -> None:
        config, deadlines = self._config, self._state.deadlines
        timeout = config.request_timeout if request.timeout is None else request.timeout
        queue_timeout = config.queue_timeout if request.queue_timeout is None else request.queue_timeout
        if timeout:
            deadlines.add(request.request_id, "total", request.arrival_time + timeout)
        if queue_timeout:
            deadlines.add(request.request_id, "queue", request.arrival_time + queue_timeout)

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
            request = self._state.find(request_id)
            if request is not None:
                self._state.finish(request, finished_status)
                finished.append(request)
        return finished

    def _all_request_ids(self) -> list[str]:
        running, beams = self._state.running, self._state.beams
        slots = running.in_order().tolist()
        leaders = [slot for slot in slots if (group := beams.at(slot)) is None or group.slots[0] == slot]
        running_ids = [running.request_at(slot).request_id for slot in leaders]
        return running_ids + [request.request_id for request in self._state.waiting]

    # -- control and insight -------------------------------------------------------------------------------

    def has_request(self, request_id: str) -> bool:
        """See `SchedulerInterface.has_request`."""
        return self._state.find(request_id) is not None

    def get_num_unfinished_requests(self) -> int:
        """See `SchedulerInterface.get_num_unfinished_requests`."""
        return sum(self.get_request_counts())

    def has_finished_requests(self) -> bool:
        """See `SchedulerInterface.has_finished_requests`."""
        return bool(self._state.finished_req_ids or self._state.notices)

    def has_requests(self) -> bool:
        """See `SchedulerInterface.has_requests`; blocks that a peer still reads have to be watched too."""
        return super().has_requests() or bool(self._state.leases.num_blocks(LeaseKind.TRANSFER))

    def get_request_counts(self) -> tuple[int, int]:
        """See `SchedulerInterface.get_request_counts`; a beam search counts once."""
        num_beams = sum(len(group.slots) - 1 for group in self._state.beams)
        return len(self._state.running) - num_beams, len(self._state.waiting)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `SchedulerInterface.reset_prefix_cache`."""
        state, connector = self._state, self._context.connector
        if reset_running_requests:
            self._transfers.call_off()
            for slot in state.running.in_order()[::-1].tolist():
                state.preempt_if_running(slot)
        elif len(state.running) or len(state.waiting.loads) or state.num_blocks_in_transfer:
            return False
        if connector is not None and reset_connector and not connector.reset():
            return False
        state.break_pins()
        state.pool.forget_contents()
        return True

    @property
    def pause_state(self) -> PauseState:
        """See `SchedulerInterface.pause_state`."""
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        """See `SchedulerInterface.set_pause_state`."""
        self._pause_state = pause_state

    def get_kv_connector(self) -> KVConnector | None:
        """See `SchedulerInterface.get_kv_connector`."""
        return self._context.connector

    def get_kv_cache_usage(self) -> float:
        """See `SchedulerInterface.get_kv_cache_usage`."""
        return self._state.pool.num_in_use / self._state.num_blocks

    def make_stats(self) -> SchedulerStats:
        """See `SchedulerInterface.make_stats`."""
        state, stats = self._state, self._state.stats
        stats.num_running, stats.num_waiting = self.get_request_counts()
        stats.num_free_blocks = state.pool.num_free
        stats.num_leased_blocks = sum(map(state.leases.num_blocks, LeaseKind))
        stats.num_awaiting = state.waiting.num_awaiting
        return msgspec.structs.replace(stats)

    def oldest_waiting_request(self) -> str | None:
        """See `SchedulerInterface.oldest_waiting_request`."""
        oldest = min(self._state.waiting, key=lambda request: request.arrival, default=None)
        return None if oldest is None else oldest.request_id

    def explain(self, request_id: str) -> str:
        """See `SchedulerInterface.explain`."""
        return explain(self._state, request_id, self._pause_state)

    def shutdown(self) -> None:
        """See `SchedulerInterface.shutdown`."""
        self.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._state.in_flight.clear()
        self._state.lift_fences(self._state.next_step)
        for lease_id in self._state.leases.expired(math.inf):
            self._state.end_lease(lease_id)
        self._state.grammars.shutdown()

    def check_invariants(self) -> None:
        """Check invariants 1, 2, 5 and 8 as far as this side can see them; for tests, it is not fast.

        Raises:
            AssertionError: names what does not hold.
        """
        state = self._state
        state.kv.check(state.held_outside_tables())
        num_running, num_waiting = len(state.running), len(state.waiting)
        assert num_running <= self._config.max_num_seqs, "invariant 5: more sequences than max_num_seqs"
        assert state.running.num_free + num_running + state.num_fenced_slots == self._config.max_num_seqs, (
            "invariant 8: a slot leaks"
        )
        assert state.kv.num_open_slots <= num_running, "invariant 8: an empty slot holds blocks"
        if self._config.enable_prefix_caching:
            num_requests = sum(self.get_request_counts())
            assert state.kv.num_known_requests == num_requests, "invariant 8: prefix keys leak"
        if not num_running + num_waiting:
            assert not len(state.deadlines), "invariant 8: a deadline leaks"
            assert not len(state.waiting.loads), "invariant 8: a load leaks"


NO_PAIRS: IntArray = np.empty((0, 2), dtype=np.int32)


def _pairs(pairs: list[tuple[int, int]]) -> IntArray:
    """Return pairs as an array: [N, 2]."""
    return np.array(pairs, dtype=np.int32) if pairs else NO_PAIRS
