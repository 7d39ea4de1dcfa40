"""What a scheduler is made of: its accounts, what moves requests between them, and the phases of a step.

Each part is given what it touches, so that its fields say what that is.
"""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.grammar.manager import GrammarManager
from quire.kv.blocks.block_pool import BlockPool
from quire.kv.blocks.manager import KVCacheManager
from quire.kv.blocks.retention import RETENTIONS
from quire.kv.eviction.lengths import eviction_lengths
from quire.scheduling.accounts.beam_groups import BeamGroups
from quire.scheduling.accounts.cache_eviction import CacheEviction
from quire.scheduling.accounts.deadlines import Deadlines
from quire.scheduling.accounts.fences import Fences
from quire.scheduling.accounts.flow_shares import FlowShares
from quire.scheduling.accounts.kv_holdings import KVHoldings
from quire.scheduling.accounts.outbox import Outbox
from quire.scheduling.accounts.pinned_blocks import PinnedBlocks
from quire.scheduling.accounts.remote_loads import RemoteLoads
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.scheduling.accounts.state import SchedulerState
from quire.scheduling.accounts.step_sharing import StepSharing
from quire.scheduling.accounts.steps_in_flight import StepsInFlight
from quire.scheduling.accounts.suspects import Suspects
from quire.scheduling.accounts.waiting import WaitingRequests
from quire.scheduling.context import SchedulerContext
from quire.scheduling.guards.connector_calls import ConnectorCalls
from quire.scheduling.guards.context import guarded
from quire.scheduling.guards.policies import build_admission, build_order, build_victim
from quire.scheduling.guards.step_clock import StepClock
from quire.scheduling.insight.explanation import Explanation
from quire.scheduling.insight.inspection import Inspection
from quire.scheduling.outputs import SchedulerStats
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


