"""Ranks on the GPUs of one machine that exchange tensors with NCCL: each process sees its own GPU only."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from typing_extensions import override

from quire.engine.ranks.process_group import GroupCommunicator
from quire.kernels.devices.device import DevicePoint, is_capturing
from quire.models.shard import Shard

logger = logging.getLogger(__name__)

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class NcclCommunicator(GroupCommunicator):
    """See `GroupCommunicator`. An exchange is part of the current stream, and no call waits for it.

    So no call shows that a rank takes no part. Rank 0 measures how long exchanges take
    (`seconds_waiting`), and whoever finds that too long aborts: then all that waits for the GPU goes on, with
    numbers that mean nothing.
    """

    def __init__(self, shard: Shard, rendezvous: int, *, timeout: float) -> None:
        self._pending: deque[tuple[float, DevicePoint]] | None = None if shard.rank else deque()
        self._asking_since: float | None = None  # of a call into NCCL that has not returned
        self._aborting: threading.Thread | None = None
        super().__init__(shard, rendezvous, timeout=timeout)

    def __del__(self) -> None:
        """Leave the end of the group to a thread: NCCL waits for graphs that exchanges were captured in."""
        if self._group is None:
            os.close(self._file)
            return
        self.abort()
        group, self._group = [self._group], None
        _run(threading.Thread(target=_close, args=(self._aborting, group, self._file), daemon=True))

    def seconds_waiting(self) -> float:
        """Return how long ago the oldest exchange was asked for that has not ended; 0: all have ended.

        To be called on rank 0, by one thread, and beside calls that do not return: where steps are captured,
        NCCL may have ranks wait for each other on the host.
        """
        assert self._pending is not None
        asking_since = self._asking_since
        while self._pending and self._pending[0][1].is_reached:
            self._pending.popleft()
        since = self._pending[0][0] if self._pending else asking_since
        return 0.0 if since is None else time.monotonic() - since

    def abort(self) -> None:
        """End all exchanges on this rank, without waiting. Later ones raise `ExchangeError`."""
        if self._aborting is None:
            self._aborting = threading.Thread(target=_abort, args=(self._group,), daemon=True)
            _run(self._aborting)

    @override
    def note_replay(self) -> None:
        self._note_point()

    @contextlib.contextmanager
    @override
    def _exchange(self) -> Iterator[None]:
        self._asking_since = time.monotonic()
        try:
            with super()._exchange():
                yield
        finally:
            self._asking_since = None

    @override
    def _connect(self, store: FileStore, shard: Shard, limit: datetime.timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        with _without_watchdog():
            group = dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
        group.eager_connect_single_device(torch.device("cuda", 0))
        return group

    @override
    def _received(self, part: torch.Tensor) -> torch.Tensor:
        """See `GroupCommunicator._received`; new memory, so that captured steps have their own."""
        return part.new_empty(part.nbytes * self._shard.size, dtype=torch.uint8)

    @override
    def _finish(self, work: Any) -> None:
        if not is_capturing():
            self._note_point()

    def _note_point(self) -> None:
        if self._pending is not None:
            self._pending.append((time.monotonic(), DevicePoint()))


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Have torch make process groups that it does not watch.

    Its watchdog would end the process after a failure, the caller's own perhaps, and sees no exchange that is
    part of a CUDA graph. The option's name is about calls of `wait`, of which there are none here.
    """
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(BLOCKING_WAIT, None)
        else:
            os.environ[BLOCKING_WAIT] = before


def _run(thread: threading.Thread) -> None:
    """Start a thread, or do its work where none can be started any more: while the interpreter ends."""
    try:
        thread.start()
    except RuntimeError:
        thread.run()


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        logger.warning("NCCL cannot be aborted: %s", error)


def _close(aborting: threading.Thread, group: list[Any], file: int) -> None:
    """Release a group that is being aborted, and then the file of its store, which opens it at its end."""
    if aborting.ident is not None:  # else it has been done without the thread
        aborting.join()
    group.clear()
    os.close(file)
