"""The interface of devices for copies to and from host memory: queues beside that of the steps."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch


class DevicePoint(Protocol):
    """A point in a device's queue, such as a CUDA event."""

    @property
    def is_reached(self) -> bool:
        """Whether the device has got there; may be asked from any thread."""

    def wait(self) -> None:
        """Return when the device has got there; may be called from any thread.

        Raises:
            Exception: the device has failed, and what it was to do before the point will not be done.
        """

    def seconds_since(self, earlier: Any) -> float | None:
        """Return the time since an earlier point among the steps; None: the device has not got here yet."""


Point = TypeVar("Point", bound=DevicePoint)


class CopyQueue(Protocol[Point]):
    """Copies beside the steps, carried out one after the other. May be used by several threads."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Point) -> Point:
        """Copy bytes between the device and pinned host memory when `after` is reached; return the end."""


class CopyDevice(Protocol[Point]):
    """A device with queues of copies."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return host memory that the device can copy from and to, [num_bytes] uint8."""

    def queue(self) -> CopyQueue[Point]:
        """Return a new queue."""

    def gather(self, rows: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Copy rows [N, ...] of the numbers `indices` [R], of the host, to `out` [R, ...] among the steps."""

    def mark(self) -> Point:
        """Return the point after everything that has been launched so far in the queue of the steps."""

    def hold(self, point: Point) -> None:
        """Make the queue of the steps wait for a point of another queue."""
