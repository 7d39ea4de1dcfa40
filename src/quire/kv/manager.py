"""Block tables of the running requests over one block pool, and the prefix cache in front of it.

Only the logical side: block numbers, no tensors. A running request is known by its slot, see `quire.step`.
"""

from __future__ import annotations

import numpy as np

from quire.kv.block_hash import BlockKey, extend_keys, root_digest
from quire.kv.block_pool import BlockPool
from quire.step import IntArray


class KVCacheManager:
    """Gives slots their blocks, takes them back, and finds cached prefixes.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        max_num_seqs: slots.
        max_model_len: longest sequence in tokens.
        enable_prefix_caching: False keeps no content: a finished request's blocks are blank at once.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)  # [slots] blocks in each table
        self._tables = np.zeros((max_num_seqs, self.blocks_for(max_model_len)), dtype=np.int32)
        self._num_cached = np.zeros(max_num_seqs, dtype=np.int32)  # [slots] leading blocks with a known key
        self._keys: dict[str, list[BlockKey]] = {}
        self._roots: dict[str, bytes] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, slot: int) -> IntArray:
        """Return a copy of the block table of `slot`: [blocks]."""
        table: IntArray = self._tables[slot, : self.num_blocks[slot]].copy()
        return table

    def register(self, request_id: str, token_ids: IntArray, cache_salt: str) -> None:
        """Prepare the prefix keys of a new request from its prompt ([tokens])."""
        if self.enable_prefix_caching:
            self._roots[request_id] = root_digest(salt=cache_salt)
            self._keys[request_id] = []
            extend_keys(self._keys[request_id], self._roots[request_id], token_ids, self.block_size)

    def forget(self, request_id: str) -> None:
        """Drop the prefix keys of a request that has ended."""
        self._keys.pop(request_id, None)
        self._roots.pop(request_id, None)

    def find_prefix(self, request_id: str, num_tokens: int) -> list[int]:
        """Return cached blocks that hold the start of a request's tokens. Changes nothing.

        At most the blocks before the last token: that one is always computed, for its logits.
        """
        keys = self._keys.get(request_id, [])
        return self.pool.find(keys[: (num_tokens - 1) // self.block_size])

    def num_free_after_acquiring(self, block_ids: list[int]) -> int:
        """Return the free blocks left once the cached blocks `block_ids` are in use."""
        return self.pool.num_free - self.pool.count_idle(block_ids)

    def open(self, slot: int, prefix: list[int], num_blocks: int) -> None:
        """Give an empty slot a table of `num_blocks` blocks that begins with the cached blocks `prefix`."""
        self.pool.acquire(prefix)
        fresh = self.pool.allocate(num_blocks - len(prefix))
        self._tables[slot, : len(prefix)] = prefix
        self._tables[slot, len(prefix) : num_blocks] = fresh
        self.num_blocks[slot] = num_blocks
        self._num_cached[slot] = len(prefix)

    def missing_blocks(self, slots: IntArray, num_tokens: IntArray) -> IntArray:
        """Return how many blocks each slot lacks to hold `num_tokens` tokens: [slots]."""
        wanted = -(-num_tokens // self.block_size)
        missing: IntArray = np.maximum(wanted - self.num_blocks[slots], 0)
        return missing

    def grow(self, slots: IntArray, missing: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Append `missing` new blocks to each slot's table.

        Returns:
            For each new block: its slot, its index in the table, its block id; [new blocks] each.
        """
        rows = np.repeat(slots, missing)
        first = np.repeat(np.cumsum(missing) - missing, missing)
        index = (self.num_blocks[rows] + np.arange(len(rows)) - first).astype(np.int32)
        block_ids = self.pool.allocate(len(rows))
        self._tables[rows, index] = block_ids
        self.num_blocks[slots] += missing
        return rows, index, block_ids

    def close(self, slot: int) -> None:
        """Take back all blocks of `slot`, tail first, so that the start of a prefix is evicted last."""
        self.pool.release(self._tables[slot, : self.num_blocks[slot]][::-1].tolist())
        self.num_blocks[slot] = 0
        self._num_cached[slot] = 0

    def positions_with_new_full_blocks(self, slots: IntArray, num_computed: IntArray) -> IntArray:
        """Return the positions in `slots` that hold computed full blocks which are not cached yet."""
        if not self.enable_prefix_caching:
            return np.empty(0, dtype=np.int32)
        return np.flatnonzero(num_computed // self.block_size > self._num_cached[slots]).astype(np.int32)

    def cache_full_blocks(self, request_id: str, slot: int, computed_token_ids: IntArray) -> None:
        """Make the full blocks of `slot`, whose KV is computed for these tokens ([tokens]), findable."""
        keys = self._keys[request_id]
        extend_keys(keys, self._roots[request_id], computed_token_ids, self.block_size)
        num_full = len(computed_token_ids) // self.block_size
        for index in range(self._num_cached[slot], num_full):
            self.pool.cache(int(self._tables[slot, index]), keys[index])
        self._num_cached[slot] = num_full

    def check(self) -> None:
        """Check invariants 1 and 2; `AssertionError` names what does not hold."""
        tables = [self._tables[slot, :count] for slot, count in enumerate(self.num_blocks)]
        self.pool.check(int(block) for table in tables for block in table)
        assert self._keys.keys() == self._roots.keys()

    @property
    def num_open_slots(self) -> int:
        """Slots that hold blocks: for leak checks."""
        return int(np.count_nonzero(self.num_blocks))

    @property
    def num_known_requests(self) -> int:
        """Requests whose prefix keys are kept: for leak checks."""
        return len(self._keys)
