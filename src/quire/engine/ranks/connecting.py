"""The communicator of the device that ranks compute on: NCCL's on GPUs, gloo's on the host."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from typing_extensions import override

from quire.engine.ranks.process_group import GroupCommunicator
from quire.models.shard import Shard


class GlooCommunicator(GroupCommunicator):
    """Exchanges tensors of the host over the loopback interface; see `GroupCommunicator`.

    A call, too, raises after `timeout` seconds if a rank does not take part.
    """

    def __init__(self, shard: Shard, rendezvous: int, *, timeout: float) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        super().__init__(shard, rendezvous, timeout=timeout)

    @override
    def note_replay(self) -> None:
        """Do nothing: who asks gloo for an exchange waits for it."""

    @override
    def _connect(self, store: FileStore, shard: Shard, limit: datetime.timedelta) -> Any:
        group: Any = dist.ProcessGroupGloo  # torch's stubs lack most of it
        options = group._Options()
        options._timeout = limit
        options._devices = [group.create_device(hostname="127.0.0.1")]
        return group(store, shard.rank, shard.size, options)

    @override
    def _received(self, part: torch.Tensor) -> torch.Tensor:
        """See `GroupCommunicator._received`; the next call returns the same memory."""
        num_bytes = part.nbytes * self._shard.size
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes]

    @override
    def _finish(self, work: Any) -> None:
        work.wait()


def communicator_on(
    device: torch.device, shard: Shard, rendezvous: int, *, timeout: float
) -> GroupCommunicator:
    """Connect this rank with the others: by NCCL on GPUs, by gloo on the host. See `GroupCommunicator`."""
    if device.type == "cuda":
        from quire.engine.ranks.nccl import NcclCommunicator

        return NcclCommunicator(shard, rendezvous, timeout=timeout)
    return GlooCommunicator(shard, rendezvous, timeout=timeout)
