"""Everything around a scheduler that random histories need, drawn at random, on the driver's command."""

from __future__ import annotations

import dataclasses
import random
from typing import Protocol

from eviction_rules import rules_of
from fake_grammar import CompilerOnCommand, FakeGrammarBackend
from fake_runner import FakeRunner
from mixed_connectors import draw_connector
from mixed_policies import NONSENSE, Fault, misbehaving_policies

from quire.config import AggregationMode, CacheEvictionConfig, KVCrushConfig, SchedulerConfig
from quire.kv.blocks.checkpoints import StateSlots
from quire.kv.blocks.groups import WindowBlocks
from quire.scheduling import Scheduler
from quire.scheduling.context import SchedulerContext

MAX_MODEL_LEN = 48
MOST_BEAMS = 4  # of a search
MOST_DRAFTS_FROM_OUTSIDE = 4


class Chooser(Protocol):
    """Where choices come from: hypothesis, or a seeded generator."""

    def among(self, options): ...

    def integer(self, low: int, high: int) -> int: ...

    def chance(self, percent: int) -> bool: ...


class RandomChooser:
    def __init__(self, seed: object) -> None:
        self._random = random.Random(str(seed))

    def among(self, options):
        return options[self._random.randrange(len(options))]

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def chance(self, percent: int) -> bool:
        return self._random.randrange(100) < percent


def draw_eviction(choose: Chooser, block_size: int) -> CacheEvictionConfig:
    start, recent, evictable = (choose.among([1, 1, 2, 3]) for _ in range(3))
    budget = choose.among([0, 0, 1, 2])
    return CacheEvictionConfig(
        start_size=start * block_size,
        recent_size=recent * block_size,
        max_cache_size=(start + recent + evictable) * block_size,
        aggregation_mode=choose.among(list(AggregationMode)),
        kvcrush_config=KVCrushConfig(budget=budget) if budget else None,
    )


def draw_config(choose: Chooser) -> SchedulerConfig:
    splits = choose.chance(80)
    block_size = choose.among([1, 2, 4, 4, 16])
    return SchedulerConfig(
        block_size=block_size,
        use_cache_eviction=block_size <= MAX_MODEL_LEN // 12 and choose.chance(40),
        cache_eviction_config=draw_eviction(choose, block_size),
        max_num_batched_tokens=choose.among([1, *[3, 7, 16, 64] * 2] if splits else [16, 64]),
        max_num_seqs=choose.integer(1, 8),
        dynamic_split_fuse=splits,
        enable_prefix_caching=choose.chance(65),
        policy=choose.among(["fcfs", "priority", "fair", "longest-prefix"]),
        priority_ageing=choose.among([0.0, 5.0]),
        admission=choose.among(["reserve", "past-future"]),
        victim=choose.among(["last", "fewest-computed"]),
        prefix_retention=choose.among(["lru", "lfu", "priority"]),
        long_prefill_token_threshold=choose.among([0, 0, 2, 5]),
        reserve_full_prompt=choose.chance(50),
        watermark=choose.among([0.0, 0.0, 0.1, 0.9]),
        max_num_queued_reqs=12,
        max_num_queued_tokens=400,
        request_timeout=choose.among([0.0, 0.0, 60.0]),
        queue_timeout=choose.among([0.0, 0.0, 40.0]),
        overlap_steps=choose.chance(35),
        kv_load_failure=choose.among(["recompute", "recompute", "fail"]),
        kv_transfer_timeout=20.0,
    ).validate()


