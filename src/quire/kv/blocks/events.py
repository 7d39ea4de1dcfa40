"""Events of the prefix cache, for routers and others outside the engine.

The events and their fields are named as vLLM's KV events, so that a router which reads those reads these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from typing_extensions import override

from quire.kv.blocks.block_hash import TOKEN_BYTES, BlockKey, root_digest

_PLAIN_ROOT = root_digest()


class KVEventSink(Protocol):
    """Takes events in the order in which they happen; calls must be cheap, they come from the step loop."""

    def stored(self, block_id: int, key: BlockKey) -> None:
        """The block's content can be found from now on."""

    def removed(self, block_id: int, key: BlockKey) -> None:
        """The block's content cannot be found any more."""

    def cleared(self) -> None:
        """No content can be found any more."""


class BlockStored(msgspec.Struct, tag=True, array_like=True, omit_defaults=True, gc=False):
    """Consecutive blocks of one sequence have become findable.

    `block_hashes` has one digest for each block and `token_ids` `block_size` tokens for each. The first block
    follows `parent_block_hash`, or begins a sequence if that is None. With a cache salt, sequences begin at
    a parent that is never stored: the salt's own digest.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int


class BlockRemoved(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Blocks cannot be found any more."""

    block_hashes: list[bytes]


class AllBlocksCleared(msgspec.Struct, tag=True, array_like=True, gc=False):
    """No block can be found any more; also the first event of every engine."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """What happened in one step, in order; `ts` is in seconds since 1970."""

    ts: float
    events: list[KVCacheEvent]


class KVEventCollector(KVEventSink):
    """A `KVEventSink` that gathers one step's events, runs of blocks as one event."""

    def __init__(self) -> None:
        self._runs: list[
            tuple[bool, list[BlockKey]] | None
        ] = []  # (stored or removed, blocks); None: cleared
        self._run: list[BlockKey] = []
        self._run_is_stored = True

    @override
    def stored(self, block_id: int, key: BlockKey) -> None:
        run = self._run
        if not (run and self._run_is_stored and run[-1].digest == key.parent):
            run = self._begin_run(stored=True)
        run.append(key)

    @override
    def removed(self, block_id: int, key: BlockKey) -> None:
        run = self._run
        if not run or self._run_is_stored:
            run = self._begin_run(stored=False)
        run.append(key)

    @override
    def cleared(self) -> None:
        """What happened before it in this step no longer matters."""
        self._runs = [None]
        self._run = []

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        if not self._runs:
            return []
        events = [AllBlocksCleared() if run is None else _event(*run) for run in self._runs]
        self._runs, self._run = [], []
        return events

    def _begin_run(self, *, stored: bool) -> list[BlockKey]:
        self._run = []
        self._run_is_stored = stored
        self._runs.append((stored, self._run))
        return self._run


class KVEventFanOut(KVEventSink):
    """Passes events on to several sinks."""

    def __init__(self, sinks: Sequence[KVEventSink]) -> None:
        self._sinks = sinks

    @override
    def stored(self, block_id: int, key: BlockKey) -> None:
        for sink in self._sinks:
            sink.stored(block_id, key)

    @override
    def removed(self, block_id: int, key: BlockKey) -> None:
        for sink in self._sinks:
            sink.removed(block_id, key)

    @override
    def cleared(self) -> None:
        for sink in self._sinks:
            sink.cleared()


def _event(is_stored: bool, keys: list[BlockKey]) -> KVCacheEvent:
    digests = [key.digest for key in keys]
    if not is_stored:
        return BlockRemoved(digests)
    first = keys[0]
    tokens = np.frombuffer(b"".join(key.tokens for key in keys), dtype=np.int32).tolist()
    parent = None if first.parent == _PLAIN_ROOT else first.parent
    return BlockStored(digests, parent, tokens, len(first.tokens) // TOKEN_BYTES)
