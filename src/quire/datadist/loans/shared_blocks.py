"""The blocks of an owner's KV cache that a session shares, separate from its pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans, Int64Array
from quire.datadist.loans.cached_blocks import CachedBlocks
from quire.datadist.loans.loans import Loans


@dataclasses.dataclass(frozen=True)
class SharedBlocks:
    """Blocks that peers may read while lent or cached, and that this side fills from peers.

    Attributes:
        memory: the owner's KV cache, one tensor; peers only access it through `loans` and `cached`.
        block_size: tokens per block.
        spans_of: returns where some blocks are in it, or a part of each: given the blocks of each group
            [G, N], the offset of the part in bytes, and its number of bytes.
        max_sent_blocks: blocks that are sent at a time.
        loans: what of it is lent, by name.
        cached: what of it can be read without having been lent, by content.
        identity: returns the identity of the KV in named parts; only peers with the same are linked.
    """

    memory: CacheMemory
    block_size: int
    spans_of: Callable[[Int64Array, int, int], ByteSpans]
    max_sent_blocks: int
    loans: Loans
    cached: CachedBlocks
    identity: Callable[[], Mapping[str, str]]
