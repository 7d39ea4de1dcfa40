"""Block tables of the running requests over the block pools, and the prefix cache in front of them.

Only the logical side: block numbers, no tensors. A running request is known by its slot, see `quire.step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from quire.kv.blocks.block_hash import BlockKey, SequenceKeys, root_digest
from quire.kv.blocks.block_pools import BlockPools
from quire.kv.blocks.checkpoints import CheckpointPool
from quire.kv.blocks.groups import NULL_BLOCK, first_in_window, first_moved
from quire.request import Request
from quire.step import BoolArray, Int64Array, IntArray

LOOKUP_BLOCKS = 1024
"""Cached blocks of one request that are looked for at a time, at most: some 2 milliseconds."""


@dataclasses.dataclass(slots=True)
class Prefix:
    """Computed KV for the first `num_tokens` tokens of a request.

    It is in `block_ids` and, for the tokens beyond their last full one, at the start of `copy_from`: a block
    of each group that another request writes to and that must be copied. `is_held` says that each of
    `block_ids` already has a reference for this request. The next `num_shared` blocks are those of the
    request in slot `owner`, which computes them in the step that is being planned.

    With recurrent layers, their state behind the prefix is in `checkpoint`, and the cache has the first
    `num_findable` blocks, which may be more.
    """

    block_ids: IntArray  # [G, blocks]
    num_tokens: int
    copy_from: IntArray | None = None  # [G]
    is_held: bool = False
    owner: int | None = None
    num_shared: int = 0
    checkpoint: int = -1
    num_findable: int = 0

    @property
    def is_cached(self) -> bool:
        """Whether it comes from the prefix cache, and not from a load or another request's blocks."""
        return not self.is_held and self.copy_from is None

    @property
    def num_full(self) -> int:
        """Number of `block_ids` of each group."""
        return int(self.block_ids.shape[1])

    @property
    def num_blocks(self) -> int:
        """Blocks of each group that need not be allocated."""
        return self.num_full + self.num_shared


