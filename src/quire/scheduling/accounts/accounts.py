"""All accounts of one scheduler, in one object that every phase of a step is given."""

from __future__ import annotations

import functools

from quire.config import SchedulerConfig
from quire.grammar.manager import GrammarManager
from quire.kv.blocks.block_pool import BlockPool
from quire.kv.blocks.block_pools import BlockPools
from quire.kv.blocks.checkpoints import CheckpointPool
from quire.kv.blocks.manager import KVCacheManager
from quire.kv.blocks.retention import RETENTIONS
from quire.kv.eviction.lengths import eviction_lengths
from quire.request import Request
from quire.scheduling.accounts.beam_groups import BeamGroups
from quire.scheduling.accounts.cache_eviction import CacheEviction
from quire.scheduling.accounts.deadlines import Deadlines
from quire.scheduling.accounts.flow_shares import FlowShares
from quire.scheduling.accounts.kv_holdings import KVHoldings
from quire.scheduling.accounts.outbox import Outbox
from quire.scheduling.accounts.remote_loads import RemoteLoads
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.scheduling.accounts.sequence_states import SequenceStates
from quire.scheduling.accounts.step_sharing import StepSharing
from quire.scheduling.accounts.steps_in_flight import Fences, StepsInFlight
from quire.scheduling.accounts.suspects import Suspects
from quire.scheduling.accounts.waiting import WaitingRequests
from quire.scheduling.context import SchedulerContext
from quire.scheduling.guards.connector_calls import ConnectorCalls
from quire.scheduling.guards.context import StepClock
from quire.scheduling.guards.policies import build_order
from quire.scheduling.outputs import SchedulerStats


class Accounts:
    """Where every request is, which blocks are held, which steps are in flight, and what is to be sent.

    Args:
        config: of the scheduler.
        num_blocks: KV blocks of the group that keeps all tokens.
        max_model_len: longest sequence in tokens.
        context: the scheduler's surroundings, guarded.

    Raises:
        ConfigError: there is no policy of a name in the configuration.
    """

    def __init__(
        self, config: SchedulerConfig, *, num_blocks: int, max_model_len: int, context: SchedulerContext
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.stats = SchedulerStats(num_blocks=num_blocks)
        self.clock = clock = StepClock(context.clock)
        self.connector = ConnectorCalls(context.connector, clock, patience=config.kv_transfer_timeout)
        retention = RETENTIONS.build(config.prefix_retention)
        pool_of = functools.partial(
            BlockPool,
            block_size=config.block_size,
            retention=retention,
            on_replaced_retention=self.note_replaced_policy,
        )
        pools = [pool_of(num_blocks, commit=context.commit_blocks, events=context.kv_events)]
        pools += [
            pool_of(one.num_blocks, commit=one.commit, events=one.events, has_window=True)
            for one in context.windows
        ]
        checkpoints = None
        if context.states is not None:
            checkpoints = CheckpointPool(context.states.num_checkpoints, context.state_events)
        self.kv = KVCacheManager(
            BlockPools(pools, [one.window for one in context.windows], config.block_size),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            checkpoints=checkpoints,
        )
        self.running = RunningSlots(config.max_num_seqs, max_model_len)
        self.states: SequenceStates | None = None  # of recurrent layers
        if context.states is not None and checkpoints is not None:
            self.states = SequenceStates(context.states, checkpoints, self.kv, self.running)
        self.beams = BeamGroups()
        self.grammars = GrammarManager(
            context.grammars,
            clock=context.clock,
            max_cache_bytes=config.max_grammar_cache_bytes,
            executor=context.executor,
        )
        self.in_flight = StepsInFlight()
        self.fences = Fences(self.in_flight, self.running, self.kv.pools, checkpoints)
        self.loads = RemoteLoads()
        self.holdings = KVHoldings(
            config, self.kv, loads=self.loads, fences=self.fences, connector=self.connector, clock=clock
        )
        self.order = build_order(config, self.kv.count_cached_tokens, self.note_replaced_policy)
        self.reads_priority = self.order.reads_priority or retention.reads_priority
        self.waiting = WaitingRequests(
            self.order, self.grammars, self.loads, self.running, read_clock=context.clock
        )
        self.flow_shares = FlowShares(config, self.running, self.waiting.queue)
        lengths = eviction_lengths(config)
        self.eviction = None if lengths is None else CacheEviction(lengths, self.running, self.kv, self.stats)
        self.sharing = StepSharing(self.kv, self.running, self.in_flight, self.eviction)
        self.deadlines = Deadlines()
        self.suspects = Suspects()
        self.outbox = Outbox()

    def note_replaced_policy(self) -> None:
        """Count a policy that has failed and been replaced by the default."""
        self.stats.num_replaced_policies += 1

    def find(self, request_id: str) -> Request | None:
        """Return a request that waits or runs, or None."""
        slot = self.running.slot_of(request_id)
        return self.waiting.get(request_id) if slot is None else self.running.request_at(slot)

    def request_ids(self) -> list[str]:
        """Return the ids of all requests, running ones in the order of service first."""
        slots = self.running.in_order().tolist()
        leaders = [slot for slot in slots if (group := self.beams.at(slot)) is None or group.slots[0] == slot]
        running_ids = [self.running.request_at(slot).request_id for slot in leaders]
        return running_ids + [request.request_id for request in self.waiting]

    def request_counts(self) -> tuple[int, int]:
        """Return (running, waiting); a beam search counts once."""
        return len(self.running) - self.beams.num_more_slots, len(self.waiting)
