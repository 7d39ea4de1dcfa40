"""The messages of a connection for pushes; `protocol.py` says how they are framed.

The PROMPT sends the data over the link's transport. A MIX that has linked to another is the PROMPT of its own
pushes, whose data is sent between the messages, as a share of the TCP transport.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.datadist.wire.protocol import (
    MAX_BLOCK_RUNS,
    RUN_BYTES,
    U32,
    U64,
    BlocksSource,
    LayerRange,
    Message,
    NumberedBlocksSource,
    Size,
    SlotSource,
    Text,
)


class AddressedTarget(msgspec.Struct, array_like=True, tag=True):
    """Tensors of one registered cache, by their owner's addresses: a part of a slot, or blocks.

    Addresses are only compared with those of the cache.
    """

    addresses: Annotated[list[U64], msgspec.Meta(min_length=1, max_length=1 << 16)]
    block_bytes: Size
    runs: Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCK_RUNS * RUN_BYTES)]


class PushesReady(Message):
    """PROMPT: pushes may follow on this connection, which the DECODER has opened."""


class PushRequest(Message):
    """PROMPT: push. `num_bytes` applies to each tensor, from the start of a slot, or in blocks."""

    transfer_id: U64
    target: SlotSource | BlocksSource | NumberedBlocksSource | AddressedTarget
    data_type: U32
    num_tensors: U32
    layers: LayerRange | None
    num_bytes: Size
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PushAccepted(Message):
    """DECODER: ready for the data on the transport."""

    transfer_id: U64


class PushRefused(Message):
    """DECODER: refused; the link stays usable."""

    transfer_id: U64
    status_code: U32
    reason: Text


class PushCompleted(Message):
    """DECODER: the data has arrived completely."""

    transfer_id: U64


FromPushSender = PushesReady | PushRequest
FromPushReceiver = PushAccepted | PushRefused | PushCompleted