class KVCacheManager:
    """Gives slots their blocks, takes them back, and finds cached prefixes.

    Args:
        pools: where the blocks come from.
        block_size: tokens per block.
        max_num_seqs: slots.
        max_model_len: longest sequence in tokens.
        enable_prefix_caching: False keeps no content: a finished request's blocks are blank at once.
        checkpoints: of the states of recurrent layers; None: there are no such layers.
    """

    def __init__(
        self,
        pools: BlockPools,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        checkpoints: CheckpointPool | None = None,
    ) -> None:
        self.block_size = block_size
        self.checkpoints = checkpoints
        self.pools = pools
        self.enable_prefix_caching = enable_prefix_caching
        self.no_prefix = Prefix(np.empty((len(pools), 0), dtype=np.int32), 0)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)  # [slots] blocks in each table
        self._tables = np.zeros((len(pools), max_num_seqs, self.blocks_for(max_model_len)), dtype=np.int32)
        self._num_left = np.zeros((len(pools), max_num_seqs), dtype=np.int32)  # leading entries: NULL_BLOCK
        self._num_cached = np.zeros(max_num_seqs, dtype=np.int32)  # [slots] leading blocks made findable
        self._closed: list[tuple[IntArray, int]] | None = None  # see `closing_together`
        self._keys: dict[str, SequenceKeys] = {}  # by request id

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def capacity(self, slot: int) -> int:
        """Return how many tokens the blocks of `slot` hold."""
        return int(self.num_blocks[slot]) * self.block_size

    def table(self, slot: int) -> IntArray:
        """Return a copy of the block tables of `slot`: [G, blocks]."""
        table: IntArray = self._tables[:, slot, : self.num_blocks[slot]].copy()
        return table

    # -- prefixes ------------------------------------------------------------------------------------------

    def register(self, request_id: str, token_ids: IntArray, cache_salt: str) -> None:
        """Prepare the prefix keys of a new request from its prompt ([tokens])."""
        if self.enable_prefix_caching:
            keys = self._keys[request_id] = SequenceKeys(
                root_digest(salt=cache_salt), self.block_size, cache_salt
            )
            keys.extend(token_ids)

    def forget(self, request_id: str) -> None:
        """Drop the prefix keys of a request that has ended."""
        self._keys.pop(request_id, None)

    def digests(self, request_id: str, start: int, end: int) -> Iterable[bytes]:
        """Return the digests of a request's full blocks from number `start` up to `end`, as far as known.

        They are those of its prompt, and of the blocks that it has made findable.
        """
        keys = self._keys.get(request_id)
        return () if keys is None else keys.digests(start, end)

    def key(self, request_id: str, index: int) -> BlockKey | None:
        """Return the key of a request's full block number `index`; None: it is not known."""
        keys = self._keys.get(request_id)
        return None if keys is None or index >= len(keys) else keys[index]

    def find_prefix(self, request_id: str, token_ids: IntArray) -> Prefix:
        """Return what is cached of the start of a request's tokens ([tokens]). Changes nothing.

        At most the blocks before the last token: that one is always computed, for its logits. With recurrent
        layers it ends at a checkpoint.
        """
        block_ids, _ = self.find_full_blocks(request_id, token_ids[:-1])
        num_findable, checkpoint = block_ids.shape[1], -1
        if self.checkpoints is not None:
            block_ids, checkpoint = self._before_checkpoint(request_id, token_ids, block_ids)
        num_tokens = block_ids.shape[1] * self.block_size
        return Prefix(block_ids, num_tokens, checkpoint=checkpoint, num_findable=num_findable)

    def _before_checkpoint(
        self, request_id: str, token_ids: IntArray, block_ids: IntArray
    ) -> tuple[IntArray, int]:
        """Return the blocks of the longest prefix that ends at a checkpoint, and that; -1: there is none."""
        assert self.checkpoints is not None
        while num_found := block_ids.shape[1]:
            num_blocks, checkpoint = self.checkpoints.find(self._keys[request_id], num_found)
            if num_blocks == num_found:
                return block_ids, checkpoint
            # Groups with windows may lack blocks that were left before the end of the longer prefix.
            block_ids, _ = self.find_full_blocks(request_id, token_ids[: num_blocks * self.block_size])
        return block_ids, -1

    def count_findable(self, request_id: str, start: int, end: int) -> int:
        """Return how many blocks the first group has of these digests, from number `start` up to `end`."""
        return self.pools.first.count_findable(self.digests(request_id, start, end))

    def count_cached_tokens(self, request: Request) -> int:
        """Return how many tokens at a request's start are cached; looks for `LOOKUP_BLOCKS` blocks."""
        token_ids = request.all_token_array()[: LOOKUP_BLOCKS * self.block_size + 1]
        return self.find_prefix(request.request_id, token_ids).num_tokens

    def can_share(self, slot: int, num_tokens: int) -> bool:
        """Whether the blocks of `slot` hold what a token after its first `num_tokens` tokens sees."""
        if num_tokens > self.capacity(slot):
            return False
        return all(
            self._num_left[group, slot] <= first_in_window(num_tokens, window, self.block_size)
            for group, window in self.pools.windows
        )

    def prefix_in_slot(self, slot: int, num_tokens: int) -> Prefix:
        """Return the first `num_tokens` tokens of a running request, all computed, to be shared."""
        num_shared, num_copied = divmod(num_tokens, self.block_size)
        copy_from = self._tables[:, slot, num_shared].copy() if num_copied else None
        return Prefix(self._tables[:, slot, :num_shared].copy(), num_tokens, copy_from)

    def find_full_blocks(self, request_id: str, token_ids: IntArray) -> tuple[IntArray, bytes]:
        """Return the cached full blocks at the start of a request's tokens, and the last one's digest.

        They are [G, blocks]. Unlike `find_prefix`, this includes the block of the last token.
        """
        keys = self._keys.get(request_id)
        if keys is None:
            return self.no_prefix.block_ids, b""
        num_full = len(token_ids) // self.block_size
        tokens = token_ids[: num_full * self.block_size].reshape(-1, self.block_size)
        block_ids = self.pools.find(keys, tokens)
        return block_ids, keys.digest(block_ids.shape[1])

    def rows_with_new_full_blocks(self, slots: IntArray, num_computed: IntArray) -> IntArray:
        """Return the positions in `slots` that hold computed full blocks which cannot be found yet."""
        if not self.enable_prefix_caching:
            return np.empty(0, dtype=np.int32)
        has_new = num_computed // self.block_size > self._num_cached[slots]
        return has_new.nonzero()[0].astype(np.int32)

    def cache_full_blocks(
        self, request_ids: list[str], slots: IntArray, num_computed: IntArray, token_ids: IntArray
    ) -> None:
        """Make the computed full blocks of `slots` findable.

        Args:
            request_ids: whose slots they are, [N].
            slots: [N], each with at least one block that cannot be found yet.
            num_computed: tokens whose KV is computed, [N].
            token_ids: known tokens by slot, [max_num_seqs, max_model_len].
        """
        size = self.block_size
        first = self._num_cached[slots]
        count = num_computed // size - first
        rows, index = _entries(slots, first, count)
        tokens = token_ids[rows[:, None], index[:, None] * size + np.arange(size)]
        digests: list[bytes] = []
        parents: list[bytes] = []
        changed = zip(request_ids, slots.tolist(), first.tolist(), count.tolist(), strict=True)
        for request_id, slot, start, num_new in changed:
            chain = self._chain(self._keys[request_id], token_ids[slot], start, start + num_new)
            parents += chain[:-1]
            digests += chain[1:]
        self.pools.cache(self._tables[:, rows, index], digests, parents, tokens)
        self._num_cached[slots] += count

    def cache_loaded_blocks(
        self, request: Request, block_ids: IntArray, num_cached: int, num_tokens: int
    ) -> None:
        """Make the full blocks findable that hold the start of a request without a slot.

        Args:
            request: whose tokens they are.
            block_ids: from its first token on, [G, blocks].
            num_cached: how many of them, from the start, can be found already.
            num_tokens: tokens whose KV they hold.
        """
        keys, size = self._keys.get(request.request_id), self.block_size
        end = num_tokens // size
        if keys is None or end <= num_cached:
            return
        token_ids = request.all_token_array()
        chain = self._chain(keys, token_ids, num_cached, end)
        tokens = token_ids[num_cached * size : end * size].reshape(-1, size)
        self.pools.cache(block_ids[:, num_cached:end], chain[1:], chain[:-1], tokens)

    def _chain(self, keys: SequenceKeys, token_ids: IntArray, start: int, end: int) -> list[bytes]:
        """Return the digest before block number `start`, and those of the blocks from there up to `end`.

        Args:
            keys: of a request; those that are missing are added.
            token_ids: its tokens, from the first on, [tokens].
            start: number of the first block.
            end: number of the block behind the last one.
        """
        if end > len(keys):
            keys.extend(token_ids[len(keys) * self.block_size : end * self.block_size])
        if not start and keys.salt:
            self.pools.first.note_salt(keys.digest(0), keys.salt)
        return [keys.digest(start), *keys.digests(start, end)]

    # -- tables --------------------------------------------------------------------------------------------

    def open(self, slot: int, held: IntArray, fresh: IntArray, *, num_cached: int) -> None:
        """Give an empty slot a table.

        Args:
            slot: whose table.
            held: blocks that it begins with, [G, blocks]; their references become the table's.
            fresh: newly allocated blocks, which follow, [G, blocks]; the same holds for their references.
            num_cached: how many of `held`, from the start, can be found already.
        """
        num_held = held.shape[1]
        num_blocks = num_held + fresh.shape[1]
        self._tables[:, slot, :num_held] = held
        self._tables[:, slot, num_held:num_blocks] = fresh
        self.num_blocks[slot] = num_blocks
        self._num_cached[slot] = num_cached
        for group, _ in self.pools.windows:
            self._num_left[group, slot] = np.count_nonzero(held[group] == NULL_BLOCK)

    def missing_blocks(self, slots: IntArray, num_tokens: IntArray) -> IntArray:
        """Return how many blocks each slot lacks to hold `num_tokens` tokens: [slots]."""
        wanted = -(-num_tokens // self.block_size)
        missing: IntArray = np.maximum(wanted - self.num_blocks[slots], 0)
        return missing

    def grow(self, slots: IntArray, missing: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Append `missing` new blocks to each slot's table.

        Returns:
            For each new block of a group: its slot and its index in the table, [new blocks] each, and the
            block ids: [G, new blocks].
        """
        rows = np.repeat(slots, missing)
        index = self.num_blocks[rows]
        if len(rows) > np.count_nonzero(missing):  # some slots get several
            first = np.repeat(np.cumsum(missing) - missing, missing)
            index = (index + np.arange(len(rows)) - first).astype(np.int32)
        block_ids = self.pools.allocate(len(rows))
        self._tables[:, rows, index] = block_ids
        self.num_blocks[slots] += missing
        return rows, index, block_ids

    def evict(self, slots: IntArray, counts: IntArray, *, first: int) -> None:
        """Take `counts` entries, from number `first` on, out of each slot's table, and free their blocks.

        These blocks must have no other holder, and must not be findable.
        """
        released = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            table = self._tables[:, slot, first : self.num_blocks[slot]]
            released.append(table[:, :count].copy())
            table[:, :-count] = table[:, count:].copy()
        self.num_blocks[slots] -= counts
        self.pools.release(np.concatenate(released, axis=1))

    def leave_windows(
        self,
        slots: IntArray,
        num_computed: IntArray,
        *,
        num_prompt: IntArray,
        priorities: Int64Array,
        waits_to_be_cached: BoolArray,
        lends_prompt: BoolArray,
    ) -> None:
        """Free the blocks that are before the window of all tokens still to be computed.

        Args:
            slots: [S].
            num_computed: tokens before which none is computed again, [S].
            num_prompt: tokens of the prompts, [S]; a prompt may come again, to be answered once more.
            priorities: of the requests, [S].
            waits_to_be_cached: whose blocks stay until they can be found, [S].
            lends_prompt: whose blocks stay that are moved with all tokens of the prompt but the last, [S].
        """
        bound = self.num_blocks[slots]
        if self.enable_prefix_caching:
            bound = np.where(waits_to_be_cached, self._num_cached[slots], bound)
        for group, window in self.pools.windows:
            first = self._num_left[group, slots]
            end = np.minimum(first_in_window(num_computed, window, self.block_size), bound)
            # What a lookup of the same prompt needs, which leaves out the last token, for its logits.
            first_kept = first_moved(num_prompt - 1, window, self.block_size)
            end = np.minimum(end, np.where(lends_prompt, first_kept, end))
            count = np.maximum(end - first, 0)
            if not count.any():
                continue
            rows, index = _entries(slots, first, count)
            block_ids = self._tables[group, rows, index]
            self._tables[group, rows, index] = NULL_BLOCK
            self._num_left[group, slots] += count
            follows = index >= np.repeat(first_kept, count)
            follows &= index < np.repeat((num_prompt - 1) // self.block_size, count)
            of_row = np.repeat(priorities, count)
            self.pools.release_in(group, block_ids[follows], of_row[follows])
            self.pools.release_in(group, block_ids[~follows], of_row[~follows], is_left=True)

    def fork(self, parent: int, slot: int, num_computed: int) -> tuple[IntArray, IntArray] | None:
        """Give `slot`, whatever it held, the parent's blocks of its first `num_computed` tokens.

        Full blocks are shared; the one that both would write to next is copied.

        Returns:
            (from, to) of the block to copy, [G] each, or None if the tokens end at a block's end.
        """
        prefix = self.prefix_in_slot(parent, num_computed)
        self.pools.acquire(prefix.block_ids)
        self.close(slot)
        num_cached = min(int(self._num_cached[parent]), prefix.num_full)
        copied = self.pools.allocate(0 if prefix.copy_from is None else 1)
        self.open(slot, prefix.block_ids, copied, num_cached=num_cached)
        return None if prefix.copy_from is None else (prefix.copy_from, copied[:, 0])

    def close(self, slot: int, priority: int = 0) -> None:
        """Take back all blocks of `slot`, tail first, so that the start of a prefix is rewritten last."""
        block_ids = self.table(slot)[:, ::-1]
        self.num_blocks[slot] = 0
        self._num_cached[slot] = 0
        self._num_left[:, slot] = 0
        if self._closed is None:
            self.pools.release(block_ids, priority)
        else:
            self._closed.append((block_ids, priority))

    @contextlib.contextmanager
    def closing_together(self) -> Iterator[None]:
        """Release the blocks of all slots closed in this context together, in one operation at its end."""
        self._closed = []
        try:
            yield
        finally:
            closed, self._closed = self._closed, None
            if len(closed) == 1:
                self.pools.release(*closed[0])
            elif closed:
                priorities = [np.full(block_ids.shape[1], priority) for block_ids, priority in closed]
                block_ids = np.concatenate([block_ids for block_ids, _ in closed], axis=1)
                self.pools.release(block_ids, np.concatenate(priorities))

    def slots_holding(self, block_ids: frozenset[int], slots: IntArray) -> list[int]:
        """Return which of `slots` have any of `block_ids` in their tables of the first group."""
        wanted = list(block_ids)
        return [slot for slot in slots.tolist() if np.isin(self.table(slot)[0], wanted).any()]

    # -- checks --------------------------------------------------------------------------------------------

    def check(self, held_elsewhere: Iterable[IntArray] = ()) -> None:
        """Check invariants 1 and 2; `AssertionError` names what does not hold.

        Args:
            held_elsewhere: blocks with a reference that is no table's, [G, blocks] of each holder.
        """
        self.pools.check([*map(self.table, np.flatnonzero(self.num_blocks).tolist()), *held_elsewhere])

    @property
    def num_open_slots(self) -> int:
        """Slots that hold blocks: for leak checks."""
        return int(np.count_nonzero(self.num_blocks))

    @property
    def num_known_requests(self) -> int:
        """Requests whose prefix keys are kept: for leak checks."""
        return len(self._keys)


def _entries(slots: IntArray, first: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """Return the slot and the index of `count` entries of each slot's table from number `first` on."""
    rows = np.repeat(slots, count)
    index = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(len(rows))
    return rows, index.astype(np.int32)
