"""Ranks on one machine that exchange tensors with gloo, over the loopback interface."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from typing_extensions import override

from quire.errors import ExchangeError
from quire.models.parallel import Communicator
from quire.models.shard import Shard


class GlooCommunicator(Communicator):
    """A process group of its own, which is independent of torch's default one. See `Communicator`.

    Args:
        shard: this rank.
        rendezvous: descriptor of a file that no group has used before, through which the ranks find each
            other. It may be closed afterwards.
        timeout: seconds after which a call raises if a rank does not take part; so does this constructor.

    Raises:
        ExchangeError: a rank does not take part.
    """

    def __init__(self, shard: Shard, rendezvous: int, *, timeout: float) -> None:
        self._file = os.dup(rendezvous)
        self._group: Any = None
        group: Any = dist.ProcessGroupGloo  # torch's stubs lack most of it
        limit = datetime.timedelta(seconds=timeout)
        options = group._Options()
        options._timeout = limit
        options._devices = [group.create_device(hostname="127.0.0.1")]
        store = FileStore(f"/proc/self/fd/{self._file}", shard.size)
        try:
            store.set_timeout(limit)
            with _exchange():
                self._group = group(store, shard.rank, shard.size, options)
        finally:
            del store  # else the traceback would keep it
        self._shard = shard
        self._to_rank_0 = dist.GatherOptions()
        self._to_rank_0.rootRank = 0
        self._received = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        """Close the file after the group has ended, whose store opens it once more at its end."""
        self._group = None
        os.close(self._file)

    @override
    def all_gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        received = self._buffers(part)
        with _exchange():
            self._group.allgather([received], [_bytes(part)]).wait()
        return [each.view(part.dtype).view(part.shape) for each in received]

    @override
    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        received = self._buffers(part) if self._shard.rank == 0 else []
        with _exchange():
            self._group.gather([received] if received else [], [_bytes(part)], self._to_rank_0).wait()
        return [each.view(part.dtype).view(part.shape) for each in received]

    def _buffers(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return bytes to receive each rank's part into; the next call returns the same memory."""
        size = self._shard.size
        if len(self._received) < part.nbytes * size:
            self._received = torch.empty(part.nbytes * size, dtype=torch.uint8)
        return list(self._received[: part.nbytes * size].view(size, part.nbytes))


@contextlib.contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch has one class for all
        raise ExchangeError(str(error)) from error


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(-1).view(torch.uint8)
