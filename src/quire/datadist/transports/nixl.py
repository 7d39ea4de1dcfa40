"""The data plane over NIXL: the DECODER reads the PROMPT's memory without using the PROMPT's CPU.

A connection of the link carries messages. For each transfer, the PROMPT sends the location of the source
(`ReadSource`), the DECODER reads it and confirms (`SourceRead`), and the PROMPT confirms that the source was
held until then, with its checksum (`SourceHeld`). Without this answer, the data is discarded, as the source
may have been released meanwhile. The PROMPT computes the checksum while the DECODER reads.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Annotated, Literal

import msgspec
import numpy as np
from typing_extensions import override

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans, Int64Array, common_pieces
from quire.datadist.transports.interface import (
    Checksum,
    ChecksumError,
    DestinationEnd,
    LinkTerms,
    SourceEnd,
    Transport,
)
from quire.datadist.transports.nixl_agent import Descriptors, NixlAgent, RegionMetadata, memory_kind
from quire.datadist.transports.source_spans import EncodedSpans, decode_source_spans
from quire.datadist.wire import sockets
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting
from quire.datadist.wire.protocol import (
    U32,
    U64,
    ControlChannel,
    ProtocolError,
    Size,
    encode_runs,
    require_transfer,
)

logger = logging.getLogger(__name__)

READ_BYTES = 16 << 20  # read at a time, while the previous ones are verified
OPEN_LIMIT = 10.0  # seconds for the PROMPT to open its agent
PROGRESS_INTERVAL = 1e-3  # seconds between polls of the PROMPT's agent

_MAX_METADATA_BYTES = 1 << 20
_MAX_TENSORS = 1 << 16
_MAX_ADDRESS = 2**64 - 1


class ReadSource(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """PROMPT: read these spans (first byte, number of bytes), the same in each tensor.

    `region` is never used again for other memory.
    """

    transfer_id: U64
    region: U64
    metadata: Annotated[bytes, msgspec.Meta(max_length=_MAX_METADATA_BYTES)]
    kind: Literal["DRAM", "VRAM"]
    device: U32
    addresses: Annotated[list[U64], msgspec.Meta(max_length=_MAX_TENSORS)]
    tensor_bytes: Size
    spans: EncodedSpans


class SourceRead(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """DECODER: the source has been read."""

    transfer_id: U64


class SourceHeld(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """PROMPT: the source was held until it had been read."""

    transfer_id: U64
    checksum: U64


_from_prompt = msgspec.msgpack.Decoder(ReadSource | SourceHeld)
_from_decoder = msgspec.msgpack.Decoder(SourceRead)

_lost: list[CacheMemory] = []
"""Memory that must not be freed, as a transfer may write to it."""


class NixlTransport(Transport):
    """Transport over NIXL. A PROMPT has one agent; a DECODER has one per link."""

    name = "nixl"

    def __init__(self) -> None:
        self._agent: NixlAgent | None = None
        self._lock = threading.Lock()

    @property
    @override
    def parameters(self) -> bytes:
        return b""

    @override
    def open_source(self, peer: bytes, *, use_checksum: bool) -> NixlSourceEnd:
        if peer:
            raise ValueError(f"the peer has {len(peer)} bytes of parameters, not 0")
        deadline = time.monotonic() + OPEN_LIMIT
        with self._lock:
            if self._agent is None:
                self._agent = NixlAgent(deadline)
        return NixlSourceEnd(self._agent, self._agent.connection(deadline), use_checksum=use_checksum)

    @override
    def open_destination(self, terms: LinkTerms, peer: bytes, deadline: float) -> NixlDestinationEnd:
        agent = NixlAgent(deadline)
        connection: socket.socket | None = None
        try:
            agent.connect(peer, deadline)
            connection = sockets.connect(terms.address, deadline)
            greet(connection, terms.key, new_greeting(ConnectionKind.STREAM, 0, terms.link_id), deadline)
        except BaseException:
            agent.close()
            if connection is not None:
                connection.close()
            raise
        return NixlDestinationEnd(agent, connection, use_checksum=terms.use_checksum)

    @override
    def close(self) -> None:
        with self._lock:
            if self._agent is not None:
                self._agent.close()


class NixlSourceEnd(SourceEnd):
    """The PROMPT's end: announces the source, and holds it until it has been read."""

    def __init__(self, agent: NixlAgent, connection_metadata: bytes, *, use_checksum: bool) -> None:
        super().__init__()
        self._agent = agent
        self._connection_metadata = connection_metadata
        self._use_checksum = use_checksum

    @property
    @override
    def parameters(self) -> bytes:
        return self._connection_metadata

    @override
    def send(self, transfer_id: int, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        channel = ControlChannel(self._connections[0], _from_decoder)
        memory.synchronize()
        region = self._agent.register(memory, deadline)
        kind, device = memory_kind(memory)
        addresses = memory.addresses()
        source = ReadSource(
            transfer_id,
            region.number,
            region.data,
            "DRAM" if kind == "DRAM" else "VRAM",
            device,
            [addresses[tensor] for tensor in spans.tensors],
            memory.tensor_bytes[0].numel(),
            encode_runs(spans.offsets, spans.lengths),
        )
        channel.send(source, deadline)
        checksum = Checksum()
        if self._use_checksum:
            self._extend(checksum, memory, spans, deadline)
        while not channel.has_something(PROGRESS_INTERVAL):
            self._agent.progress(deadline)
            sockets.seconds_left(deadline)
        require_transfer(channel.expect(SourceRead, deadline).transfer_id, transfer_id)
        channel.send(SourceHeld(transfer_id, checksum.value), deadline)

    def _extend(self, checksum: Checksum, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        for window in spans.windows(0, spans.num_bytes):
            self._agent.progress(deadline)
            checksum.extend(memory.outgoing(window))


class NixlDestinationEnd(DestinationEnd):
    """The DECODER's end: reads with its own agent, whose end ends all its reads."""

    def __init__(self, agent: NixlAgent, connection: socket.socket, *, use_checksum: bool) -> None:
        self._agent = agent
        self._channel = ControlChannel(connection, _from_prompt)
        self._use_checksum = use_checksum

    @override
    def receive(self, transfer_id: int, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        source = self._channel.expect(ReadSource, deadline)
        require_transfer(source.transfer_id, transfer_id)
        source_spans = _source_spans(source, spans)
        try:
            checksum = self._read(source, source_spans, memory, spans, deadline)
        except BaseException:
            self._abandon(memory)
            raise
        memory.synchronize()
        self._channel.send(SourceRead(transfer_id), deadline)
        held = self._channel.expect(SourceHeld, deadline)
        require_transfer(held.transfer_id, transfer_id)
        if self._use_checksum and held.checksum != checksum:
            raise ChecksumError(f"{spans.num_bytes} bytes of a transfer have the wrong checksum")

    @override
    def shut_down(self) -> None:
        self._channel.shut_down()
        self._agent.stop()

    @override
    def close(self) -> None:
        self._channel.close()
        self._agent.close()

    def _read(
        self,
        source: ReadSource,
        source_spans: ByteSpans,
        memory: CacheMemory,
        spans: ByteSpans,
        deadline: float,
    ) -> int:
        """Read everything, and return the checksum of the received data, if used."""
        agent = self._agent
        agent.register(memory, deadline)
        kind, device = memory_kind(memory)
        source_offsets, offsets, lengths = common_pieces(source_spans, spans, READ_BYTES)
        all_addresses = memory.addresses()
        addresses = [all_addresses[tensor] for tensor in spans.tensors]
        agent.prepare_read(
            RegionMetadata(source.region, source.metadata),
            (kind, source.kind),
            _descriptors(addresses, offsets, lengths, device),
            _descriptors(source.addresses, source_offsets, lengths, source.device),
            deadline,
        )
        ends = np.cumsum(np.tile(lengths, len(addresses)))
        stops = _groups(ends)
        assert stops[-1] == len(ends)
        checksum, first_byte = Checksum(), 0
        read = agent.start_read(0, stops[0], deadline)
        for stop, next_stop in zip(stops, [*stops[1:], None], strict=True):
            agent.wait(read, deadline)
            if next_stop is not None:
                read = agent.start_read(stop, next_stop, deadline)
            last_byte = int(ends[stop - 1])
            if self._use_checksum:
                for window in spans.windows(first_byte, last_byte):
                    checksum.extend(memory.outgoing(window))
            first_byte = last_byte
        agent.finish_read(deadline)
        return checksum.value

    def _abandon(self, memory: CacheMemory) -> None:
        """Ensure that nothing more is written to a cache."""
        if not self._agent.close():
            memory.is_lost = True
            _lost.append(memory)
            logger.critical("a transfer over NIXL cannot be ended; its cache is of no use until a restart")


def _source_spans(source: ReadSource, target: ByteSpans) -> ByteSpans:
    """Return the PROMPT's spans, checked against the target's."""
    if any(address > _MAX_ADDRESS - source.tensor_bytes for address in source.addresses):
        raise ProtocolError("the peer's source is not within its memory")
    return decode_source_spans(source.spans, len(source.addresses), source.tensor_bytes, target)


def _descriptors(addresses: list[int], offsets: Int64Array, lengths: Int64Array, device: int) -> Descriptors:
    """Return the same pieces of each tensor, tensor by tensor."""
    starts = np.array(addresses, dtype=np.uint64)[:, None] + offsets.astype(np.uint64)
    described = np.empty((starts.size, 3), dtype=np.uint64)
    described[:, 0] = starts.reshape(-1)
    described[:, 1] = np.tile(lengths, len(addresses))
    described[:, 2] = device
    return described


def _groups(ends: Int64Array) -> list[int]:
    """Return the end of each group of pieces to read at a time."""
    bounds = np.arange(READ_BYTES, int(ends[-1]) + READ_BYTES, READ_BYTES)
    stops = np.minimum(np.searchsorted(ends, bounds, side="left") + 1, len(ends))
    return [int(stop) for stop in np.unique(stops)]
