"""The data plane of two processes on one host: the DECODER reads the PROMPT's caches in place.

A link has another connection, over a Unix socket. For each transfer, the PROMPT sends a message (which bytes
of which file) and a descriptor of the file. The DECODER maps the file, copies, and then checks that the
connection is still open: the PROMPT shuts it down before it releases the source of an abandoned transfer. So
bytes that changed during the copy are never used.

A source outside shared memory, such as on a device, is sent on the connection itself.
"""

from __future__ import annotations

import collections
import functools
import os
import socket
import threading
from typing import Annotated

import msgspec
import numpy as np
from typing_extensions import override

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.shared_host_memory import MappedMemory, SharedHostMemory
from quire.datadist.caches.spans import ByteSpans, common_pieces
from quire.datadist.transports import unix_sockets
from quire.datadist.transports.interface import DestinationEnd, LinkTerms, SourceEnd, Transport
from quire.datadist.transports.source_spans import EncodedSpans, decode_source_spans
from quire.datadist.wire import sockets
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting
from quire.datadist.wire.protocol import (
    U64,
    ControlChannel,
    ProtocolError,
    Size,
    encode_runs,
    require_transfer,
)

PART_BYTES = 8 << 20  # copied at a time; the end of the link is noticed in between
MAX_PIECE_BYTES = 64 << 20  # from about 40 MiB, memcpy writes without reading
MIN_THREAD_BYTES = 16 << 20  # below that, a second thread costs more than it saves
MIN_THREAD_PIECE_BYTES = 256 << 10  # mean; with smaller pieces, two threads mostly wait for the GIL
MAX_MAPPED = 4  # files per link that stay mapped, and so are not freed

_BACKLOG = 64
_MAX_TENSORS = 1 << 16


