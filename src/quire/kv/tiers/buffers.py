"""A bounded number of buffers for blocks on their way to a tier."""

from __future__ import annotations

import threading

import numpy as np

from quire.kv.connectors.host_blocks import ByteArray


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
        """Let a buffer be used for something else."""
        with self._lock:
            self._free.append(buffer)
