"""Quire's scheduler: continuous batching by one rule, chunked prefill, prefix reuse, preemption by recompute.

The rule: a request knows `num_tokens` tokens (prompt, output and drafts) and has the KV of `num_computed` of
them; each step schedules tokens, within a budget, so that computed catches up. A request that catches up
samples its next token, or, with drafts, as many as are right and one more.

The first running request in the order of service finds its blocks: all others are preempted for it, pins are
broken, and nothing is accepted that the whole cache could not hold. Blocks held for transfers come back, at
the latest when these time out; if no memory will come back, the request ends with that as its reason. So some
request always moves: invariant 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import override

from quire.config import SchedulerConfig
from quire.kv.connectors.interface import KVConnector
from quire.request import Request
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.accounts.plan import Plan
from quire.scheduling.context import SchedulerContext
from quire.scheduling.guards.context import guarded
from quire.scheduling.guards.policies import build_admission, build_victim
from quire.scheduling.insight.explanation import Explanation
from quire.scheduling.insight.inspection import Inspection
from quire.scheduling.interface import PauseState, SchedulerInterface
from quire.scheduling.outputs import EngineCoreOutputs, SchedulerStats, grammar_error_fields
from quire.scheduling.phases.admission import AdmissionPhase
from quire.scheduling.phases.arrivals import Arrivals
from quire.scheduling.phases.beams import BeamPhase
from quire.scheduling.phases.commit import CommitPhase
from quire.scheduling.phases.drafting import Drafting
from quire.scheduling.phases.lost_steps import LostSteps
from quire.scheduling.phases.request_finisher import RequestFinisher
from quire.scheduling.phases.results import ResultsPhase
from quire.scheduling.phases.running import RunningPhase
from quire.scheduling.phases.slot_manager import SlotManager
from quire.scheduling.phases.step_mix import step_mix
from quire.scheduling.phases.timeouts import TimeoutPhase
from quire.scheduling.phases.transfers import TransferPhase
from quire.status import RequestStatus
from quire.step import DraftTokenIds, GrammarOutput, IntArray, ModelRunnerOutput, SchedulerOutput


class Scheduler(SchedulerInterface):
    """See the module. Time per step is a few numpy operations over the running requests.

    Attributes:
        accounts: where requests, blocks and steps are; the phases change it, others only read it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        context: SchedulerContext | None = None,
    ) -> None:
        config = config.with_step_tokens()
        context = guarded(context or SchedulerContext())
        self._connector = context.connector
        self._max_blocks_per_step = (
            config.max_num_batched_tokens // config.block_size + 2 * config.max_num_seqs
        )
        self._pause_state = PauseState.UNPAUSED
        self.accounts = accounts = Accounts(
            config, num_blocks=num_blocks, max_model_len=max_model_len, context=context
        )
        admission_policy = build_admission(config, accounts.note_replaced_policy)
        victim_policy = build_victim(config, accounts.note_replaced_policy)
        drafting = Drafting(context.draft_length, accounts.running)
        self._step_mix = mix = step_mix(config)
        self._slots = slots = SlotManager(accounts, admission_policy)
        self._finisher = finisher = RequestFinisher(accounts, slots)
        self._lost_steps = lost_steps = LostSteps(accounts, slots)
        self._timeout_phase = TimeoutPhase(accounts, finisher)
        self._arrivals = Arrivals(accounts, self._timeout_phase)
        self._transfer_phase = transfers = TransferPhase(accounts, slots, finisher)
        beams = BeamPhase(accounts, slots, finisher)
        self._running_phase = RunningPhase(accounts, slots, finisher, beams, drafting, victim_policy)
        self._admission_phase = AdmissionPhase(accounts, slots, finisher, transfers, mix, admission_policy)
        self._commit_phase = CommitPhase(accounts, lost_steps, drafting)
        self._results_phase = ResultsPhase(accounts, slots, finisher, lost_steps, beams, transfers, drafting)
        self._explanation = Explanation(accounts)
        self._inspection = Inspection(accounts)

    # -- one step ------------------------------------------------------------------------------------------

    @override
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step; at most one may be in flight, or two with `overlap_steps`.

        Steps planned before those and never applied are taken for lost: their requests are preempted.
        """
        self.accounts.clock.advance()
        for lost in self._lost_steps.drop(most_in_flight=int(self.accounts.config.overlap_steps)):
            self._transfer_phase.give_up_asked_for_in(lost)
        self._timeout_phase.expire()
        self._transfer_phase.expire()
        self._queue_compiled()
        self._commit_memory_ahead()
        plan = Plan(
            self.accounts.config.max_num_batched_tokens,
            self.accounts.kv.no_prefix.block_ids,
            throttle_prefills,
        )
        self._fill(plan)
        return self._commit_phase.commit(plan)

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar has been compiled; the others end, with a bad one as invalid."""
        for request, error in self.accounts.waiting.take_compiled():
            kind, param = grammar_error_fields(error)
            self._finisher.fail(request, str(error), kind, error_param=param)

    def _commit_memory_ahead(self) -> None:
        """Let a growing cache commit as many blocks as this step can use at most."""
        if self.accounts.kv.pools.num_uncommitted:
            self.accounts.kv.pools.commit_ahead(self._max_blocks_per_step)

    def _fill(self, plan: Plan) -> None:
        match self._pause_state:
            case PauseState.UNPAUSED:
                slot = self.accounts.flow_shares.slot_to_clear(self.accounts.fences.num_slots)
                if slot is not None:
                    self._slots.preempt_if_running(slot)
                self._step_mix.fill(plan, self._running_phase.plan, self._admission_phase.plan)
            case PauseState.PAUSED_NEW:
                self._running_phase.plan(plan)

    @override
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Requests that ended meanwhile are skipped.

        Raises:
            ValueError: the output is not that of the oldest step in flight.
        """
        self.accounts.in_flight.land(scheduler_output)
        return self._results_phase.apply(scheduler_output, model_runner_output)

    # -- grammars and drafts -------------------------------------------------------------------------------

    @override
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        return self.accounts.grammars.bitmask(scheduler_output)

    @override
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        self._results_phase.propose(draft_token_ids)

    @override
    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        self.accounts.in_flight.require_newest(scheduler_output)
        self._results_phase.replace_drafts(draft_token_ids, scheduler_output)

    @property
    @override
    def reads_priority(self) -> bool:
        return self.accounts.reads_priority

    # -- arrivals and ends ---------------------------------------------------------------------------------

    @override
    def add_request(self, request: Request) -> None:
        self._arrivals.add(request)

    @override
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if not finished_status.is_terminal:
            raise ValueError(f"finished_status is {finished_status.name}, which ends no request")
        if request_ids is None:
            request_ids = self.accounts.request_ids()
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        finished = []
        for request_id in request_ids:
            request = self.accounts.find(request_id)
            if request is not None:
                self._finisher.finish(request, finished_status)
                finished.append(request)
        return finished

    # -- control and insight -------------------------------------------------------------------------------

    @override
    def has_request(self, request_id: str) -> bool:
        return self.accounts.find(request_id) is not None

    @override
    def get_num_unfinished_requests(self) -> int:
        return sum(self.get_request_counts())

    @override
    def has_finished_requests(self) -> bool:
        return not self.accounts.outbox.is_empty

    @override
    def has_requests(self) -> bool:
        """Blocks that a peer still reads have to be watched too."""
        return super().has_requests() or self.accounts.holdings.num_blocks_held_for_peers > 0

    @override
    def next_due(self) -> float | None:
        return self.accounts.holdings.next_lease_end()

    @override
    def get_request_counts(self) -> tuple[int, int]:
        """A beam search counts once."""
        return self.accounts.request_counts()

    @override
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        running = self.accounts.running
        if self.accounts.holdings.num_blocks_held_for_peers:
            return False
        is_in_use = len(running) or len(self.accounts.loads) or self.accounts.holdings.num_blocks_in_transfer
        if is_in_use and not reset_running_requests:
            return False
        if reset_connector and not self.accounts.connector.reset():
            return False
        self._transfer_phase.cancel_all_loads()
        for slot in running.in_order()[::-1].tolist():
            self._slots.preempt_if_running(slot)
        self.accounts.holdings.break_pins()
        self.accounts.kv.pools.forget_contents()
        if self.accounts.states is not None:
            self.accounts.states.pool.forget_contents()
        return True

    @property
    @override
    def pause_state(self) -> PauseState:
        return self._pause_state

    @override
    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state
        if pause_state is PauseState.PAUSED_NEW:
            self._transfer_phase.cancel_all_loads()  # or they would hold their blocks until the pause ends

    @override
    def get_kv_connector(self) -> KVConnector | None:
        return self._connector

    @override
    def get_kv_cache_usage(self) -> float:
        return self.accounts.kv.pools.usage

    @override
    def next_blocks(self) -> IntArray:
        return self.accounts.kv.pools.first.next_blank(self._max_blocks_per_step)

    @override
    def make_stats(self) -> SchedulerStats:
        return self._inspection.make_stats()

    @override
    def oldest_waiting_request(self) -> str | None:
        waiting = self.accounts.waiting
        oldest = min(waiting, key=lambda request: (request.arrival_time, request.arrival), default=None)
        return None if oldest is None else oldest.request_id

    @override
    def explain(self, request_id: str) -> str:
        return self._explanation.explain(request_id, self._pause_state)

    @override
    def shutdown(self) -> None:
        self.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.accounts.in_flight.clear()
        self.accounts.fences.lift(self.accounts.in_flight.next_step)
        self.accounts.holdings.end_all_leases()
        self.accounts.grammars.shutdown()

    @override
    def check_invariants(self) -> None:
        """Check invariants 1, 2, 5 and 8 as far as the scheduler can see them."""
        self._inspection.check_invariants()
