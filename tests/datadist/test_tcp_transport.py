from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time

import numpy as np
import pytest
import torch
import xxhash
from sides import connection_of

from quire.datadist import CacheDesc, DataType
from quire.datadist.caches.memory import DeviceMemory, HostMemory
from quire.datadist.caches.spans import block_spans, runs, slot_spans
from quire.datadist.transports import tcp
from quire.datadist.transports.interface import Checksum, ChecksumError
from quire.datadist.transports.tcp import TcpDestinationEnd, TcpParameters, TcpSourceEnd, TcpTransport, shares
from quire.datadist.wire import sockets


def soon() -> float:
    return time.monotonic() + 60


@contextlib.contextmanager
def ends(num_streams: int = 3, *, use_checksum: bool = True, through=lambda one, other: (one, other)):
    """Both ends of a data plane; `through` may put something between the two ends of each connection."""
    source = TcpSourceEnd(num_streams, use_checksum=use_checksum)
    connections = []
    for stream in range(num_streams):
        pair = through(*socket.socketpair())
        for end in pair:
            end.setblocking(False)
        assert source.attach(stream, pair[0])
        connections.append(pair[1])
    destination = TcpDestinationEnd(connections, use_checksum=use_checksum)
    try:
        yield source, destination
    finally:
        source.close()
        destination.close()


def move(
    source, destination, from_memory, from_spans, to_memory, to_spans, transfer_id=7
) -> list[BaseException]:
    """Move at both ends at a time; return what the source raised."""
    errors = []

    def send():
        try:
            source.send(transfer_id, from_memory, from_spans, soon())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        destination.receive(7, to_memory, to_spans, soon())
    finally:
        thread.join()
    return errors


def filled(desc: CacheDesc, seed: int = 0) -> HostMemory:
    memory = HostMemory(desc)
    for index, one in enumerate(memory.tensor_bytes):
        generator = torch.Generator().manual_seed(seed + index)
        one.copy_(torch.randint(0, 256, one.shape, dtype=torch.uint8, generator=generator))
    return memory


def blocks_of(memory, block_bytes: int) -> np.ndarray:
    return np.stack([one.numpy().reshape(-1, block_bytes) for one in memory.tensor_bytes])


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("use_checksum", [True, False])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 513, 10_000])
@pytest.mark.parametrize("order", ["adjacent", "every other", "shuffled"])
def test_blocks_arrive_as_they_were_sent(num_blocks, order, use_checksum, monkeypatch):
    monkeypatch.setattr(tcp, "MIN_SHARE_BYTES", 1000)
    block_bytes, num_tensors = 24, 3
    desc = CacheDesc(num_tensors, [2 * num_blocks, block_bytes], DataType.DT_UINT8)
    random = np.random.default_rng(num_blocks)
    picked = np.arange(num_blocks) * (2 if order == "every other" else 1)
    from_blocks, to_blocks = picked, picked
    if order == "shuffled":
        from_blocks, to_blocks = random.permutation(2 * num_blocks)[: len(picked)], random.permutation(picked)
    memory, into = filled(desc), HostMemory(desc)
    spans = [block_spans(range(num_tensors), *runs(one), block_bytes) for one in (from_blocks, to_blocks)]
    with ends(use_checksum=use_checksum) as (source, destination):
        for _ in range(2):  # nothing is left over on the connections
            assert move(source, destination, memory, spans[0], into, spans[1]) == []
    expected = np.zeros_like(blocks_of(into, block_bytes))
    expected[:, to_blocks] = blocks_of(memory, block_bytes)[:, from_blocks]
    assert np.array_equal(blocks_of(into, block_bytes), expected)


