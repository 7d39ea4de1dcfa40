"""Writes blocks from the cache to a tier: copied after the step that filled them, written later."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.kv.blocks.block_hash import BlockKey
from quire.kv.blocks.prompt_blocks import BlockIds
from quire.kv.blocks.state_pieces import StatePiece
from quire.kv.tiers.block_copier import BlockCopier, OutgoingBlock
from quire.kv.tiers.tier import BlockTier
from quire.kv.tiers.worker_threads import Counters, WorkerThreads

logger = logging.getLogger(__name__)


class FilledBlock(NamedTuple):
    """A block of the cache, or a piece of a state, that a step fills for a request."""

    request_id: str
    key: BlockKey
    block: BlockIds | StatePiece


class BlockWriter:
    """Has one thread write blocks to a tier. While it is behind, blocks are not stored.

    Args:
        tier: where to.
        copier: from the cache.
        thread: the one that writes.
        counters: counters of blocks written, failed and dropped.
    """

    def __init__(
        self, tier: BlockTier, copier: BlockCopier, thread: WorkerThreads, counters: Counters
    ) -> None:
        self._tier = tier
        self._copier = copier
        self._thread = thread
        self._counters = counters
        self._being_stored: set[bytes] = set()

    @property
    def num_waiting(self) -> int:
        """Blocks that have been copied, and neither written nor given up."""
        return len(self._being_stored)

    def store(
        self, blocks: Sequence[FilledBlock], generation: int, failed_ids: Callable[[], frozenset[str]]
    ) -> None:
        """Store blocks of the cache as the steps so far leave them; called in the step's thread.

        What fails is not stored; the step goes on.

        Args:
            blocks: what to store.
            generation: generation of the tier when the step was planned.
            failed_ids: returns the requests whose blocks are not to be stored; the writing thread waits for
                it.
        """
        wanted = {block.key.digest: block for block in blocks}
        wanted = {digest: block for digest, block in wanted.items() if digest not in self._being_stored}
        if not wanted:
            return
        try:
            copies = self._copier.copy_out([filled.block for filled in wanted.values()])
        except Exception:
            logger.exception("%d KV blocks could not be copied out of the cache", len(wanted))
            self._counters.add(num_failed_writes=len(wanted))
            return
        for block, copy in zip(wanted.values(), copies, strict=False):
            self._being_stored.add(block.key.digest)
            self._thread.submit(functools.partial(self._write, block, copy, generation, failed_ids))
        self._counters.add(num_dropped_writes=len(wanted) - len(copies))

    def _write(
        self,
        block: FilledBlock,
        copy: OutgoingBlock,
        generation: int,
        failed_ids: Callable[[], frozenset[str]],
    ) -> None:
        """Write one block, unless its request has failed; runs in the thread."""
        is_valid, is_written = True, False
        try:
            is_valid = block.request_id not in failed_ids()
            is_written = is_valid and self._tier.write(block.key, copy.content(), generation)
        finally:
            self._being_stored.discard(block.key.digest)
            copy.release()
            self._counters.add(num_written_blocks=is_written, num_failed_writes=is_valid and not is_written)
