"""The messages of a link's control connection, and their framing.

A frame is a length (4 bytes, little-endian) and a msgpack message. Lengths and fields are bounded before
memory is taken for them. The version is that of `handshake.PROTOCOL_VERSION`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Generic, TypeVar

import msgspec
import numpy as np

from quire.datadist.caches.spans import Int64Array
from quire.datadist.wire import sockets

MAX_FRAME_BYTES = 4 << 20
MAX_BLOCK_RUNS = 128 << 10  # per request: half of a frame
MAX_LOAN_NAMES = 4096  # per message
MAX_PREFIX_BLOCKS = 64 << 10  # per request: a quarter of a frame
DIGEST_BYTES = 16
FRAME_LIMIT = 10.0  # maximum seconds from the start to the end of a frame

BYTE_ORDER = sys.byteorder
"""Must be equal on both ends; the rest of the layout is part of each request."""

NO_IDENTITY: Mapping[str, str] = {}
"""Identity of KV that neither side describes."""

_LENGTH = struct.Struct("<I")
RUN_BYTES = 16

T = TypeVar("T")
M = TypeVar("M")

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no greater integers
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Parameters = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
Identity = Annotated[dict[Text, Text], msgspec.Meta(max_length=16)]
LoanName = Annotated[str, msgspec.Meta(max_length=128)]
Digests = Annotated[bytes, msgspec.Meta(max_length=MAX_PREFIX_BLOCKS * DIGEST_BYTES)]
LoanNames = Annotated[list[LoanName], msgspec.Meta(max_length=MAX_LOAN_NAMES)]


class ProtocolError(ConnectionError):
    """The peer violated the protocol."""


class LinkDroppedError(ConnectionError):
    """The peer has announced that it drops the link."""


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """A top-level message, tagged with its kind."""


class TransportOffer(msgspec.Struct, array_like=True):
    """A transport of one end, and its parameters for the other end."""

    name: Text
    parameters: Parameters


class LinkRequest(Message):
    """DECODER: request for a link. `identity` describes the KV and must be equal on both sides.

    `block_size` is the size of this side's blocks in tokens, if it reads lent ones; 0: it does not.
    """

    prompt_cluster_id: U64
    decoder_cluster_id: U64
    byte_order: Text
    identity: Identity
    use_checksum: bool
    transports: Annotated[list[TransportOffer], msgspec.Meta(max_length=16)]
    block_size: U32


class LinkOffer(Message):
    """PROMPT: offer of a link. After `OfferDeclined`, it offers another transport, or drops the link.

    `epoch` is random for each start of the PROMPT; references from another epoch are void. `block_size` is
    the size of lent blocks in tokens; 0: it lends none. `takes_pushes`: it is MIX, and accepts pushes.
    """

    epoch: U64
    link_id: U64
    use_checksum: bool
    transport: TransportOffer
    block_size: U32
    takes_pushes: bool


class OfferAccepted(Message):
    """DECODER: its end of the transport is set up."""


class OfferDeclined(Message):
    """DECODER: its end of this transport cannot be set up."""

    reason: Text


class LinkEstablished(Message):
    """PROMPT: pulls may begin."""


class LinkDropped(Message):
    """PROMPT: the link is refused, or has ended."""

    reason: Text


class Unlink(Message):
    """DECODER: drop the link."""


class Unlinked(Message):
    """PROMPT: the link is dropped."""


class CheckLink(Message):
    """DECODER: liveness check."""


class LinkChecked(Message):
    """PROMPT: answer to `CheckLink`."""


class KeySource(msgspec.Struct, array_like=True, tag=True):
    """The slot of a request key or prefix key."""

    req_id: U64
    model_id: U64
    prefix_id: U64


class SlotSource(msgspec.Struct, array_like=True, tag=True):
    """A slot by the cache's id."""

    cache_id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    batch_index: U32


