"""The communicator of the device that ranks compute on."""

from __future__ import annotations

import torch

from quire.engine.ranks.process_group import GroupCommunicator
from quire.models.shard import Shard


def communicator_on(
    device: torch.device, shard: Shard, rendezvous: int, *, timeout: float
) -> GroupCommunicator:
    """Connect this rank with the others: by NCCL on GPUs, by gloo on the host. See `GroupCommunicator`."""
    if device.type == "cuda":
        from quire.engine.ranks.nccl import NcclCommunicator

        return NcclCommunicator(shard, rendezvous, timeout=timeout)
    from quire.engine.ranks.gloo import GlooCommunicator

    return GlooCommunicator(shard, rendezvous, timeout=timeout)
