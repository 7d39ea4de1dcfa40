"""Touches the memory of KV blocks before they are used: the first write to a page costs most."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Bytes to populate at once, which takes about 3 ms; a request that arrives has to wait no longer."""


class CacheWarmer:
    """Has the system provide the memory of the blocks that come next, while the engine is idle.

    A thread of its own does that, which ends when there is nothing left to do or the engine has work.
    Contents stay as they are, so nothing but time depends on whether a block is warm. The memory of a GPU is
    left as it is.

    Args:
        cache: the KV cache, its first dimension the blocks, each of them contiguous.
        next_blocks: returns the blocks that the next step may use, in order.
    """

    def __init__(self, cache: torch.Tensor, next_blocks: Callable[[], npt.NDArray[np.int32]]) -> None:
        self._cache = cache  # keeps the memory
        # The thread calls nothing of torch: if the interpreter ends meanwhile, it must not be in C++.
        self._address = cache.data_ptr()
        self._block_bytes = cache.stride(0) * cache.itemsize
        self._next_blocks = next_blocks
        self._is_warm = np.zeros(len(cache), dtype=np.bool_)
        self._is_idle = False
        self._is_usable = cache.is_cpu and cache.nbytes > 0
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Note that the engine has nothing to do."""
        self._is_idle = True
        if self._is_usable and (self._thread is None or not self._thread.is_alive()):
            try:
                blocks = self._next_blocks()
                cold = blocks[~self._is_warm[blocks]].tolist()
            except Exception:
                logger.exception("the scheduler cannot say which KV blocks come next; none will be warmed")
                self._is_usable = False
            else:
                self._start(cold)

    def pause(self) -> None:
        """Note that the engine has work; the thread ends after the piece that it is at."""
        self._is_idle = False

    def wait(self) -> None:
        """Return when the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Pause, and return when the thread has ended."""
        self.pause()
        self.wait()

    def _start(self, blocks: list[int]) -> None:
        if blocks:
            thread = threading.Thread(
                target=self._warm, args=(blocks,), name="quire-cache-warmer", daemon=True
            )
            thread.start()
            self._thread = thread  # one that cannot be started cannot be waited for

    def _warm(self, blocks: list[int]) -> None:
        from quire.kernels.devices.memory import populate

        for block in blocks:
            begin = self._address + block * self._block_bytes
            end = begin + self._block_bytes
            for address in range(begin, end, PIECE_BYTES):
                if not self._is_idle:
                    return
                if not populate(address, min(PIECE_BYTES, end - address)):
                    self._is_usable = False
                    return
            self._is_warm[block] = True