def test_a_slot_arrives_at_another_offset_on_a_device_too():
    desc = CacheDesc(4, [2, 3_000_000], DataType.DT_UINT8)
    memory, into = filled(desc), DeviceMemory(desc, torch.device("cpu"))
    with ends() as (source, destination):
        spans = slot_spans(range(1, 3), 17, 2_999_983)
        assert move(source, destination, memory, spans, into, slot_spans(range(2), 5, 2_999_983)) == []
    for tensor in range(2):
        sent = memory.tensor_bytes[tensor + 1][17:3_000_000]
        assert torch.equal(into.tensor_bytes[tensor][5:2_999_988], sent)
    assert not into.tensor_bytes[2].any()


@pytest.mark.parametrize("num_bytes", [1, 1 << 20, (3 << 20) - 1, 100 << 20])
@pytest.mark.parametrize("num_streams", [1, 3])
def test_shares_are_all_of_a_transfer(num_bytes, num_streams):
    parts = shares(num_bytes, num_streams)
    assert (parts[0][0], parts[-1][1]) == (0, num_bytes)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
    assert len(parts) <= num_streams
    assert len(parts) == 1 or min(stop - start for start, stop in parts) >= tcp.MIN_SHARE_BYTES


class Forwarder:
    """Between two ends of a connection: forwards one way, and may change or hold back what comes through."""

    def __init__(self, change=lambda data: data) -> None:
        self.change = change
        self.threads: list[threading.Thread] = []

    def between(self, one: socket.socket, other: socket.socket) -> tuple[socket.socket, socket.socket]:
        mine, theirs = socket.socketpair()

        def forward():
            with other, mine, contextlib.suppress(OSError):
                while data := other.recv(1 << 16):
                    mine.sendall(self.change(data))

        other.setblocking(True)
        mine.setblocking(True)
        self.threads.append(threading.Thread(target=forward))
        self.threads[-1].start()
        return one, theirs


DESC = CacheDesc(1, [1, 5000], DataType.DT_UINT8)
ALL = slot_spans(range(1), 0, 5000)


def flip_a_bit(data: bytes) -> bytes:
    changed = bytearray(data)
    if len(changed) > 1000:
        changed[900] ^= 4
    return bytes(changed)


@pytest.mark.parametrize("use_checksum", [True, False])
def test_a_changed_bit_is_noticed_with_checksums(use_checksum):
    forwarder = Forwarder(flip_a_bit)
    with (
        ends(1, use_checksum=use_checksum, through=forwarder.between) as (source, destination),
        pytest.raises(ChecksumError) if use_checksum else contextlib.nullcontext(),
    ):
        move(source, destination, filled(DESC), ALL, HostMemory(DESC), ALL)
    for thread in forwarder.threads:
        thread.join()


def test_bytes_of_another_transfer_are_not_written():
    into = HostMemory(DESC)
    with ends(1) as (source, destination), pytest.raises(ConnectionError, match="not"):
        move(source, destination, filled(DESC), ALL, into, ALL, transfer_id=6)
    assert not into.tensor_bytes[0].any()


def test_a_source_that_sends_too_little_is_given_up_at_the_deadline():
    with ends(1) as (source, destination):
        sockets.send(connection_of(source), [struct.pack("<QQQ", 7, 0, 5000), bytes(2500)], soon())
        with pytest.raises(TimeoutError):
            destination.receive(7, HostMemory(DESC), ALL, time.monotonic() + 0.02)


def test_a_reader_that_does_not_read_is_given_up_at_the_deadline():
    desc = CacheDesc(1, [1, 8 << 20], DataType.DT_UINT8)
    with ends(2) as (source, _), pytest.raises(TimeoutError):
        source.send(7, HostMemory(desc), slot_spans(range(1), 0, 8 << 20), time.monotonic() + 0.02)


def test_one_share_that_fails_ends_the_others(monkeypatch):
    """Else the transfer would last until the deadline, which is a minute away."""
    monkeypatch.setattr(tcp, "MIN_SHARE_BYTES", 1000)
    with ends(3) as (source, destination):
        connection_of(source, 1).close()
        errors = []
        started = time.monotonic()
        with pytest.raises(ConnectionError):
            errors += move(source, destination, filled(DESC), ALL, HostMemory(DESC), ALL)
        assert time.monotonic() - started < 50, "the deadline was waited for"