class BlocksSource(msgspec.Struct, array_like=True, tag=True):
    """Blocks of a model's blocks cache: runs of adjacent ones, first and count of each as 64-bit integers."""

    model_id: U64
    block_bytes: Size
    runs: Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCK_RUNS * RUN_BYTES)]


class NumberedBlocksSource(msgspec.Struct, array_like=True, tag=True):
    """Blocks of a blocks cache by the cache's id, as in `BlocksSource`."""

    cache_id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    block_bytes: Size
    runs: Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCK_RUNS * RUN_BYTES)]


class LayerRange(msgspec.Struct, array_like=True):
    """Which layers of the source are pulled."""

    start: Size
    stop: Size
    tensors_per_layer: Size


class PullRequest(Message):
    """DECODER: pull. `num_bytes` and `offset` apply to each tensor; blocks have no offset."""

    transfer_id: U64
    epoch: U64
    source: KeySource | SlotSource | BlocksSource | NumberedBlocksSource
    data_type: U32
    num_tensors: U32
    layers: LayerRange | None
    offset: Size
    num_bytes: Size
    consume: bool
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class LoanRequest(Message):
    """DECODER: send a loan from `first_block` on, as its blocks become ready, see `Loans.open`."""

    transfer_id: U64
    epoch: U64
    loan: LoanName
    first_block: U32
    num_blocks: U32
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    patience_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)]
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PrefixQuery(Message):
    """DECODER: asks how many leading blocks are cached. Requires an answer.

    `digests` are the concatenated digests of their contents.
    """

    digests: Digests


class PrefixFound(Message):
    """PROMPT: the number of blocks found."""

    num_blocks: U32


class PrefixRequest(Message):
    """DECODER: send these cached blocks, all or none, see `PrefixQuery`."""

    transfer_id: U64
    epoch: U64
    digests: Digests
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PartReady(Message):
    """PROMPT: a part of these blocks follows on the transport, see `BlockPart`."""

    transfer_id: U64
    first_block: U32
    num_blocks: U32
    offset: Size
    num_bytes: Size


class PartTaken(Message):
    """DECODER: the part has arrived; the next may follow."""

    transfer_id: U64


class LoanNews(Message):
    """DECODER: renews some loans, and releases others. Requires an answer."""

    renewed: LoanNames
    released: LoanNames


class LoanReport(Message):
    """PROMPT: which of the renewed loans do not exist, and which are ready."""

    ended: LoanNames
    ready: LoanNames


class PullAccepted(Message):
    """PROMPT: the data follows on the transport."""

    transfer_id: U64


class PullRefused(Message):
    """PROMPT: no data follows, or received data must not be used; the link stays usable."""

    transfer_id: U64
    status_code: U32
    reason: Text


class PullCompleted(Message):
    """DECODER: the data has arrived completely."""

    transfer_id: U64


class PullConfirmed(Message):
    """PROMPT: the source is released, and its key if it was consumed."""

    transfer_id: U64


FromDecoder = (
    LinkRequest
    | OfferAccepted
    | OfferDeclined
    | PullRequest
    | LoanRequest
    | PrefixQuery
    | PrefixRequest
    | PartTaken
    | PullCompleted
    | LoanNews
    | CheckLink
    | Unlink
)
FromPrompt = (
    LinkOffer
    | LinkEstablished
    | LinkDropped
    | PullAccepted
    | PullRefused
    | PartReady
    | PullConfirmed
    | LoanReport
    | PrefixFound
    | LinkChecked
    | Unlinked
)

_encoder = msgspec.msgpack.Encoder()
_from_decoder = msgspec.msgpack.Decoder(FromDecoder)
_from_prompt = msgspec.msgpack.Decoder(FromPrompt)


def encode_runs(starts: Int64Array, counts: Int64Array) -> bytes:
    """Encode runs of blocks for `BlocksSource`."""
    return np.stack([starts, counts], axis=1).astype("<i8").tobytes()


