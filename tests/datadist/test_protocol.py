from __future__ import annotations

import contextlib
import socket
import struct
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.datadist.wire import protocol, sockets
from quire.datadist.wire.protocol import (
    MAX_FRAME_BYTES,
    BlocksSource,
    CheckLink,
    ControlChannel,
    KeySource,
    LayerRange,
    LinkChecked,
    LinkDropped,
    LinkDroppedError,
    LinkEstablished,
    LinkOffer,
    LinkRequest,
    LoanNews,
    LoanReport,
    LoanRequest,
    NumberedBlocksSource,
    OfferAccepted,
    OfferDeclined,
    PartReady,
    PartTaken,
    PrefixFound,
    PrefixQuery,
    PrefixRequest,
    ProtocolError,
    PullAccepted,
    PullCompleted,
    PullConfirmed,
    PullRefused,
    PullRequest,
    SlotSource,
    TransportOffer,
    Unlink,
    Unlinked,
    decode_runs,
    decoder_channel,
    encode_runs,
    prompt_channel,
)
from quire.datadist.wire.push_protocol import (
    AddressedTarget,
    FromPushReceiver,
    FromPushSender,
    PushAccepted,
    PushCompleted,
    PushesReady,
    PushRefused,
    PushRequest,
)

u64 = st.integers(0, 2**64 - 1)
size = st.integers(0, 2**63 - 1)
offers = st.builds(TransportOffer, st.text(max_size=8), st.binary(max_size=20))
sources = (
    st.builds(KeySource, u64, u64, u64)
    | st.builds(SlotSource, st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1))
    | st.builds(BlocksSource, u64, size, st.binary(max_size=64))
    | st.builds(NumberedBlocksSource, size, size, st.binary(max_size=64))
)
requests = st.builds(
    PullRequest,
    transfer_id=u64,
    epoch=u64,
    source=sources,
    data_type=st.integers(0, 2**32 - 1),
    num_tensors=st.integers(0, 2**32 - 1),
    layers=st.none() | st.builds(LayerRange, size, size, size),
    offset=size,
    num_bytes=size,
    consume=st.booleans(),
    timeout_ms=st.integers(0, 2**31 - 1),
)
u32 = st.integers(0, 2**32 - 1)
link_requests = st.builds(
    LinkRequest,
    u64,
    u64,
    st.text(max_size=6),
    st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=3),
    st.booleans(),
    st.lists(offers, max_size=3),
    u32,
)
names = st.lists(st.text(max_size=8), max_size=3)
loan_messages = (
    st.builds(
        LoanRequest,
        u64,
        u64,
        st.text(max_size=8),
        u32,
        u32,
        st.binary(max_size=16),
        st.integers(0, 60_000),
        st.integers(0, 2**31 - 1),
    )
    | st.builds(LoanNews, names, names)
    | st.builds(PartTaken, u64)
    | st.builds(PrefixQuery, st.binary(max_size=64))
    | st.builds(PrefixRequest, u64, u64, st.binary(max_size=64), st.integers(0, 2**31 - 1))
)
from_decoder = requests | link_requests | st.builds(PullCompleted, u64) | st.just(Unlink())
from_decoder |= (
    loan_messages
    | st.sampled_from([OfferAccepted(), CheckLink()])
    | st.builds(OfferDeclined, st.text(max_size=30))
)
from_prompt = (
    st.builds(LinkOffer, u64, u64, st.booleans(), offers, u32, st.booleans())
    | st.builds(PullAccepted, u64)
    | st.builds(PullRefused, u64, st.integers(0, 255), st.text(max_size=30))
    | st.builds(PullConfirmed, u64)
    | st.builds(PartReady, u64, u32, u32, size, size)
    | st.builds(LoanReport, names, names)
    | st.builds(PrefixFound, u32)
    | st.sampled_from([LinkEstablished(), LinkChecked(), Unlinked()])
)


push_requests = st.builds(
    PushRequest,
    transfer_id=u64,
    target=sources.filter(lambda one: not isinstance(one, KeySource))
    | st.builds(AddressedTarget, st.lists(u64, min_size=1, max_size=3), size, st.binary(max_size=64)),
    data_type=st.integers(0, 2**32 - 1),
    num_tensors=st.integers(0, 2**32 - 1),
    layers=st.none() | st.builds(LayerRange, size, size, size),
    num_bytes=size,
    timeout_ms=st.integers(0, 2**31 - 1),
)
from_push_receiver = (
    st.builds(PushAccepted, u64)
    | st.builds(PushRefused, u64, st.integers(0, 255), st.text(max_size=30))
    | st.builds(PushCompleted, u64)
)


@contextlib.contextmanager
def connected():
    ends = socket.socketpair()
    try:
        for end in ends:
            end.setblocking(False)
        yield ends
    finally:
        for end in ends:
            end.close()


def soon() -> float:
    return time.monotonic() + 20


def received(data: bytes, channel=prompt_channel):
    """What a channel makes of bytes after which the peer is gone."""
    with connected() as (mine, theirs):
        sockets.send(theirs, [data], soon())
        theirs.shutdown(socket.SHUT_WR)
        return channel(mine).receive(soon())


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


@settings(max_examples=40)
@given(message=from_decoder)
def test_what_a_decoder_sends_is_received(message):
    assert received(framed(msgspec.msgpack.encode(message))) == message
    with connected() as (mine, theirs):
        decoder_channel(theirs).send(message, soon())
        assert prompt_channel(mine).receive(soon()) == message


