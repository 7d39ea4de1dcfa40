"""The base of communicators: a process group of torch, and the bytes that it moves."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, FileStore
from typing_extensions import override

from quire.errors import ExchangeError
from quire.models.parallel import Communicator
from quire.models.shard import Shard


class GroupCommunicator(Communicator):
    """Exchanges bytes through a process group of its own, which is independent of torch's default one.

    Args:
        shard: this rank.
        rendezvous: descriptor of a file that no group has used before, through which the ranks find each
            other. It may be closed afterwards.
        timeout: seconds after which this constructor raises if a rank does not take part.

    Raises:
        ExchangeError: a rank does not take part.
    """

    def __init__(self, shard: Shard, rendezvous: int, *, timeout: float) -> None:
        self._file = os.dup(rendezvous)
        self._owner = os.getpid()
        self._group: Any = None
        self._shard = shard
        self._to_all = _in_order(AllgatherOptions())
        self._to_rank_0 = _in_order(dist.GatherOptions())
        self._from_rank_0 = _in_order(dist.BroadcastOptions())
        store = FileStore(f"/proc/self/fd/{self._file}", shard.size)
        limit = datetime.timedelta(seconds=timeout)
        try:
            store.set_timeout(limit)
            with self._exchange():
                self._group = self._connect(store, shard, limit)
        finally:
            del store  # else the traceback would keep it

    def __del__(self) -> None:
        """Close the file after the group has ended, whose store opens it once more at its end."""
        if os.getpid() != self._owner:
            _keep_for_ever(self._group)
        self._group = None
        os.close(self._file)

    @override
    def all_gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        received = self._received(part)
        with self._exchange():
            self._finish(self._group._allgather_base(received, _bytes(part), self._to_all))
        return received.view(part.dtype).view(self._shard.size, *part.shape).unbind()

    @override
    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        is_target = self._shard.rank == 0
        received = [list(self._received(part).chunk(self._shard.size))] if is_target else []
        with self._exchange():
            self._finish(self._group.gather(received, [_bytes(part)], self._to_rank_0))
        return [each.view(part.dtype).view(part.shape) for each in received[0]] if is_target else []

    @override
    def broadcast(self, tensor: torch.Tensor) -> None:
        with self._exchange():
            self._finish(self._group.broadcast([tensor.view(-1).view(torch.uint8)], self._from_rank_0))

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Raise `ExchangeError` where what is done within fails."""
        try:
            yield
        except RuntimeError as error:  # torch has one class for all
            raise ExchangeError(str(error)) from error

    @abstractmethod
    def _connect(self, store: FileStore, shard: Shard, limit: datetime.timedelta) -> Any:
        """Return a process group of ranks that meet at `store`."""

    @abstractmethod
    def _received(self, part: torch.Tensor) -> torch.Tensor:
        """Return bytes to receive all ranks' parts into, one after the other."""

    @abstractmethod
    def _finish(self, work: Any) -> None:
        """Do what remains to be done after an exchange was begun."""


def _in_order(options: Any) -> Any:
    """Have an exchange take place in the order of what else the device is asked for; the root is rank 0."""
    options.asyncOp = False
    return options


def _keep_for_ever(group: Any) -> None:
    """Let a group never end: in a fork, which has none of its threads, it would wait for them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(-1).view(torch.uint8)
