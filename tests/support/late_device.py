"""A device whose queues go on when a test lets them, in any order that CUDA would permit.

Everything that is asked of it, steps included, is noted down with the points that it has to come after, and
done later: the first of any queue whose points have been reached. It runs torch on the host's memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class DeviceError(RuntimeError):
    pass


class LatePoint:
    """Reached when everything before it in its queue has been done, or has failed."""

    def __init__(self, device: LateDevice, queue: LateQueue) -> None:
        self._device = device
        self.queue = queue
        self.is_reached = False
        self.is_lost = False  # reached, but what was to be done before was not
        self.reached_at = 0

    def wait(self) -> None:
        self._device.on_wait()
        with self._device.lock:
            try:
                self._device.check("wait")
                if self.is_lost:
                    raise DeviceError("it has failed before")
            except DeviceError:
                self.queue.lose_up_to(self)
                raise
            self._device.reach(self)

    def seconds_since(self, earlier: LatePoint) -> float | None:
        return float(self.reached_at - earlier.reached_at) if self.is_reached else None


class LateQueue:
    """Operations one after the other, each behind points of other queues."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.operations: deque[tuple[Callable[[], Any] | LatePoint, tuple[LatePoint, ...]]] = deque()

    def ask(self, operation: Callable[[], Any] | LatePoint, *after: LatePoint) -> None:
        with self.device.lock:
            self.operations.append((operation, after))
            if self.device.is_eager and self is self.device.steps:
                self.run()

    def end(self) -> LatePoint:
        point = LatePoint(self.device, self)
        self.ask(point)
        return point

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: LatePoint) -> LatePoint:
        self.device.check("copy")
        assert (target.shape, target.dtype) == (source.shape, source.dtype)
        self.ask(lambda: target.copy_(source), after)
        return self.end()

    @property
    def can_run(self) -> bool:
        return bool(self.operations) and all(point.is_reached for point in self.operations[0][1])

    def run(self) -> None:
        operation, after = self.operations.popleft()
        for point in after:
            self.device.reach(point)
        self.device.num_done += 1
        if isinstance(operation, LatePoint):
            operation.is_reached, operation.reached_at = True, self.device.num_done
        else:
            operation()

    def lose_up_to(self, last: LatePoint) -> None:
        """Do nothing of what comes before a point that is not reached yet."""
        while not last.is_reached:
            operation, _ = self.operations.popleft()
            if isinstance(operation, LatePoint):
                operation.is_reached = operation.is_lost = True


class LateDevice:
    """A `CopyDevice`.

    Args:
        is_eager: steps are done when they are asked for; copies wait all the same.
    """

    def __init__(self, *, is_eager: bool = False) -> None:
        self.is_eager = is_eager
        self.lock = threading.RLock()
        self.steps = LateQueue(self)
        self.queues = [self.steps]
        self.num_done = 0
        self.num_pinned_bytes = 0
        self.failing: dict[str, int] = {}  # how often calls fail from now on, by name
        self.on_wait: Callable[[], Any] = lambda: None

    def check(self, call: str) -> None:
        if self.failing.get(call):
            self.failing[call] -= 1
            raise DeviceError(f"{call} fails")

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.check("pinned")
        self.num_pinned_bytes += num_bytes
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def queue(self) -> LateQueue:
        self.queues.append(LateQueue(self))
        return self.queues[-1]

    def gather(self, rows: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        self.check("gather")
        self.steps.ask(lambda: torch.index_select(rows, 0, indices, out=out))

    def mark(self) -> LatePoint:
        self.check("mark")
        return self.steps.end()

    def hold(self, point: LatePoint) -> None:
        self.check("hold")
        self.steps.ask(lambda: None, point)

    def reach(self, point: LatePoint) -> None:
        """Do what comes before a point, and nothing else."""
        while not point.is_reached:
            assert point.queue.operations, "a point that was never asked for"
            point.queue.run()

    def run(self, choose: Callable[[list[LateQueue]], LateQueue]) -> bool:
        """Do one operation of the queue that is chosen of those that can go on; False if there is none."""
        with self.lock:
            ready = [queue for queue in self.queues if queue.can_run]
            if ready:
                choose(ready).run()
            return bool(ready)

    def finish(self) -> None:
        """Do everything, copies last."""
        while self.run(lambda ready: ready[0]):
            pass
        assert not any(queue.operations for queue in self.queues), "queues wait for each other"
