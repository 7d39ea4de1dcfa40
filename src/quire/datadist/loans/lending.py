"""What an engine lends to the peers that are linked to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans, Int64Array
from quire.datadist.loans.cached_blocks import CachedBlocks
from quire.datadist.loans.loans import Loans


@dataclasses.dataclass(frozen=True)
class Lender:
    """Blocks that peers may read.

    Attributes:
        memory: the engine's KV cache, one tensor.
        block_size: tokens per block.
        spans_of: returns where the bytes of some blocks are in it, from an offset on, so many of each.
        max_sent_blocks: blocks that are sent at a time.
        loans: what of it is lent, by name.
        cached: what of it can be read without having been lent, by content.
        identity: returns what the KV is, in named parts; only peers with the same are linked.
    """

    memory: CacheMemory
    block_size: int
    spans_of: Callable[[Int64Array, int, int], ByteSpans]
    max_sent_blocks: int
    loans: Loans
    cached: CachedBlocks
    identity: Callable[[], Mapping[str, str]]