class SchedulerParts:
    """The parts of one scheduler, see `SchedulerInterface` for the arguments."""

    def __init__(
        self, config: SchedulerConfig, *, num_blocks: int, max_model_len: int, context: SchedulerContext
    ) -> None:
        self._config = config
        self._context = context = guarded(context)
        self._max_model_len = max_model_len
        self.stats = SchedulerStats(num_blocks=num_blocks)
        self.clock = StepClock(context.clock)
        self.connector = ConnectorCalls(context.connector, self.clock, patience=config.kv_transfer_timeout)
        self.outbox = Outbox()
        self.in_flight = StepsInFlight()
        self.deadlines = Deadlines()
        self._build_policies_and_accounts(num_blocks)
        self._build_holdings()
        self._build_transitions()
        self._build_arrivals()
        self._build_beams_and_transfers()
        self._build_planning()
        self._build_applying()
        self._build_insight()

    def _build_policies_and_accounts(self, num_blocks: int) -> None:
        config, context = self._config, self._context
        self.retention = RETENTIONS.build(config.prefix_retention)
        self.pool = BlockPool(
            num_blocks,
            config.block_size,
            retention=self.retention,
            commit=context.commit_blocks,
            events=context.kv_events,
            on_replaced_retention=self._note_replaced_policy,
        )
        self.kv = KVCacheManager(
            self.pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self._max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.running = RunningSlots(config.max_num_seqs, self._max_model_len)
        self.drafting = Drafting(context.draft_length, self.running)
        lengths = eviction_lengths(config)
        self.eviction = None
        if lengths is not None:
            self.eviction = CacheEviction(lengths=lengths, running=self.running, kv=self.kv, stats=self.stats)
        self.beams = BeamGroups()
        self.grammars = GrammarManager(
            context.grammars,
            clock=context.clock,
            max_cache_bytes=config.max_grammar_cache_bytes,
            executor=context.executor,
        )
        self.order = build_order(config, self.kv.count_cached_tokens, self._note_replaced_policy)
        self.admission_policy = build_admission(config, self._note_replaced_policy)
        self.victim_policy = build_victim(config, self._note_replaced_policy)
        self.step_mix = step_mix(config)
        self.suspects = Suspects()
        self.sharing = StepSharing(self.kv, self.running, self.in_flight, self.eviction)

    def _note_replaced_policy(self) -> None:
        self.stats.num_replaced_policies += 1

    def _build_holdings(self) -> None:
        self.loads = RemoteLoads()
        self.waiting = WaitingRequests(
            self.order, self.grammars, self.loads, self.running, read_clock=self._context.clock
        )
        self.state = SchedulerState(self.running, self.beams, self.waiting, self.kv)
        self.fences = Fences(self.in_flight, self.running, self.pool)
        self.holdings = KVHoldings(
            self.kv,
            self.loads,
            self.fences,
            self.connector,
            self.clock,
            transfer_timeout=self._config.kv_transfer_timeout,
            max_pin_time=self._config.max_pin_time,
            pinned=PinnedBlocks(
                int(self._config.max_pinned_share * self.pool.num_blocks),
                int(self._config.max_pinned_share_per_tenant * self.pool.num_blocks),
            ),
        )

    def _build_transitions(self) -> None:
        self.slots = SlotManager(
            max_model_len=self._max_model_len,
            running=self.running,
            kv=self.kv,
            beams=self.beams,
            waiting=self.waiting,
            grammars=self.grammars,
            order=self.order,
            admission_policy=self.admission_policy,
            fences=self.fences,
            holdings=self.holdings,
            outbox=self.outbox,
            stats=self.stats,
        )
        self.finisher = RequestFinisher(
            kv=self.kv,
            running=self.running,
            waiting=self.waiting,
            loads=self.loads,
            holdings=self.holdings,
            slots=self.slots,
            deadlines=self.deadlines,
            grammars=self.grammars,
            connector=self.connector,
            outbox=self.outbox,
            stats=self.stats,
        )
        self.lost_steps = LostSteps(
            in_flight=self.in_flight,
            running=self.running,
            slots=self.slots,
            holdings=self.holdings,
            fences=self.fences,
            outbox=self.outbox,
        )

    def _build_arrivals(self) -> None:
        self.timeout_phase = TimeoutPhase(
            config=self._config,
            clock=self.clock,
            deadlines=self.deadlines,
            state=self.state,
            finisher=self.finisher,
            stats=self.stats,
        )
        self.arrivals = Arrivals(
            config=self._config,
            max_model_len=self._max_model_len,
            reads_priority=self.order.reads_priority or self.retention.reads_priority,
            state=self.state,
            kv=self.kv,
            waiting=self.waiting,
            holdings=self.holdings,
            grammars=self.grammars,
            timeouts=self.timeout_phase,
            connector=self.connector,
            eviction=self.eviction,
        )

    def _build_beams_and_transfers(self) -> None:
        self.beam_phase = BeamPhase(
            kv=self.kv,
            running=self.running,
            beams=self.beams,
            slots=self.slots,
            finisher=self.finisher,
            outbox=self.outbox,
        )
        self.transfer_phase = TransferPhase(
            config=self._config,
            connector=self.connector,
            clock=self.clock,
            kv=self.kv,
            running=self.running,
            waiting=self.waiting,
            beams=self.beams,
            loads=self.loads,
            holdings=self.holdings,
            slots=self.slots,
            finisher=self.finisher,
            stats=self.stats,
            eviction=self.eviction,
        )

    def _build_planning(self) -> None:
        self.flow_shares = FlowShares(self._config, self.running, self.waiting.queue)
        self.running_phase = RunningPhase(
            config=self._config,
            kv=self.kv,
            running=self.running,
            in_flight=self.in_flight,
            beams=self.beams,
            beam_phase=self.beam_phase,
            slots=self.slots,
            holdings=self.holdings,
            finisher=self.finisher,
            victim_policy=self.victim_policy,
            drafting=self.drafting,
            flow_shares=self.flow_shares,
            eviction=self.eviction,
        )
        self.admission_phase = AdmissionPhase(
            config=self._config,
            max_model_len=self._max_model_len,
            connector=self.connector,
            clock=self.clock,
            kv=self.kv,
            running=self.running,
            in_flight=self.in_flight,
            waiting=self.waiting,
            loads=self.loads,
            holdings=self.holdings,
            transfer_phase=self.transfer_phase,
            slots=self.slots,
            finisher=self.finisher,
            deadlines=self.deadlines,
            policy=self.admission_policy,
            step_mix=self.step_mix,
            sharing=self.sharing,
            flow_shares=self.flow_shares,
            suspects=self.suspects,
            stats=self.stats,
            eviction=self.eviction,
        )
        self.commit_phase = CommitPhase(
            connector=self.connector,
            eviction=self.eviction,
            drafting=self.drafting,
            running=self.running,
            in_flight=self.in_flight,
            lost_steps=self.lost_steps,
            outbox=self.outbox,
            stats=self.stats,
        )

    def _build_applying(self) -> None:
        self.results_phase = ResultsPhase(
            kv=self.kv,
            running=self.running,
            beams=self.beams,
            beam_phase=self.beam_phase,
            transfer_phase=self.transfer_phase,
            lost_steps=self.lost_steps,
            sharing=self.sharing,
            drafting=self.drafting,
            suspects=self.suspects,
            slots=self.slots,
            finisher=self.finisher,
            fences=self.fences,
            grammars=self.grammars,
            outbox=self.outbox,
            stats=self.stats,
            eviction=self.eviction,
        )

    def _build_insight(self) -> None:
        self.explanation = Explanation(
            config=self._config,
            read_clock=self._context.clock,
            kv=self.kv,
            running=self.running,
            waiting=self.waiting,
            loads=self.loads,
            holdings=self.holdings,
            suspects=self.suspects,
            eviction=self.eviction,
        )
        self.inspection = Inspection(
            config=self._config,
            connector=self.connector,
            state=self.state,
            in_flight=self.in_flight,
            fences=self.fences,
            loads=self.loads,
            holdings=self.holdings,
            deadlines=self.deadlines,
            stats=self.stats,
        )