class FileSpans(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """The source of a transfer: the same spans of each tensor, in the file whose descriptor follows."""

    transfer_id: U64
    tensor_offsets: Annotated[list[Size], msgspec.Meta(max_length=_MAX_TENSORS)]
    tensor_bytes: Size
    spans: EncodedSpans


class Streamed(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """All bytes of the source follow on the connection."""

    transfer_id: U64


_from_prompt = msgspec.msgpack.Decoder(FileSpans | Streamed)
_from_decoder = msgspec.msgpack.Decoder(None)  # nothing is received


class SharedMemoryTransport(Transport):
    """Transport by shared memory.

    Args:
        listens: whether DECODERs connect to this side.

    Raises:
        OSError: it cannot listen.
    """

    name = "shared_memory"

    def __init__(self, *, listens: bool) -> None:
        self.listener = unix_sockets.listen(_BACKLOG) if listens else None

    @property
    @override
    def parameters(self) -> bytes:
        return b""

    @override
    def open_source(self, peer: bytes, *, use_checksum: bool) -> SharedMemorySourceEnd:
        assert self.listener is not None
        return SharedMemorySourceEnd(self.listener.getsockname())

    @override
    def open_destination(self, terms: LinkTerms, peer: bytes, deadline: float) -> SharedMemoryDestinationEnd:
        if not peer.startswith(b"\0"):
            raise ValueError("the peer's address is not an abstract socket name")
        connection = unix_sockets.connect(peer, deadline)
        try:
            unix_sockets.require_same_user(connection)
            greet(connection, terms.key, new_greeting(ConnectionKind.STREAM, 0, terms.link_id), deadline)
        except BaseException:
            connection.close()
            raise
        return SharedMemoryDestinationEnd(connection)

    @override
    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()


class SharedMemorySourceEnd(SourceEnd):
    """The PROMPT's end: announces the source."""

    def __init__(self, address: bytes) -> None:
        super().__init__()
        self._address = address

    @property
    @override
    def parameters(self) -> bytes:
        return self._address

    @override
    def _admit(self, connection: socket.socket) -> None:
        unix_sockets.require_same_user(connection)

    @override
    def send(self, transfer_id: int, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        connection = self._connections[0]
        channel = ControlChannel(connection, _from_decoder)
        memory.synchronize()
        if isinstance(memory, SharedHostMemory) and memory.descriptor is not None:
            offsets = [memory.tensor_offsets[tensor] for tensor in spans.tensors]
            tensor_bytes = memory.tensor_bytes[0].numel()
            runs = encode_runs(spans.offsets, spans.lengths)
            channel.send(FileSpans(transfer_id, offsets, tensor_bytes, runs), deadline)
            unix_sockets.send_descriptor(connection, memory.descriptor, deadline)
            return
        channel.send(Streamed(transfer_id), deadline)
        for window in spans.windows(0, spans.num_bytes):
            sockets.send(connection, memory.outgoing(window), deadline)


class SharedMemoryDestinationEnd(DestinationEnd):
    """The DECODER's end: copies the source."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._channel = ControlChannel(connection, _from_prompt)
        self._last_mapped: tuple[int, int] | None = None
        self._mapped: collections.OrderedDict[tuple[int, int], MappedMemory] = collections.OrderedDict()
        self._has_ended = threading.Event()

    @override
    def receive(self, transfer_id: int, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        self._last_mapped = None
        source = self._channel.receive(deadline)
        require_transfer(source.transfer_id, transfer_id)
        if isinstance(source, Streamed):
            self._receive_stream(memory, spans, deadline)
        else:
            self._copy(source, memory, spans, deadline)
        memory.synchronize()
        self._require_held(deadline)

    @override
    def forget_source(self) -> None:
        if self._last_mapped is not None:
            self._mapped.pop(self._last_mapped, None)

    @override
    def shut_down(self) -> None:
        self._has_ended.set()
        self._channel.shut_down()

    @override
    def close(self) -> None:
        self._channel.close()
        self._mapped.clear()

    def _receive_stream(self, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        for window in spans.windows(0, spans.num_bytes):
            views = memory.incoming(window)
            sockets.receive_into(self._connection, views, deadline)
            memory.arrived(window, views)

    def _copy(self, source: FileSpans, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        source_spans = decode_source_spans(
            source.spans, len(source.tensor_offsets), source.tensor_bytes, spans
        )
        descriptor = unix_sockets.receive_descriptor(self._connection, deadline)
        try:
            mapped = self._mapped_file(descriptor)
        finally:
            os.close(descriptor)
        if max(source.tensor_offsets) + source.tensor_bytes > mapped.num_bytes:
            raise ProtocolError(f"the peer names bytes beyond its memory of {mapped.num_bytes} bytes")
        addresses = [mapped.address + offset for offset in source.tensor_offsets]
        _Copy(memory, spans, source_spans, addresses).run(self._has_ended, deadline)

    def _mapped_file(self, descriptor: int) -> MappedMemory:
        """Map a file, or return its mapping; a mapped file's inode number is not reused."""
        status = os.fstat(descriptor)
        number = status.st_dev, status.st_ino
        mapped = self._mapped.pop(number, None)
        if mapped is None:
            mapped = MappedMemory(descriptor)
        self._mapped[number] = mapped
        self._last_mapped = number
        if len(self._mapped) > MAX_MAPPED:
            self._mapped.popitem(last=False)
        return mapped

    def _require_held(self, deadline: float) -> None:
        """Raise unless the PROMPT has held the source until now; it holds it beyond the deadline."""
        sockets.seconds_left(deadline)
        if self._has_ended.is_set() or self._channel.has_something():
            raise ConnectionError("the PROMPT has ended the link while its memory was read")


class _Copy:
    """Copies a transfer, in two threads if it is large and there are two cores.

    Args:
        memory: what is written.
        target: where.
        source: spans of one tensor, as many bytes as `target` has; checked.
        addresses: addresses of the tensors of the source, in this process.
    """

    def __init__(
        self, memory: CacheMemory, target: ByteSpans, source: ByteSpans, addresses: list[int]
    ) -> None:
        self._from, self._to, self._lengths = common_pieces(source, target, MAX_PIECE_BYTES)
        starts = np.cumsum(self._lengths) - self._lengths
        bounds = (np.flatnonzero(np.diff(starts // PART_BYTES)) + 1).tolist()
        slices = [slice(begin, end) for begin, end in zip([0, *bounds], [*bounds, None], strict=True)]
        self._memory = memory
        self._has_two_threads = (
            target.num_bytes >= MIN_THREAD_BYTES
            and self._lengths.mean() >= MIN_THREAD_PIECE_BYTES
            and len(os.sched_getaffinity(0)) > 1
        )
        tensors = zip(target.tensors, addresses, strict=True)
        self._parts = iter([(tensor, address, one) for tensor, address in tensors for one in slices])
        self._errors: list[BaseException] = []

    def run(self, has_ended: threading.Event, deadline: float) -> None:
        """Raise `OSError` at the deadline, and when the event is set."""
        work = functools.partial(self._work, has_ended, deadline)
        thread = threading.Thread(target=work, name="datadist-copy", daemon=True)
        try:
            if self._has_two_threads:
                thread.start()
            work()
        except BaseException as error:  # an interrupt, or a failed thread start
            self._errors.append(error)
        finally:
            if thread.ident is not None:
                thread.join()  # nothing may write to the cache afterwards
        if self._errors:
            raise self._errors[0]

    def _work(self, has_ended: threading.Event, deadline: float) -> None:
        try:
            while not self._errors and (part := next(self._parts, None)) is not None:
                sockets.seconds_left(deadline)
                if has_ended.is_set():
                    raise ConnectionError("the link has been taken down")
                tensor, address, one = part
                sources = (self._from[one] + address).tolist()
                self._memory.copy_in(tensor, self._to[one].tolist(), sources, self._lengths[one].tolist())
        except BaseException as error:
            self._errors.append(error)
