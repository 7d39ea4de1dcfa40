"""Which cached block is rewritten first when blank ones run out: one method to write, `RetentionPolicy.rank`.

Only *idle* blocks are in question: cached, and with no reference.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from numbers import Real
from typing import ClassVar

import numpy as np
from typing_extensions import override

from quire.registry import Registry
from quire.step import Int64Array, IntArray

logger = logging.getLogger(__name__)

_NOWHERE = -1

Rank = float | tuple[float, ...]
"""What idle blocks are sorted by: lower is rewritten first. All ranks of a policy have the same form."""


@dataclasses.dataclass(slots=True)
class IdleBlock:
    """A block that has just become idle."""

    last_used: int  # grows with each block that becomes idle; of a request's blocks, the tail goes first
    num_hits: int  # times that a prefix lookup has found and used it since it was cached
    priority: int  # of the request that held it last, lower being more important


class RetentionPolicy(ABC):
    """Ranks idle blocks. A block is ranked once, when it becomes idle."""

    reads_priority: ClassVar[bool] = True
    """Whether ranks depend on `IdleBlock.priority`; a request is refused a priority that no policy reads."""

    @abstractmethod
    def rank(self, block: IdleBlock) -> Rank:
        """Return what the block is sorted by."""


class LeastRecentlyUsed(RetentionPolicy):
    """The blocks that became idle first go first."""

    reads_priority = False

    @override
    def rank(self, block: IdleBlock) -> Rank:
        return block.last_used


class LeastFrequentlyUsed(RetentionPolicy):
    """The blocks that were found least often go first, of those the least recently used."""

    reads_priority = False

    @override
    def rank(self, block: IdleBlock) -> Rank:
        return (block.num_hits, block.last_used)


class LeastImportant(RetentionPolicy):
    """The blocks of the least important requests go first, of those the least recently used."""

    @override
    def rank(self, block: IdleBlock) -> Rank:
        return (-block.priority, block.last_used)


class IdleBlocks(ABC):
    """The idle blocks, in the order in which they are rewritten."""

    @abstractmethod
    def put(self, block_ids: IntArray, num_hits: IntArray, priorities: IntArray | Int64Array | int) -> None:
        """Add blocks that are not in here, one after the other; see `IdleBlock`."""

    @abstractmethod
    def take(self, block_ids: IntArray) -> None:
        """Remove blocks that are in here: a prefix lookup has found them."""

    @abstractmethod
    def evict(self, count: int) -> IntArray:
        """Remove the `count` blocks to be rewritten next, of at least as many, and return their ids."""

    @abstractmethod
    def clear(self) -> IntArray:
        """Remove all blocks and return their ids."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...


class LruBlocks(IdleBlocks):
    """In the order of `LeastRecentlyUsed`; every operation is a few array operations.

    A queue in an array with room for twice as many entries as there are blocks. A block that was taken stays
    in the queue, but its place is forgotten; when the queue reaches the end of the array, what still counts
    moves to the front, so that each entry costs O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue = np.zeros(2 * num_blocks, dtype=np.int32)
        self._place = np.full(num_blocks, _NOWHERE, dtype=np.int32)  # of each block in the queue
        self._start = self._end = 0
        self._count = 0

    @override
    def put(self, block_ids: IntArray, num_hits: IntArray, priorities: IntArray | Int64Array | int) -> None:
        if self._end + len(block_ids) > len(self._queue):
            self._compact()
        end = self._end + len(block_ids)
        self._queue[self._end : end] = block_ids
        self._place[block_ids] = np.arange(self._end, end)
        self._end = end
        self._count += len(block_ids)

    @override
    def take(self, block_ids: IntArray) -> None:
        self._place[block_ids] = _NOWHERE
        self._count -= len(block_ids)

    @override
    def evict(self, count: int) -> IntArray:
        evicted: list[IntArray] = []
        missing = count
        while missing:
            window = self._queue[self._start : min(self._start + 2 * missing, self._end)]
            counts = self._place[window] == np.arange(self._start, self._start + len(window))
            found = np.flatnonzero(counts)[:missing]
            self._start += int(found[-1]) + 1 if len(found) == missing else len(window)
            evicted.append(window[found])
            missing -= len(found)
        block_ids = np.concatenate(evicted) if evicted else np.empty(0, dtype=np.int32)
        self.take(block_ids)
        return block_ids

    @override
    def clear(self) -> IntArray:
        return self.evict(self._count)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self._in_order().tolist())

    def _in_order(self) -> IntArray:
        places = np.arange(self._start, self._end)
        queued = self._queue[self._start : self._end]
        in_order: IntArray = queued[self._place[queued] == places]
        return in_order

    def _compact(self) -> None:
        block_ids = self._in_order()
        self._queue[: len(block_ids)] = block_ids
        self._place[block_ids] = np.arange(len(block_ids))
        self._start, self._end = 0, len(block_ids)


class RankedBlocks(IdleBlocks):
    """In the order of any policy; adding and removing are O(log n).

    A block that was taken stays in the heap until it comes to the top, or until more than half of the heap is
    such blocks. A policy that raises, or whose ranks cannot be compared, is replaced by `LeastRecentlyUsed`.

    Args:
        policy: ranks blocks.
        on_replaced: called when it is replaced.
    """

    def __init__(self, policy: RetentionPolicy, on_replaced: Callable[[], None] = lambda: None) -> None:
        self._policy = policy
        self._on_replaced = on_replaced
        self._is_built_in = RETENTIONS.has(policy)
        self._form: int | None = None  # of the policy's ranks, see `_form`; None: not known yet
        self._heap: list[tuple[Rank, int, int]] = []  # rank, serial number, block id
        self._serial_of: dict[int, int] = {}
        self._serials = itertools.count()

    @override
    def put(self, block_ids: IntArray, num_hits: IntArray, priorities: IntArray | Int64Array | int) -> None:
        each = np.broadcast_to(priorities, block_ids.shape).tolist()
        for block_id, hits, priority in zip(block_ids.tolist(), num_hits.tolist(), each, strict=True):
            serial = next(self._serials)
            rank = self._rank(IdleBlock(serial, hits, priority))
            self._serial_of[block_id] = serial
            heapq.heappush(self._heap, (rank, serial, block_id))

    @override
    def take(self, block_ids: IntArray) -> None:
        for block_id in block_ids.tolist():
            del self._serial_of[block_id]
        if len(self._heap) > 2 * len(self._serial_of) + 16:
            self._heap = [entry for entry in self._heap if self._serial_of.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    @override
    def evict(self, count: int) -> IntArray:
        evicted: list[int] = []
        while len(evicted) < count:
            _, serial, block_id = heapq.heappop(self._heap)
            if self._serial_of.get(block_id) == serial:
                del self._serial_of[block_id]
                evicted.append(block_id)
        return np.array(evicted, dtype=np.int32)

    @override
    def clear(self) -> IntArray:
        block_ids = np.array(list(self._serial_of), dtype=np.int32)
        self._serial_of.clear()
        self._heap.clear()
        return block_ids

    def __len__(self) -> int:
        return len(self._serial_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._serial_of)

    def _rank(self, block: IdleBlock) -> Rank:
        """Return the policy's rank if it is comparable to earlier ones."""
        if self._is_built_in:
            return self._policy.rank(block)
        try:
            rank = self._policy.rank(block)
            form = _form(rank)
            if form != self._form:
                if self._form is not None:
                    raise TypeError(f"it returned {rank!r}, which does not compare with its earlier ranks")
                self._form = form
        except Exception:
            self._replace_policy()
            return self._policy.rank(block)
        return rank

    def _replace_policy(self) -> None:
        logger.exception(
            "%s %s failed in rank(); LeastRecentlyUsed replaces it until the engine ends",
            RETENTIONS.field,
            type(self._policy).__qualname__,
        )
        self._policy, self._is_built_in = LeastRecentlyUsed(), True
        self._heap = [(serial, serial, block_id) for block_id, serial in self._serial_of.items()]
        heapq.heapify(self._heap)
        self._on_replaced()


