"""Copies between the engine's KV caches and host memory, for the threads of a tier.

A block is one run of bytes there: its parts of all cache groups, one after the other. A piece of a state of
recurrent layers is as large, and can be moved in place of a block. A cache may be in the memory of a device,
which computes steps and copies blocks when it gets to them. So copies are begun, in an order with the steps,
and waited for elsewhere.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quire.kv.blocks.groups import NULL_BLOCK
from quire.kv.blocks.prompt_blocks import BlockIds
from quire.kv.blocks.state_pieces import StatePiece
from quire.kv.connectors.host_blocks import BlockStore, ByteArray, block_store
from quire.kv.connectors.step_times import HostMark, StepMark

if TYPE_CHECKING:
    from quire.kv.cache.paged_cache import PagedAttentionCache
    from quire.kv.cache.state_cache import StateCache

MAX_STAGED_BYTES = 256 << 20
"""Maximum size of all blocks that have left the cache and wait to be written."""


def num_staged_blocks(bytes_per_block: int) -> int:
    """Return how many blocks may wait to be written; there is room for one of any size."""
    return max(1, MAX_STAGED_BYTES // bytes_per_block)


class OutgoingBlock(Protocol):
    """A block on its way out of the cache."""

    def content(self) -> ByteArray:
        """Wait for the copy and return it; raises its error."""

    def release(self) -> None:
        """Release the memory of the copy for another block; called once."""


class IncomingBlock(Protocol):
    """A block on its way into the cache."""

    def wait(self) -> None:
        """Wait until it is there; raises the error of the copy."""

    def hold_steps(self) -> None:
        """Make all later steps begin after the copy; called in the step's thread."""


class BlockCopier(Protocol):
    """Copies blocks of the cache in order with the steps that use them.

    The *step's thread* is the one that computes steps, or has a device do so; it waits for nothing here.
    """

    @property
    def bytes_per_block(self) -> int:
        """Size of a block in bytes."""

    def mark(self) -> StepMark:
        """Return the point behind all steps so far; called in the step's thread."""

    def copy_out(self, blocks: Sequence[BlockIds | StatePiece]) -> Sequence[OutgoingBlock]:
        """Begin to copy blocks as the steps so far leave them; called in the step's thread.

        Steps to come may overwrite the blocks.

        Args:
            blocks: that all groups have.

        Returns:
            The copies of as many blocks, from the first, as there is memory for.
        """

    def buffer(self) -> ByteArray:
        """Return new memory for one block, which blocks are copied into the cache from."""

    def copy_in(self, block: BlockIds | StatePiece, content: ByteArray, after: Any) -> IncomingBlock:
        """Begin to overwrite a block, after all steps before a mark; may be called from any thread.

        Groups that have `NULL_BLOCK` in its place are left out. `content` must not change until the copy has
        been waited for.
        """


class BlockParts:
    """Where in the bytes of a block the part of each cache group is.

    Args:
        sizes: bytes per block of each group.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        ends = itertools.accumulate(sizes)
        self.num_bytes = sum(sizes)
        self._slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def of(self, block: BlockIds | StatePiece) -> Iterator[tuple[int, int, slice]]:
        """Yield each group that has something in the block: group, number of the block, part of the bytes.

        Pieces of states are all of the bytes, as if they were the blocks of one more group.
        """
        if isinstance(block, StatePiece):
            yield len(self._slices), block.number, slice(0, self.num_bytes)
            return
        for group, (block_id, part) in enumerate(zip(block, self._slices, strict=True)):
            if part.start < part.stop and (block_id != NULL_BLOCK or not group):
                yield group, block_id, part


class HostCopier:
    """`BlockCopier` of caches in host memory: a copy has ended when it has begun.

    Args:
        stores: the cache of each group; each block is read and written by one thread at a time.
        pieces: of states, if there are any.
        num_buffers: copies that may wait to be written; None: `num_staged_blocks`.
        clock: returns seconds.
    """

    def __init__(
        self,
        stores: Sequence[BlockStore],
        *,
        pieces: BlockStore | None = None,
        num_buffers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = stores if pieces is None else [*stores, pieces]
        self._parts = BlockParts([store.bytes_per_block for store in stores])
        self._clock = clock
        num_bytes = self._parts.num_bytes
        self.buffers = BufferPool(num_bytes, num_buffers or num_staged_blocks(num_bytes))

    @property
    def bytes_per_block(self) -> int:
        """Size of a block in bytes."""
        return self._parts.num_bytes

    def mark(self) -> HostMark:
        """Return the present time."""
        return HostMark(self._clock())

    def copy_out(self, blocks: Sequence[BlockIds | StatePiece]) -> Sequence[OutgoingBlock]:
        """Copy blocks while there are buffers."""
        copies: list[_HostCopy] = []
        for block in blocks:
            content = self.buffers.take()
            if content is None:
                break
            copies.append(_HostCopy(content, self.buffers))
            try:
                for group, block_id, part in self._parts.of(block):
                    self._stores[group].read_block(block_id, content[part])
            except Exception:
                for copy in copies:
                    copy.release()
                raise
        return copies

    def buffer(self) -> ByteArray:
        """Return memory for one block."""
        return np.empty(self.bytes_per_block, dtype=np.uint8)

    def copy_in(self, block: BlockIds | StatePiece, content: ByteArray, after: HostMark) -> IncomingBlock:
        """Overwrite a block."""
        for group, block_id, part in self._parts.of(block):
            self._stores[group].write_block(block_id, content[part])
        return _IN_PLACE


class _HostCopy:
    def __init__(self, content: ByteArray, buffers: BufferPool) -> None:
        self._content = content
        self._buffers = buffers

    def content(self) -> ByteArray:
        return self._content

    def release(self) -> None:
        self._buffers.give_back(self._content)


class BufferPool:
    """Buffers of one size, allocated when they are first needed. May be used by several threads.

    Args:
        bytes_per_buffer: size of each.
        max_buffers: maximum number of buffers in use at a time.
    """

    def __init__(self, bytes_per_buffer: int, max_buffers: int) -> None:
        self._bytes_per_buffer = bytes_per_buffer
        self._num_unmade = max_buffers
        self._free: list[ByteArray] = []
        self._lock = threading.Lock()

    def take(self) -> ByteArray | None:
        """Return a buffer that `give_back` must follow; None if all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._num_unmade:
                return None
            self._num_unmade -= 1
        return np.empty(self._bytes_per_buffer, dtype=np.uint8)

    def give_back(self, buffer: ByteArray) -> None:
        """Give a buffer back."""
        with self._lock:
            self._free.append(buffer)


class _InPlace:
    def wait(self) -> None:
        pass

    def hold_steps(self) -> None:
        pass


_IN_PLACE = _InPlace()


def host_copier(
    kv_caches: Sequence[PagedAttentionCache | BlockStore],
    clock: Callable[[], float],
    states: StateCache | BlockStore | None = None,
) -> HostCopier:
    """Return the copier of caches in host memory; anything with `read_block` and `write_block` is one."""
    pieces = None if states is None else block_store(states)
    return HostCopier([block_store(cache) for cache in kv_caches], pieces=pieces, clock=clock)
