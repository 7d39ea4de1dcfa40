"""The owner of all KV blocks: reference counts, free blocks, and the cached content of idle ones.

A block is in exactly one of three places: *in use* (reference count above 0), *idle* (count 0, content
cached, reusable by a prefix hit until it is rewritten), or *blank* (count 0, no content worth keeping). Free
means blank or idle. Which idle block is rewritten first is the retention policy's choice.

The memory of a cache that grows on demand is reserved from the start and committed as blocks are first
needed; blocks that are not committed are in none of the three places, but count as free as long as there is
memory for them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from quire.kv.blocks.block_hash import DIGEST_BYTES, BlockKey
from quire.kv.blocks.events import KVEventSink
from quire.kv.blocks.groups import NULL_BLOCK
from quire.kv.blocks.retention import IdleBlocks, LeftBehindFirst, idle_blocks
from quire.step import Int64Array, IntArray

GROWTH_SHARE = 64
"""A cache that grows does so by at least one part in this many of its final size."""


class BlockPool:
    """Reference counts, free blocks and cached contents of `num_blocks` KV blocks.

    Args:
        num_blocks: maximum number of blocks.
        block_size: tokens per block.
        has_window: whether sequences leave blocks behind; then `NULL_BLOCK` is in use from the start.
        retention: name of the retention policy, or the policy.
        commit: given a number of further blocks, returns how many may be used; None: all may be at once.
        events: gets what can be found and what no longer can.
        on_replaced_retention: called when the retention policy has failed and is replaced by the default.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        has_window: bool = False,
        retention: object = "lru",
        commit: Callable[[int], int] | None = None,
        events: KVEventSink | None = None,
        on_replaced_retention: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_blocks = num_blocks
        num_reserved = NULL_BLOCK + 1 if has_window else 0
        self.num_committed = num_blocks if commit is None else num_reserved
        self._commit = commit
        self._may_grow = commit is not None
        self._events = events
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._counts[:num_reserved] = 1
        self._num_hits = np.zeros(num_blocks, dtype=np.int32)  # since the content was cached
        self._blank = BlankBlocks(num_blocks)
        self._blank.push(np.arange(num_reserved, self.num_committed, dtype=np.int32)[::-1])
        idle = idle_blocks(retention, num_blocks, on_replaced_retention)
        self._left_first = LeftBehindFirst(idle, num_blocks) if has_window else None
        self._idle: IdleBlocks = idle if self._left_first is None else self._left_first
        # What cached blocks hold. Zeroed memory is committed when first written.
        self._is_cached = np.zeros(num_blocks, dtype=np.bool_)
        self._digests = np.empty(num_blocks, dtype=np.object_)  # of bytes
        self._parents = np.zeros((num_blocks, DIGEST_BYTES), dtype=np.uint8)
        self._tokens = np.zeros((num_blocks, block_size), dtype=np.int32)
        self._by_digest: dict[bytes, int] = {}
        self._num_evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: blank and idle ones, and those that can be committed."""
        return len(self._blank) + len(self._idle) + self.num_uncommitted

    @property
    def num_uncommitted(self) -> int:
        """Blocks that memory is reserved for and, as far as is known, available."""
        return self.num_blocks - self.num_committed if self._may_grow else 0

    @property
    def num_in_use(self) -> int:
        """Blocks with a reference count above 0."""
        return self.num_committed - len(self._blank) - len(self._idle)

    @property
    def num_idle(self) -> int:
        """Free blocks whose content a prefix hit can find."""
        return len(self._idle)

    @property
    def num_evicted(self) -> int:
        """Idle blocks that `allocate` has handed out since the start, and whose content is lost."""
        return self._num_evicted

    @property
    def num_cached(self) -> int:
        """Blocks whose content a prefix hit can find, in use or idle."""
        return len(self._by_digest)

    def commit_ahead(self, count: int) -> None:
        """Make sure that `count` blocks are blank, as far as the cache can grow.

        Called before a step is planned, so that `num_free` stays valid while it is.
        """
        left = self.num_blocks - self.num_committed
        missing = min(count - len(self._blank), left)
        if self._commit is None or missing <= 0:
            return
        asked = min(max(missing, self.num_blocks // GROWTH_SHARE), left)
        granted = self._commit(asked)
        self._may_grow = granted == asked
        fresh = np.arange(self.num_committed, self.num_committed + granted, dtype=np.int32)[::-1]
        self._blank.push_below(fresh)
        self.num_committed += granted

    def allocate(self, count: int) -> IntArray:
        """Return `count` block ids with reference count 1; blank blocks go first, then idle ones.

        Raises:
            ValueError: fewer than `count` blocks are free; nothing is taken.
        """
        if count > len(self._blank):
            self.commit_ahead(count)
            if count > len(self._blank) + len(self._idle):
                raise ValueError(f"{count} KV blocks requested, {self.num_free} of {self.num_blocks} free")
        taken = self._blank.pop(count)
        if count > len(taken):
            evicted = self._idle.evict(count - len(taken))
            self._forget(evicted)
            self._num_evicted += len(evicted)
            taken = np.concatenate((taken, evicted))
        self._counts[taken] = 1
        return taken

    def next_blank(self, count: int) -> IntArray:
        """Return up to `count` blank blocks, in the order in which `allocate` will hand them out."""
        return self._blank.next(count)

    def acquire(self, block_ids: IntArray) -> None:
        """Add one reference to each of `block_ids` (no duplicates): cached blocks, or blocks in use."""
        if len(block_ids):
            self._idle.take(block_ids[self._counts[block_ids] == 0])
            self._counts[block_ids] += 1

    def count_hit(self, block_ids: IntArray) -> None:
        """Note that a prefix lookup has found and used these blocks."""
        self._num_hits[block_ids] += 1

    def release(
        self, block_ids: IntArray, priorities: IntArray | Int64Array | int = 0, *, is_left: bool = False
    ) -> None:
        """Drop one reference from each block, or as many as it is named times, in order.

        Args:
            block_ids: of idle blocks, the first given is the first to be rewritten, other things being equal.
            priorities: of the requests that let go, lower being more important.
            is_left: the blocks are behind the window of sequences that go on. Those that no lookup has found
                are rewritten before all others.

        Raises:
            ValueError: a block is released more often than it was taken.
        """
        if not len(block_ids):
            return
        np.subtract.at(self._counts, block_ids, 1)
        left = self._counts[block_ids]
        if left.min() < 0:
            raise ValueError(f"KV block {block_ids[left.argmin()]} released more often than it was taken")
        # A block that is named more than once becomes free where it is named last.
        places = {block: place for place, block in enumerate(block_ids.tolist())}
        last = np.array(sorted(places.values()))
        last = last[left[last] == 0]
        free = block_ids[last]
        is_cached = self._is_cached[free]
        idle = free[is_cached]
        if isinstance(priorities, np.ndarray):
            priorities = priorities[last[is_cached]]
        if is_left and self._left_first is not None:
            self._left_first.put_left(idle, self._num_hits[idle], priorities)
        else:
            self._idle.put(idle, self._num_hits[idle], priorities)
        if len(idle) < len(free):
            self._blank.push(free[~is_cached])

    def cache(
        self, block_ids: IntArray, digests: list[bytes], parents: list[bytes], tokens: IntArray
    ) -> None:
        """Remember what blocks in use hold; a second block with the same content stays unknown.

        Args:
            block_ids: N blocks, none of which is known to hold anything else; requests that share a block may
                each name it.
            digests: of their contents, see `BlockKey`.
            parents: digests of the blocks before them.
            tokens: [N, block_size].
        """
        owners = list(map(self._by_digest.setdefault, digests, block_ids.tolist()))
        fresh = (np.array(owners, dtype=np.int32) == block_ids) & ~self._is_cached[block_ids]
        if len(set(owners)) < len(owners):
            first = np.zeros(len(owners), dtype=np.bool_)
            first[np.unique(block_ids, return_index=True)[1]] = True
            fresh &= first
        if not fresh.all():
            digests = list(itertools.compress(digests, fresh))
            parents = list(itertools.compress(parents, fresh))
            block_ids, tokens = block_ids[fresh], tokens[fresh]
        self._digests[block_ids] = digests
        self._is_cached[block_ids] = True
        self._tokens[block_ids] = tokens
        self._parents[block_ids] = np.frombuffer(b"".join(parents), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        self._num_hits[block_ids] = 0
        if self._events is not None:
            for block_id in block_ids.tolist():
                self._events.stored(block_id, self._key_of(block_id))

    def note_salt(self, root: bytes, salt: str) -> None:
        """Tell those who follow events which salt the sequences have that begin at a root."""
        if self._events is not None:
            self._events.salted(root, salt)

    def find(self, root: bytes, digests: Iterable[bytes], tokens: IntArray) -> IntArray:
        """Return the block ids of the longest cached run at the start of a sequence. Changes nothing.

        Args:
            root: the digest that starts the sequence's chain.
            digests: of the blocks that may be found; taken up to the first that is not found.
            tokens: of at least these blocks, [N, block_size].
        """
        hits, chain = self._leading(digests)
        found = np.array(hits, dtype=np.int32)
        if not hits:
            return found
        parents = np.frombuffer(b"".join([root, *chain[:-1]]), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        same = (self._tokens[found] == tokens[: len(hits)]).all(axis=1)
        same &= (self._parents[found] == parents).all(axis=1)
        return found if same.all() else found[: int(same.argmin())]

    def lookup(self, chain: list[bytes], tokens: IntArray) -> IntArray:
        """Return the blocks of a sequence that are cached, -1 for the others: [N]. Changes nothing.

        Args:
            chain: the digest that starts the sequence's chain, and those of its first N blocks.
            tokens: of these blocks, [N, block_size].
        """
        missing = -1
        found = np.array([self._by_digest.get(digest, missing) for digest in chain[1:]], dtype=np.int32)
        parents = np.frombuffer(b"".join(chain[:-1]), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        same = (found != missing) & (self._tokens[found] == tokens).all(axis=1)
        same &= (self._parents[found] == parents).all(axis=1)
        return np.where(same, found, missing)

    def count_findable(self, digests: Iterable[bytes]) -> int:
        """Return the length of the longest cached run at the start of `digests`, by the digests alone."""
        return len(self._leading(digests)[0])

    def count_idle(self, block_ids: IntArray) -> int:
        """Return how many of `block_ids` are idle, that is, how many free blocks acquiring them takes."""
        return int(np.count_nonzero(self._counts[block_ids] == 0)) if len(block_ids) else 0

    def reference_counts(self, block_ids: IntArray) -> IntArray:
        """Return the reference count of each of `block_ids`."""
        counts: IntArray = self._counts[block_ids]
        return counts

    def forget_contents(self) -> None:
        """Empty the prefix cache: no block's content can be found any more. Blocks in use stay in use."""
        self._blank.push(self._idle.clear())
        self._is_cached[:] = False
        self._digests[:] = None
        self._by_digest.clear()
        if self._events is not None:
            self._events.cleared()

    def find_each(self, digests: Iterable[bytes]) -> IntArray:
        """Return the cached blocks of those of these digests that there are, by the digests alone."""
        found = map(self._by_digest.get, digests)
        return np.array([block_id for block_id in found if block_id is not None], dtype=np.int32)

    def forget_content(self, block_ids: IntArray) -> list[bytes]:
        """Remove the contents of blocks from the prefix cache: they have turned out to be invalid.

        Returns:
            The digests of those that were cached.
        """
        cached = block_ids[self._is_cached[block_ids]]
        digests: list[bytes] = self._digests[cached].tolist()
        idle = cached[self._counts[cached] == 0]
        self._idle.take(idle)
        self._forget(cached)
        self._blank.push(idle)
        return digests

    def check(self, held: Iterable[int]) -> None:
        """Check invariants 1 and 2 against `held`: every block id of every table, with repetition.

        Raises:
            AssertionError: names the identity that does not hold, with the numbers.
        """
        expected = np.bincount(np.fromiter(held, dtype=np.int64), minlength=self.num_blocks)
        wrong = np.flatnonzero(expected != self._counts)
        assert not wrong.size, f"invariant 2: counts of blocks {wrong[:8].tolist()} differ from the tables"
        idle = set(self._idle)
        free = set(self._blank) | idle
        in_use = set(np.flatnonzero(self._counts > 0).tolist())
        assert len(free) == len(self._blank) + len(self._idle), "invariant 1: a block is free twice"
        assert not free & in_use, f"invariant 1: blocks {sorted(free & in_use)[:8]} free and in use"
        assert free | in_use == set(range(self.num_committed)), (
            "invariant 1: a block is neither free nor in use"
        )
        cached = {block: self._digests[block] for block in np.flatnonzero(self._is_cached).tolist()}
        assert idle == set(cached) - in_use, "invariant 1: idle blocks are not the cached ones"
        assert {digest: block for block, digest in cached.items()} == self._by_digest, (
            "invariant 1: the prefix index and the blocks' contents differ"
        )

    def _leading(self, digests: Iterable[bytes]) -> tuple[list[int], list[bytes]]:
        """Return the blocks at the start of `digests` up to the first not found, and their digests."""
        hits, found = [], []
        for digest in digests:
            block_id = self._by_digest.get(digest)
            if block_id is None:
                break
            hits.append(block_id)
            found.append(digest)
        return hits, found

    def _forget(self, block_ids: IntArray) -> None:
        """Forget the contents of cached blocks."""
        if self._events is not None:
            for block_id in block_ids.tolist():
                self._events.removed(block_id, self._key_of(block_id))
        deque(map(self._by_digest.__delitem__, self._digests[block_ids].tolist()), maxlen=0)
        self._digests[block_ids] = None
        self._is_cached[block_ids] = False

    def _key_of(self, block_id: int) -> BlockKey:
        tokens = self._tokens[block_id].tobytes()
        return BlockKey(self._digests[block_id], self._parents[block_id].tobytes(), tokens)


class BlankBlocks:
    """The blank blocks, in the order in which they are handed out: a stack of up to `num_blocks` ids.

    It is one array, so that pushing and popping cost what is moved.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ids = np.empty(num_blocks, dtype=np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids[: self._count].tolist())

    def push(self, block_ids: IntArray) -> None:
        """Add blocks on top, the last given uppermost."""
        end = self._count + len(block_ids)
        self._ids[self._count : end] = block_ids
        self._count = end

    def push_below(self, block_ids: IntArray) -> None:
        """Add blocks at the bottom, which moves all others."""
        end = self._count + len(block_ids)
        self._ids[len(block_ids) : end] = self._ids[: self._count].copy()
        self._ids[: len(block_ids)] = block_ids
        self._count = end

    def pop(self, count: int) -> IntArray:
        """Remove `count` blocks from the top, or all if there are fewer; the uppermost comes last."""
        start = max(self._count - count, 0)
        popped: IntArray = self._ids[start : self._count].copy()
        self._count = start
        return popped

    def next(self, count: int) -> IntArray:
        """Return the `count` uppermost blocks, the uppermost first, or all if there are fewer."""
        top: IntArray = self._ids[max(self._count - count, 0) : self._count][::-1].copy()
        return top
