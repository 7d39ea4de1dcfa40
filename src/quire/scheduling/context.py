"""What an engine gives its scheduler besides the configuration; every part is optional."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Executor

from quire.grammar.interface import GrammarBackend
from quire.kv.blocks.checkpoints import StateSlots
from quire.kv.blocks.events import KVEventSink
from quire.kv.blocks.groups import WindowBlocks
from quire.kv.connectors.interface import KVConnector


def no_drafts(num_running: int) -> int:
    """Return 0: nothing is proposed."""
    return 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContext:
    """The scheduler's surroundings.

    Args:
        clock: seconds; deadlines, ageing, leases and drain rates are read off it.
        grammars: compiles structured-output grammars; without it, requests that have one are refused.
        executor: compiles the grammars; None: threads of the scheduler's own.
        connector: finds and stores KV elsewhere.
        kv_events: gets the blocks that become findable and those that stop being so.
        draft_length: tokens to propose per request, given the number of running requests.
        commit_blocks: given a number of further blocks of reserved memory, returns how many may be used now;
            None: the whole cache may be used from the start.
        windows: the blocks of cache groups that give back what is before a window, by falling window.
        states: those of recurrent layers; None: there are no such layers.
        state_events: gets the checkpoints of states that become findable and those that stop being so.
    """

    clock: Callable[[], float] = time.monotonic
    grammars: GrammarBackend | None = None
    executor: Executor | None = None
    connector: KVConnector | None = None
    kv_events: KVEventSink | None = None
    draft_length: Callable[[int], int] = no_drafts
    commit_blocks: Callable[[int], int] | None = None
    windows: tuple[WindowBlocks, ...] = ()
    states: StateSlots | None = None
    state_events: KVEventSink | None = None