def decode_runs(data: bytes) -> tuple[Int64Array, Int64Array]:
    """Return starts and counts of runs of blocks.

    Raises:
        ProtocolError: they are none.
    """
    if not data or len(data) % RUN_BYTES:
        raise ProtocolError(f"runs of blocks have {len(data)} bytes")
    pairs = np.frombuffer(data, dtype="<i8").reshape(-1, 2).astype(np.int64)
    return pairs[:, 0], pairs[:, 1]


def decode_digests(data: bytes) -> list[bytes]:
    """Return the digests of a `PrefixQuery` or `PrefixRequest`.

    Raises:
        ProtocolError: they are none.
    """
    if len(data) % DIGEST_BYTES:
        raise ProtocolError(f"digests of blocks have {len(data)} bytes")
    return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]


class ControlChannel(Generic[T]):
    """One end of a connection for messages. One thread uses it; others may `send_last` and `shut_down`."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._connection = connection
        self._decoder = decoder
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct, deadline: float) -> None:
        """Send a message; raises like `sockets.send`."""
        with self._sending:
            sockets.send(self._connection, _frame(message), deadline)

    def send_last(self, message: msgspec.Struct) -> None:
        """Send a message if that does not block, and shut the connection down."""
        if self._sending.acquire(blocking=False):
            with contextlib.suppress(OSError):  # the peer will notice the end of the connection
                self._connection.send(b"".join(_frame(message)))
            self._sending.release()
        self.shut_down()

    def receive(self, deadline: float) -> T:
        """Return the next message.

        Raises:
            ProtocolError: it is not a valid message.
            LinkDroppedError: the peer has dropped the link.
            OSError: none arrived in time, or the connection has ended.
        """
        (length,) = _LENGTH.unpack(sockets.receive(self._connection, _LENGTH.size, deadline))
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a message has {length} bytes, more than {MAX_FRAME_BYTES}")
        data = sockets.receive(self._connection, length, deadline)
        try:
            message = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a message is malformed: {error}") from error
        if isinstance(message, LinkDropped):
            raise LinkDroppedError(message.reason)
        return message

    def expect(self, kind: type[M], deadline: float) -> M:
        """Return the next message; raises like `receive`, also if it is of another kind."""
        return expected(kind, self.receive(deadline))

    def receive_when_it_comes(self) -> T:
        """Return the next message, waiting without limit for its start; raises like `receive`."""
        sockets.wait_until_readable(self._connection)
        return self.receive(time.monotonic() + FRAME_LIMIT)

    def has_something(self, seconds: float = 0.0) -> bool:
        """Return whether a message has started or the connection has ended, waiting at most `seconds`."""
        return sockets.is_readable(self._connection, seconds)

    def shut_down(self) -> None:
        """End all waits on this channel."""
        sockets.shut_down(self._connection)

    def close(self) -> None:
        """Close the descriptor; the channel must not be used afterwards."""
        self._connection.close()


def decoder_channel(connection: socket.socket) -> ControlChannel[FromPrompt]:
    """Return the DECODER's end."""
    return ControlChannel(connection, _from_prompt)


def prompt_channel(connection: socket.socket) -> ControlChannel[FromDecoder]:
    """Return the PROMPT's end."""
    return ControlChannel(connection, _from_decoder)


def expected(kind: type[M], message: object) -> M:
    """Return a message if it is of a kind, else raise `ProtocolError`."""
    if not isinstance(message, kind):
        raise ProtocolError(f"the peer sent {type(message).__name__} instead of {kind.__name__}")
    return message


def require_transfer(transfer_id: int, expected_id: int) -> None:
    """Raise `ProtocolError` if a message of the peer is about another transfer."""
    if transfer_id != expected_id:
        raise ProtocolError(f"the peer names transfer {transfer_id}, not {expected_id}")


def _frame(message: msgspec.Struct) -> tuple[bytes, bytes]:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)), data
