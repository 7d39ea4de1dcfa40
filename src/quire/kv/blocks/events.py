"""Events of the prefix cache, for routers and others outside the engine, as vLLM 0.33 publishes them.

Events are maps with a `type`. Blocks are named by unsigned 64-bit numbers, the ends of their digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from typing_extensions import override

from quire.kv.blocks.block_hash import TOKEN_BYTES, BlockKey, root_digest

HASH_BYTES = 8
"""Bytes of a digest, from its end, that name a block in events."""

ENGINE_MEDIUM = "GPU"
"""The field `medium` of blocks in the engine's own cache, the fastest that it has, whatever its device is."""

_PLAIN_ROOT = root_digest()


class KVEventSink(Protocol):
    """Takes events in the order in which they happen; calls must be cheap, they come from the step loop."""

    def stored(self, block_id: int, key: BlockKey) -> None:
        """The block's content can be found from now on."""

    def removed(self, block_id: int, key: BlockKey) -> None:
        """The block's content cannot be found any more."""

    def cleared(self) -> None:
        """No content can be found any more."""

    def salted(self, root: bytes, salt: str) -> None:
        """Blocks that are stored next may follow `root`, which begins the sequences with a cache salt."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True, gc=False):
    """Consecutive blocks of one sequence have become findable.

    `block_hashes` has one number for each block and `token_ids` `block_size` tokens for each. The first block
    follows `parent_block_hash`, or begins a sequence if that is None. `extra_keys` has an entry for each
    block: for the first of a sequence with a cache salt, a list of the salt. There are no LoRA adapters.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, kw_only=True, gc=False):
    """Blocks cannot be found any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No block can be found any more; also the first event of a server, and what follows a dead engine."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """What happened in one step, in order; `ts` is in seconds since 1970."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


class KVEventCollector(KVEventSink):
    """A `KVEventSink` that gathers one step's events, runs of blocks as one event."""

    def __init__(self) -> None:
        self._runs: list[
            tuple[bool, list[BlockKey]] | None
        ] = []  # (stored or removed, blocks); None: cleared
        self._run: list[BlockKey] = []
        self._run_is_stored = True
        self._salts: dict[bytes, str] = {}  # of this step's sequences, by the root that they begin at

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

    @override
    def salted(self, root: bytes, salt: str) -> None:
        self._salts[root] = salt

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        events = [AllBlocksCleared() if run is None else self._event(*run) for run in self._runs]
        self._runs, self._run, self._salts = [], [], {}
        return events

    def _event(self, is_stored: bool, keys: list[BlockKey]) -> KVCacheEvent:
        hashes = [block_hash(key.digest) for key in keys]
        if not is_stored:
            return BlockRemoved(block_hashes=hashes, medium=ENGINE_MEDIUM)
        first = keys[0]
        salt = self._salts.get(first.parent)
        begins_sequence = salt is not None or first.parent == _PLAIN_ROOT
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if begins_sequence else block_hash(first.parent),
            token_ids=np.frombuffer(b"".join(key.tokens for key in keys), dtype=np.int32).tolist(),
            block_size=len(first.tokens) // TOKEN_BYTES,
            lora_id=None,
            medium=ENGINE_MEDIUM,
            lora_name=None,
            extra_keys=None if salt is None else [[salt], *[None] * (len(keys) - 1)],
        )

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

    @override
    def salted(self, root: bytes, salt: str) -> None:
        for sink in self._sinks:
            sink.salted(root, salt)


def block_hash(digest: bytes) -> int:
    """Return the number that names a block in events, from 0 to 2**64 - 1."""
    return int.from_bytes(digest[-HASH_BYTES:], "big")