class LeftBehindFirst(IdleBlocks):
    """Blocks that running sequences have left behind their windows go first, the others in their order.

    A sequence is mostly continued at its end, and then a lookup needs the blocks of its last window alone.

    Args:
        others: all other blocks.
        num_blocks: blocks in the pool.
    """

    def __init__(self, others: IdleBlocks, num_blocks: int) -> None:
        self._others = others
        self._left = LruBlocks(num_blocks)
        self._is_left = np.zeros(num_blocks, dtype=np.bool_)

    def put_left(
        self, block_ids: IntArray, num_hits: IntArray, priorities: IntArray | Int64Array | int
    ) -> None:
        """Add blocks, of which those without hits go first; see `put`."""
        has_hits = num_hits > 0
        if isinstance(priorities, np.ndarray):
            priorities = priorities[has_hits]
        self._others.put(block_ids[has_hits], num_hits[has_hits], priorities)
        never_hit = block_ids[~has_hits]
        self._left.put(never_hit, num_hits[~has_hits], 0)
        self._is_left[never_hit] = True

    @override
    def put(self, block_ids: IntArray, num_hits: IntArray, priorities: IntArray | Int64Array | int) -> None:
        self._others.put(block_ids, num_hits, priorities)

    @override
    def take(self, block_ids: IntArray) -> None:
        is_left = self._is_left[block_ids]
        self._left.take(block_ids[is_left])
        self._others.take(block_ids[~is_left])
        self._is_left[block_ids] = False

    @override
    def evict(self, count: int) -> IntArray:
        left = self._left.evict(min(count, len(self._left)))
        self._is_left[left] = False
        return np.concatenate((left, self._others.evict(count - len(left))))

    @override
    def clear(self) -> IntArray:
        return self.evict(len(self))

    def __len__(self) -> int:
        return len(self._left) + len(self._others)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self._left, self._others)


RETENTIONS: Registry[RetentionPolicy] = Registry(
    "SchedulerConfig.prefix_retention",
    RetentionPolicy,
    {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed, "priority": LeastImportant},
)


def _form(rank: object) -> int:
    """Return what all ranks of a policy have in common: the length of a tuple, or -1 for a number.

    Raises:
        TypeError: it is neither a number nor a tuple of numbers.
    """
    for number in rank if isinstance(rank, tuple) else (rank,):
        if not isinstance(number, Real) or math.isnan(number):
            raise TypeError(f"it returned {rank!r}, which is neither a number nor a tuple of numbers")
    return len(rank) if isinstance(rank, tuple) else -1


def idle_blocks(
    retention: object, num_blocks: int, on_replaced: Callable[[], None] = lambda: None
) -> IdleBlocks:
    """Return an empty container for up to `num_blocks` blocks, numbered from 0.

    Args:
        retention: a retention policy: its name, its dotted name, its class or the policy itself.
        num_blocks: blocks in the pool.
        on_replaced: called when a policy has failed and is replaced by the default.

    Raises:
        ConfigError: it is none of these.
    """
    policy = RETENTIONS.build(retention)
    return LruBlocks(num_blocks) if type(policy) is LeastRecentlyUsed else RankedBlocks(policy, on_replaced)
