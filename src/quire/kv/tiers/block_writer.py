"""From the cache to a tier: blocks are copied at the end of the step that filled them, and written later."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from quire.kv.block_hash import BlockKey
from quire.kv.tiers.block_copier import BlockCopier, OutgoingBlock
from quire.kv.tiers.counters import Counters
from quire.kv.tiers.tier import BlockTier
from quire.kv.tiers.worker_threads import WorkerThreads

logger = logging.getLogger(__name__)


class BlockWriter:
    """Has one thread write blocks to a tier. While it is behind, blocks are not stored.

    Args:
        tier: where to.
        copier: from the cache.
        thread: the one that writes.
        counters: of blocks written, failed and dropped.
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

    def store(self, blocks: Sequence[tuple[BlockKey, int]], generation: int) -> None:
        """Store blocks of the cache as the steps so far leave them; called in the step's thread.

        What fails is not stored; the step goes on.

        Args:
            blocks: keys and block ids.
            generation: of the tier when the step was planned.
        """
        wanted = {key.digest: (key, block_id) for key, block_id in blocks}
        wanted = {digest: block for digest, block in wanted.items() if digest not in self._being_stored}
        if not wanted:
            return
        try:
            copies = self._copier.copy_out([block_id for _, block_id in wanted.values()])
        except Exception:
            logger.exception("%d KV blocks could not be copied out of the cache", len(wanted))
            self._counters.add(num_failed_writes=len(wanted))
            return
        for (key, _), copy in zip(wanted.values(), copies, strict=False):
            self._being_stored.add(key.digest)
            self._thread.submit(functools.partial(self._write, key, copy, generation))
        self._counters.add(num_dropped_writes=len(wanted) - len(copies))

    def _write(self, key: BlockKey, copy: OutgoingBlock, generation: int) -> None:
        """Write one block; runs in the thread."""
        is_written = False
        try:
            is_written = self._tier.write(key, copy.content(), generation)
        finally:
            self._being_stored.discard(key.digest)
            copy.release()
            self._counters.add(num_written_blocks=is_written, num_failed_writes=not is_written)
