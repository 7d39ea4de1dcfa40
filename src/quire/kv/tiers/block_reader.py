"""Reads blocks from a tier into the cache, in threads, while other requests compute."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.connectors.step_times import StepMark
from quire.kv.tiers.block_copier import BlockCopier
from quire.kv.tiers.loads import BlockLoad, LoadInProgress
from quire.kv.tiers.tier import BlockTier
from quire.kv.tiers.worker_threads import Counters, WorkerThreads

PREFETCH_BYTES = 8 << 20
"""Bytes that the disk fetches ahead of what is read."""


class BlockReader:
    """Reads blocks of a tier into the cache, each thread one at a time.

    Args:
        tier: where from.
        copier: into the cache.
        threads: those that read.
        counters: counters of blocks loaded and failed.
        clock: returns seconds.
    """

    def __init__(
        self,
        tier: BlockTier,
        copier: BlockCopier,
        threads: WorkerThreads,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._copier = copier
        self._threads = threads
        self._counters = counters
        self._clock = clock
        self._of_thread = threading.local()

    def begin(self, new: BlockLoad, after: StepMark) -> LoadInProgress:
        """Begin a load; called in the step's thread.

        Args:
            new: the load.
            after: steps before this may still use its blocks.
        """
        load = LoadInProgress(new, self._copier, after)
        for index, (_, block) in enumerate(new.blocks):
            if new.generation != self._tier.residents.generation:
                load.end_block(block, self._clock(), is_filled=False)
            else:
                self._threads.submit(functools.partial(self._read, load, index))
        return load

    def _read(self, load: LoadInProgress, index: int) -> None:
        """Fill one block; runs in a thread. However it ends, the block is settled."""
        key, block = load.load.blocks[index]
        is_filled = False
        try:
            if not load.is_cancelled:
                load.begin(self._clock())
                self._prefetch(load, index)
                content = self._buffer()
                if self._tier.read(key, content):
                    load.fill(block, content)
                    is_filled = True
        finally:
            load.end_block(block, self._clock(), is_filled=is_filled)
            if not load.is_cancelled:
                self._counters.add(num_loaded_blocks=is_filled, num_failed_reads=not is_filled)

    def _prefetch(self, load: LoadInProgress, index: int) -> None:
        """Have the disk fetch what is read after this block; with the first block, all up to there."""
        ahead = -(-PREFETCH_BYTES // self._tier.bytes_per_place)
        blocks = load.load.blocks
        for key, _ in blocks[index + ahead : index + ahead + 1] if index else blocks[1 : ahead + 1]:
            self._tier.prefetch(key)

    def _buffer(self) -> ByteArray:
        """Return this thread's own buffer, so that a cancelled load writes to no block."""
        buffer: ByteArray | None = getattr(self._of_thread, "buffer", None)
        if buffer is None:
            buffer = self._of_thread.buffer = self._copier.buffer()
        return buffer
