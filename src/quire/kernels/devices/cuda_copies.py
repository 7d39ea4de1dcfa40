"""Copies between a GPU and pinned host memory, in streams beside the one that computes: a `CopyDevice`."""

from __future__ import annotations

import torch

from quire.kernels.devices.device import to_device


class CudaCopies:
    """Copies of the current GPU; the stream that is current in the calling thread is that of the steps."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory, [num_bytes] uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def queue(self) -> CudaQueue:
        """Return a new stream."""
        return CudaQueue()

    def gather(self, rows: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Copy rows [N, ...] of the numbers `indices` [R], of the host, to `out` [R, ...]."""
        torch.index_select(rows, 0, to_device(indices, rows.device), out=out)

    def mark(self) -> CudaPoint:
        """Return the point after everything that was launched in the current stream."""
        return CudaPoint(torch.cuda.current_stream())

    def hold(self, point: CudaPoint) -> None:
        """Make the current stream wait for a point."""
        torch.cuda.current_stream().wait_event(point.event)


class CudaQueue:
    """A stream of copies."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: CudaPoint) -> CudaPoint:
        """Copy when `after` is reached; return the point after the copy."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            target.copy_(source, non_blocking=True)
            return CudaPoint(self._stream)


class CudaPoint:
    """An event at the present end of a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # `blocking`: a thread that waits sleeps, as cores may be few.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    @property
    def is_reached(self) -> bool:
        """Whether the GPU has got here."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when the GPU has got here."""
        self.event.synchronize()

    def seconds_since(self, earlier: CudaPoint) -> float | None:
        """Return the seconds since an earlier point of the same stream; None: it has not got here yet."""
        if not self.is_reached:
            return None
        return float(earlier.event.elapsed_time(self.event)) / 1e3
