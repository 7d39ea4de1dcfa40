"""Tells peers' threads which blocks the prefix cache holds, as it changes."""

from __future__ import annotations

from typing_extensions import override

from quire.datadist.loans.cached_blocks import CachedBlocks
from quire.kv.blocks.block_hash import BlockKey
from quire.kv.blocks.events import KVEventSink


class CachedBlockEvents(KVEventSink):
    """Keeps what peers may read up to date.

    Args:
        cached: what they read.
    """

    def __init__(self, cached: CachedBlocks) -> None:
        self._cached = cached

    @override
    def stored(self, block_id: int, key: BlockKey) -> None:
        self._cached.add(key.digest, block_id)

    @override
    def removed(self, block_id: int, key: BlockKey) -> None:
        self._cached.remove(key.digest)

    @override
    def cleared(self) -> None:
        self._cached.clear()
