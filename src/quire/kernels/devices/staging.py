"""Weights on their way to a device: threads read them into pinned buffers, and copies go on meanwhile.

A copy from memory that is not pinned is one thread's, which also waits for each page that comes from a file.
Here several threads take a piece of a weight each: the system reads its pages, the thread packs them into a
buffer that is free, and asks a queue of the device for the copy. So host memory is bounded by the buffers,
whatever the size of the file, beside its pages in the system's cache.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from quire.kernels.devices.copy_device import CopyDevice, Point
from quire.kernels.devices.cores import usable_cores
from quire.kernels.devices.device import HOST
from quire.kernels.devices.memory import WeightMemory, read_ahead

MAX_THREADS = 8
BUFFER_BYTES = 4 << 20
MIN_PIECE_BYTES = 1 << 20  # of which more threads would take longer to hand over than to read
BUFFERS_PER_THREAD = 2  # one is filled while the other is copied
MIN_STAGED_BYTES = 1 << 16  # less goes as it is

ByteArray = npt.NDArray[np.uint8]


@contextlib.contextmanager
def weight_memory(device: torch.device) -> Iterator[WeightMemory]:
    """Provide what brings weights to a device, for as long as the context lasts."""
    if device.type != "cuda":
        yield WeightMemory()
        return
    from quire.kernels.devices.cuda_copies import CudaCopies

    memory = StagedMemory(device, CudaCopies(), num_threads=min(MAX_THREADS, usable_cores()))
    try:
        yield memory
    finally:
        memory.close()


class StagedMemory(WeightMemory, Generic[Point]):
    """Brings weights to a device piece by piece. For one thread at a time.

    Args:
        device: where weights go.
        copies: copies there.
        num_threads: that read.
        buffer_bytes: of each buffer, pinned; there are two for each thread.
    """

    def __init__(
        self,
        device: torch.device,
        copies: CopyDevice[Point],
        *,
        num_threads: int,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        super().__init__()
        self._device = device
        self._copies = copies
        self._queue = copies.queue()
        self._buffer_bytes = buffer_bytes
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
        self._free: queue.SimpleQueue[tuple[torch.Tensor, Point | None]] = queue.SimpleQueue()
        for _ in range(BUFFERS_PER_THREAD * num_threads):
            self._free.put((copies.pinned(buffer_bytes), None))

    @override
    def bring(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """See `WeightMemory.bring`. Once it returns, `tensor` is not read any more.

        Raises:
            OSError: the file that `tensor` is mapped from cannot be read.
        """
        assert device == self._device
        if tensor.nbytes < MIN_STAGED_BYTES or tensor.device != HOST:
            return super().bring(tensor, device)
        tensor = tensor.contiguous()
        target = torch.empty_like(tensor, device=device)
        source, octets = _octets(tensor).numpy(), _octets(target)
        after = self._copies.mark()  # what had the target's memory before may still be in use
        pieces = [
            self._threads.submit(self._carry, source[piece], octets[piece], after)
            for piece in self._pieces(len(source))
        ]
        wait(pieces)
        for piece in pieces:
            self._copies.hold(piece.result())
        return target

    def close(self) -> None:
        """End the threads, and free the buffers as soon as their copies have been made."""
        self._threads.shutdown()
        while not self._free.empty():
            _, copied = self._free.get()
            if copied is not None:
                copied.wait()

    def _pieces(self, num_bytes: int) -> Iterator[slice]:
        """Yield pieces for all threads, but none that is not worth it, and none larger than a buffer."""
        size = min(self._buffer_bytes, max(-(-num_bytes // self._num_threads), MIN_PIECE_BYTES))
        for start in range(0, num_bytes, size):
            yield slice(start, min(start + size, num_bytes))

    def _carry(self, source: ByteArray, target: torch.Tensor, after: Point) -> Point:
        """Read a piece and ask for its copy; return the point behind that."""
        read_ahead(source.ctypes.data, source.nbytes)
        buffer, copied = self._free.get()
        try:
            if copied is not None:
                copied.wait()
                copied = None
            packed = buffer[: source.nbytes]
            np.copyto(packed.numpy(), source)
            copied = self._queue.copy(target, packed, after)
            return copied
        finally:
            self._free.put((buffer, copied))


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
