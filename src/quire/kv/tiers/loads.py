"""Asynchronous loads of blocks, shared between the thread of the step and those that read."""

from __future__ import annotations

import dataclasses
import threading

from quire.kv.blocks.block_hash import BlockKey
from quire.kv.blocks.prompt_blocks import BlockIds
from quire.kv.blocks.state_pieces import StatePiece
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.connectors.step_times import StepMark
from quire.kv.tiers.block_copier import BlockCopier, IncomingBlock


@dataclasses.dataclass(slots=True, frozen=True)
class BlockLoad:
    """Blocks and pieces of a state to fill for one request, from what was found in a tier's `generation`."""

    request_id: str
    blocks: list[tuple[BlockKey, BlockIds | StatePiece]]
    generation: int
    num_in_memory: int = 0  # of the blocks, see `BlockTier.count_in_memory`


class LoadInProgress:
    """A load whose blocks are filled one by one, until it has ended or is cancelled.

    Args:
        load: what to fill.
        copier: into the cache.
        after: steps before this may still use the blocks.
    """

    def __init__(self, load: BlockLoad, copier: BlockCopier, after: StepMark) -> None:
        self.load = load
        self.seconds = 0.0  # from the first read to the last
        self.failed_block_ids: set[int] = set()  # of the first group
        self._copier = copier
        self._after = after
        self._under_way: list[IncomingBlock] = []
        self._lock = threading.Lock()
        self._num_left = len(load.blocks)
        self._is_cancelled = False
        self._began: float | None = None

    @property
    def num_left(self) -> int:
        """Blocks that are neither filled nor failed."""
        return self._num_left

    @property
    def is_cancelled(self) -> bool:
        """Whether nothing may be written to the blocks any more."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Stop writing to the blocks before later steps do; called in the step's thread."""
        with self._lock:
            self._is_cancelled = True
            for copy in self._under_way:
                copy.hold_steps()

    def begin(self, now: float) -> None:
        """Note that a block is about to be read."""
        with self._lock:
            if self._began is None:
                self._began = now

    def fill(self, block: BlockIds | StatePiece, content: ByteArray) -> None:
        """Write a block's content, unless the load is cancelled; return when it is there.

        Raises:
            Exception: the error of the copy.
        """
        with self._lock:
            if self._is_cancelled:
                return
            copy = self._copier.copy_in(block, content, self._after)
            self._under_way.append(copy)
        try:
            copy.wait()
        finally:
            with self._lock:
                self._under_way.remove(copy)

    def end_block(self, block: BlockIds | StatePiece, now: float, *, is_filled: bool) -> None:
        """Note that one more block is settled; called once for each."""
        with self._lock:
            if not is_filled:
                self.failed_block_ids.add(block[0])
            if self._began is not None:
                self.seconds = now - self._began
            self._num_left -= 1