@given(message=from_prompt)
def test_what_a_prompt_sends_is_received(message):
    with connected() as (mine, theirs):
        prompt_channel(theirs).send(message, soon())
        assert decoder_channel(mine).expect(type(message), soon()) == message


@given(data=st.binary(max_size=200), has_length=st.booleans())
def test_garbage_is_an_error_of_the_connection(data, has_length):
    """Whatever comes, a link's thread sees a `ConnectionError`, and never a message that was not sent."""
    for channel in (prompt_channel, decoder_channel):
        with contextlib.suppress(ConnectionError):
            message = received(framed(data) if has_length else data, channel)
            assert isinstance(message, msgspec.Struct)  # the garbage was none


@given(message=from_decoder | from_prompt, data=st.data())
def test_damaged_messages_are_errors_or_well_formed(message, data):
    encoded = bytearray(msgspec.msgpack.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    for channel in (prompt_channel, decoder_channel):
        with contextlib.suppress(ConnectionError):
            again = received(framed(bytes(encoded)), channel)
            msgspec.convert(msgspec.to_builtins(again), type(again))  # within its bounds


@pytest.mark.parametrize(
    "message",
    [
        ["PullCompleted", -1],
        ["PullCompleted", 2**64 - 1, 0],
        ["PullCompleted", "1"],
        ["PullCompleted", 1.0],
        ["PullCompleted"],
        ["LinkOffer", 1, 1, True, ["tcp", b""]],
        ["LinkRequest", 1, 1, "little", True, [["tcp", b""]] * 17],
        ["LinkRequest", 1, 1, "x" * 1025, True, []],
        ["LinkRequest", 1, 1, "little", True, [["tcp", bytes(65_537)]]],
        ["Nothing"],
        [],
        {},
        None,
        "Unlink",
    ],
)
def test_messages_beyond_the_bounds_are_refused(message):
    with pytest.raises(ProtocolError):
        received(framed(msgspec.msgpack.encode(message)))


def test_deeply_nested_messages_are_refused():
    with pytest.raises(ProtocolError):
        received(framed(b"\x91" * 50_000))


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_no_memory_is_taken_for_a_message_that_is_too_long(length, monkeypatch):
    taken = []
    receive = sockets.receive

    def noting_receive(connection, num_bytes, deadline):
        taken.append(num_bytes)
        return receive(connection, num_bytes, deadline)

    monkeypatch.setattr(sockets, "receive", noting_receive)
    with pytest.raises(ProtocolError, match=str(length)):
        received(struct.pack("<I", length) + b"x" * 10)
    assert taken == [4]


def test_a_message_that_stops_in_the_middle_does_not_wait_for_ever():
    with connected() as (mine, theirs):
        theirs.send(framed(b"x" * 10)[:-1])
        with pytest.raises(TimeoutError):
            prompt_channel(mine).receive(time.monotonic() + 0.01)


def test_a_message_that_has_begun_has_a_limit_though_none_was_set(monkeypatch):
    monkeypatch.setattr(protocol, "FRAME_LIMIT", 0.01)
    with connected() as (mine, theirs):
        theirs.send(b"\0")
        with pytest.raises(TimeoutError):
            prompt_channel(mine).receive_when_it_comes()


def test_a_dropped_link_says_why():
    with connected() as (mine, theirs):
        ControlChannel(theirs, None).send_last(LinkDropped("it was time"))
        channel = decoder_channel(mine)
        assert channel.has_something()
        with pytest.raises(LinkDroppedError, match="it was time"):
            channel.expect(PullAccepted, soon())
        with pytest.raises(sockets.PeerClosedError):
            channel.receive(soon())


def test_another_message_than_the_expected_one_is_an_error():
    with connected() as (mine, theirs):
        prompt_channel(theirs).send(PullAccepted(1), soon())
        with pytest.raises(ProtocolError, match="PullAccepted instead of PullConfirmed"):
            decoder_channel(mine).expect(PullConfirmed, soon())


def test_the_last_message_waits_for_nobody():
    with connected() as (mine, theirs):
        with contextlib.suppress(BlockingIOError):
            while True:
                theirs.send(bytes(1 << 16))
        prompt_channel(theirs).send_last(LinkDropped("full"))
        assert sockets.is_readable(mine)


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(1, 2**62)), min_size=1, max_size=9))
def test_runs_are_decoded_as_they_were_encoded(pairs):
    starts, counts = np.array(pairs, dtype=np.int64).T
    again = decode_runs(encode_runs(starts, counts))
    assert np.array_equal(again[0], starts)
    assert np.array_equal(again[1], counts)


@pytest.mark.parametrize("data", [b"", b"x" * 8, b"x" * 17])
def test_runs_of_another_length_are_refused(data):
    with pytest.raises(ProtocolError):
        decode_runs(data)


@settings(max_examples=40)
@given(sent=push_requests | st.just(PushesReady()), answer=from_push_receiver)
def test_messages_of_pushes_arrive_as_they_were(sent, answer):
    for message, kinds in ((sent, FromPushSender), (answer, FromPushReceiver)):
        with connected() as (mine, theirs):
            channels = [ControlChannel(one, msgspec.msgpack.Decoder(kinds)) for one in (mine, theirs)]
            channels[0].send(message, soon())
            assert channels[1].receive(soon()) == message