def test_no_thread_for_a_share_is_an_error_of_the_transfer(monkeypatch):
    monkeypatch.setattr(tcp, "MIN_SHARE_BYTES", 1000)

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    before = threading.active_count()
    with ends(3) as (_, destination):
        monkeypatch.setattr(tcp.threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            destination.receive(7, HostMemory(DESC), ALL, soon())
    assert threading.active_count() == before


def test_an_end_that_is_shut_down_moves_nothing_any_more():
    with ends(2) as (source, destination):
        destination.shut_down()
        with pytest.raises(ConnectionError):
            destination.receive(7, HostMemory(DESC), ALL, soon())
        source.shut_down()
        with pytest.raises(OSError):  # noqa: PT011 - whichever it is
            source.send(7, HostMemory(DESC), ALL, soon())
        with pytest.raises(TimeoutError):
            source.wait_until_complete(soon())
        assert not source.attach(0, socket.socket())


def test_only_streams_of_the_link_are_attached():
    source = TcpSourceEnd(2, use_checksum=True)
    with socket.socket() as one, socket.socket() as other:
        assert source.attach(1, one)
        assert not source.attach(1, other)
        assert not source.attach(2, other)
        with pytest.raises(TimeoutError, match="1 of 2"):
            source.wait_until_complete(time.monotonic() + 0.01)
        source.close()


@pytest.fixture
def slow_peer():
    """A connection whose calls wait, and a function that has its peer do something again and again."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        mine = stack.enter_context(socket.create_connection(listener.getsockname()))
        peer = stack.enter_context(listener.accept()[0])
        sockets.wait_in_calls(mine)

        def keep(act):
            def work():
                with contextlib.suppress(OSError):
                    while act(peer):
                        time.sleep(0.001)

            thread = threading.Thread(target=work)
            thread.start()
            stack.callback(thread.join)
            stack.callback(sockets.shut_down, peer)

        yield mine, keep


def test_a_peer_that_trickles_does_not_prolong_a_call(slow_peer):
    mine, keep = slow_peer
    keep(lambda peer: peer.send(b"x"))
    with pytest.raises(TimeoutError):
        sockets.receive(mine, 1 << 26, time.monotonic() + 0.05)


def test_a_peer_that_takes_little_does_not_prolong_a_call(slow_peer):
    mine, keep = slow_peer
    keep(lambda peer: peer.recv(1 << 12))
    with pytest.raises(TimeoutError):
        sockets.send(mine, [bytes(1 << 26)], time.monotonic() + 0.05)


@pytest.mark.parametrize("data", [b"", b"x", b"\x91\x00", b"\x91\x11", b"\x90", b"\x91\xc0"])
def test_parameters_of_a_peer_are_checked(data):
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's messages
        TcpTransport(4).open_source(data, use_checksum=True)


def test_the_smaller_number_of_streams_is_used():
    for mine, theirs in ((2, 3), (3, 2)):
        end = TcpTransport(mine).open_source(TcpParameters(theirs).encode(), use_checksum=True)
        assert TcpParameters.decode(end.parameters).num_streams == 2


def test_the_checksum_is_that_of_all_bytes_in_order():
    views = [memoryview(b"ab"), memoryview(b"cd")]
    whole, parts = Checksum(), Checksum()
    whole.extend([memoryview(b"abcd")])
    parts.extend(views[:1])
    parts.extend(views[1:])
    assert whole.value == parts.value == xxhash.xxh3_64_intdigest(b"abcd")


def test_the_checksum_is_the_published_one():
    """The value of no bytes, from the algorithm's own tests: both ends may have another release of it."""
    assert Checksum().value == 0x2D06800538D394C2
