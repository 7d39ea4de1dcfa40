"""What an engine lends to the peers that are linked to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from quire.datadist.cached_blocks import CachedBlocks
from quire.datadist.loans import Loans
from quire.datadist.memory import CacheMemory


@dataclasses.dataclass(frozen=True)
class Lender:
    """Blocks that peers may read.

    Attributes:
        memory: the engine's KV cache, one tensor of all blocks.
        block_size: tokens per block.
        loans: what of it is lent, by name.
        cached: what of it can be read without having been lent, by content.
        identity: returns what the KV is, in named parts; only peers with the same are linked.
    """

    memory: CacheMemory
    block_size: int
    loans: Loans
    cached: CachedBlocks
    identity: Callable[[], Mapping[str, str]]