def draw_windows(
    choose: Chooser, config: SchedulerConfig, num_blocks: int, commit
) -> tuple[WindowBlocks, ...]:
    """Groups with few blocks, but enough for one beam search."""
    size, groups = config.block_size, []
    for window in sorted({choose.integer(1, 20) for _ in range(choose.among([0, 1, 1, 2]))}, reverse=True):
        in_window = min(num_blocks, -(-window // size) + 1)
        chunks = 2 * -(-config.max_num_batched_tokens // size) + 2
        num_seqs = choose.integer(min(MOST_BEAMS, config.max_num_seqs), config.max_num_seqs)
        fewest = min(num_blocks, num_seqs * in_window + chunks)
        groups.append(WindowBlocks(window, 1 + fewest, commit))
    return tuple(groups)


class CacheEvents:
    """What can be found in the prefix cache, by its events alone."""

    def __init__(self) -> None:
        self.digests: dict[int, bytes] = {}
        self.wrong: list[str] = []  # what it should not have been told
        self.num_failures = 0  # of the next calls

    def _fail_if_told(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise BrokenPipeError

    def stored(self, block_id, key) -> None:
        if block_id in self.digests or key.digest in self.digests.values():
            self.wrong.append(f"block {block_id} stored twice")
        self.digests[block_id] = key.digest
        self._fail_if_told()

    def removed(self, block_id, key) -> None:
        if self.digests.pop(block_id, None) != key.digest:
            self.wrong.append(f"block {block_id} removed, which is not stored")
        self._fail_if_told()

    def cleared(self) -> None:
        self.digests.clear()
        self._fail_if_told()


class World:
    """A scheduler in its surroundings: clock, memory, compiler, connector, and the runner."""

    def __init__(self, choose: Chooser, config: SchedulerConfig | None = None) -> None:
        self.config = config = config or draw_config(choose)
        self.policies = misbehaving_policies(config) if choose.chance(35) else {}
        self.may_misorder = False  # the order has failed, or has said what is not so
        self.now = 1000.0
        self.faults: dict[str, object] = {}  # what a call raises or answers next, by its name
        self._told_time = 0.0  # by the clock, last
        self.num_blocks = max(choose.integer(24, 200) // config.block_size, 2)
        self.grows = choose.chance(30)
        self.num_blocks_of_memory = choose.integer(1, self.num_blocks) if self.grows else self.num_blocks
        self.compiler = CompilerOnCommand()
        self.events = CacheEvents()
        self.most_drafts = choose.among([0, 0, 1, 3])
        self.windows, self.connector, self.states = (), None, None
        if not config.use_cache_eviction:
            commit = self.commit_blocks if self.grows else None
            windows = draw_windows(choose, config, self.num_blocks, commit)
            self.connector = draw_connector(choose, config.block_size, [each.window for each in windows])
            self.windows = windows if self.connector is None or self.connector.by_group else ()
            moves_states = self.connector is None or self.connector.moves_states
            if moves_states and choose.chance(50):
                has_checkpoints = config.dynamic_split_fuse and config.enable_prefix_caching
                count = choose.among([0, 1, 3, 20]) if has_checkpoints else 0
                self.states = StateSlots(count, choose.among([1, 2, 5]) * config.block_size)
        self.runner = FakeRunner(
            self.num_blocks,
            config.block_size,
            connector=self.connector,
            seed=choose.integer(0, 99),
            rules=rules_of(config),
            windows=self.windows,
            has_states=self.states is not None,
        )
        context = SchedulerContext(
            clock=self.clock,
            grammars=FakeGrammarBackend(),
            executor=self.compiler,
            connector=self.connector,
            kv_events=self.events,
            draft_length=self.draft_length,
            commit_blocks=self.commit_blocks if self.grows else None,
            windows=self.windows,
            states=self.states,
        )
        self.scheduler = Scheduler(
            dataclasses.replace(config, **self.policies),
            num_blocks=self.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            context=context,
        )

    def clock(self) -> float:
        if self.now == self._told_time:  # else time would stand still, and nobody could tell who is overdue
            fault = self._take_fault("clock")
            if fault is not None:
                return fault
        self._told_time = self.now
        return self.now

    def _take_fault(self, call: str):
        """Return what a call is to answer instead, or raise it; None: it works."""
        fault = self.faults.pop(call, None)
        if isinstance(fault, Exception):
            raise fault
        return fault

    def spoil_a_call(self, choose: Chooser) -> str:
        """Let a call of the scheduler to its surroundings fail; return which."""
        call = choose.among(["clock", "commit_blocks", "draft_length", "events"])
        if call == "events":
            self.events.num_failures = choose.integer(1, 3)
        else:
            self.faults[call] = choose.among([OSError("no luck"), float("nan"), "text", -7, ()])
        return call

    def spoil_a_policy(self, choose: Chooser) -> str:
        """Let a call of a policy fail; return which."""
        field = choose.among(sorted(self.policies))
        policy = self.policies[field]
        if choose.chance(50):
            fault = Fault(choose.among(policy.asked + policy.told), ArithmeticError("no luck"))
        else:
            fault = Fault(choose.among(policy.asked), choose.among(NONSENSE))
        policy.fault = fault
        self.may_misorder |= field == "policy"
        return f"{field}.{fault.method}"

    def draft_length(self, num_running: int) -> int:
        fault = self._take_fault("draft_length")
        if fault is not None:
            return fault
        return self.most_drafts if num_running <= 3 else min(self.most_drafts, 1)

    def commit_blocks(self, count: int) -> int:
        fault = self._take_fault("commit_blocks")
        if fault is not None:
            return fault
        granted = min(count, self.num_blocks_of_memory)
        self.num_blocks_of_memory -= granted
        return granted
