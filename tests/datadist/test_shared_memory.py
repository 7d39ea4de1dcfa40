"""Shared memory: what is copied, what nobody may do with a descriptor, and ends that die meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
import sides
import torch
from failing import fails_with
from pair_checks import assert_pullable, assert_slot, bound, free_on_prompt
from pairs import over_shared_memory, with_pairs
from raw_peers import DECODER_ID, PROMPT_ID, RawDecoder, address_of, soon, started
from remote_objects import remote_process
from sides import (
    byte_desc,
    caches_of,
    connection_of,
    link_of,
    num_mapped,
    pattern,
    pool_of,
    read_cache,
    threads_of,
    write_new_cache,
)

from descriptors import num_open, wait_until_closed
from quire.datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMRole, LLMStatusCode
from quire.datadist.caches import shared_host_memory
from quire.datadist.caches.memory import DeviceMemory, HostMemory
from quire.datadist.caches.shared_host_memory import SharedHostMemory
from quire.datadist.caches.spans import block_spans, runs, slot_spans
from quire.datadist.links import prompt_link
from quire.datadist.transports import shared_memory, unix_sockets
from quire.datadist.transports.shared_memory import (
    FileSpans,
    SharedMemoryDestinationEnd,
    SharedMemorySourceEnd,
    SharedMemoryTransport,
)
from quire.datadist.wire import protocol, sockets
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting
from quire.datadist.wire.protocol import LinkEstablished, LinkOffer, OfferAccepted, TransportOffer

DESC = CacheDesc(2, [4, 1000], DataType.DT_UINT8)
ALL = slot_spans(range(2), 0, 4000)
TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT


@pytest.fixture
def ends():
    """Both ends of a data plane."""
    connections = socket.socketpair()
    for one in connections:
        one.setblocking(False)
    source, destination = SharedMemorySourceEnd(b""), SharedMemoryDestinationEnd(connections[1])
    assert source.attach(0, connections[0])
    yield source, destination
    source.close()
    destination.close()


@pytest.fixture
def small_parts(monkeypatch):
    """Copy in two threads, a little at a time."""
    monkeypatch.setattr(shared_memory, "PART_BYTES", 700)
    monkeypatch.setattr(shared_memory, "MAX_PIECE_BYTES", 1500)
    monkeypatch.setattr(shared_memory, "MIN_THREAD_PIECE_BYTES", 1)
    monkeypatch.setattr(shared_memory, "MIN_THREAD_BYTES", 2000)


def filled(desc: CacheDesc, kind=SharedHostMemory):
    memory = kind(desc)
    for one, values in zip(memory.tensor_bytes, pattern(desc, 1), strict=True):
        one.copy_(torch.from_numpy(values.reshape(-1)))
    return memory


def blocks_of(memory, block_bytes: int) -> np.ndarray:
    return np.stack([one.numpy().reshape(-1, block_bytes) for one in memory.tensor_bytes])


@contextlib.contextmanager
def acting_at_part(number: int, act):
    """Do something before a part is copied; the parts are counted from 0."""
    copy_in, count = HostMemory.copy_in, iter(range(10**6))

    def acting(memory, *arguments):
        if next(count) == number:
            act()
        copy_in(memory, *arguments)

    HostMemory.copy_in = acting
    try:
        yield
    finally:
        HostMemory.copy_in = copy_in


# -- what is copied ----------------------------------------------------------------------------------------


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("source_kind", [SharedHostMemory, HostMemory])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 513, 10_000])
@pytest.mark.parametrize("order", ["adjacent", "every other", "shuffled"])
def test_blocks_arrive_as_they_are(ends, small_parts, num_blocks, order, source_kind):
    block_bytes, num_tensors = 24, 3
    desc = CacheDesc(num_tensors, [2 * num_blocks, block_bytes], DataType.DT_UINT8)
    random = np.random.default_rng(num_blocks)
    picked = np.arange(num_blocks) * (2 if order == "every other" else 1)
    from_blocks, to_blocks = picked, picked
    if order == "shuffled":
        from_blocks, to_blocks = random.permutation(2 * num_blocks)[: len(picked)], random.permutation(picked)
    memory, into = filled(desc, source_kind), HostMemory(desc)
    spans = [block_spans(range(num_tensors), *runs(one), block_bytes) for one in (from_blocks, to_blocks)]
    for transfer_id in (7, 8):  # nothing is left over on the connection
        sending = threading.Thread(target=ends[0].send, args=(transfer_id, memory, spans[0], soon()))
        sending.start()
        ends[1].receive(transfer_id, into, spans[1], soon())
        sending.join()
    expected = np.zeros_like(blocks_of(into, block_bytes))
    expected[:, to_blocks] = blocks_of(memory, block_bytes)[:, from_blocks]
    assert np.array_equal(blocks_of(into, block_bytes), expected)


@pytest.mark.parametrize("kind", [HostMemory, lambda desc: DeviceMemory(desc, torch.device("cpu"))])
def test_some_tensors_arrive_at_another_offset_on_a_device_too(ends, small_parts, kind):
    desc = CacheDesc(4, [2, 3001], DataType.DT_UINT8)
    memory, into = filled(desc), kind(desc)
    ends[0].send(1, memory, slot_spans(range(1, 3), 17, 2983), soon())
    ends[1].receive(1, into, slot_spans(range(2), 5, 2983), soon())
    for tensor in range(2):
        assert torch.equal(into.tensor_bytes[tensor][5:2988], memory.tensor_bytes[tensor + 1][17:3000])
        assert not into.tensor_bytes[tensor][:5].any()
        assert not into.tensor_bytes[tensor][2988:].any()
    assert not into.tensor_bytes[2].any()


def test_a_file_stays_mapped_until_it_is_forgotten(ends):
    source, destination = ends
    memories = [filled(DESC) for _ in range(shared_memory.MAX_MAPPED + 2)]
    for memory in [*memories, memories[-1]]:
        source.send(1, memory, ALL, soon())
        destination.receive(1, HostMemory(DESC), ALL, soon())
    assert num_mapped(destination) == shared_memory.MAX_MAPPED
    destination.forget_source()
    destination.forget_source()
    assert num_mapped(destination) == shared_memory.MAX_MAPPED - 1
    source.send(1, filled(DESC, HostMemory), ALL, soon())
    destination.receive(1, HostMemory(DESC), ALL, soon())
    destination.forget_source()  # nothing was mapped for this one
    assert num_mapped(destination) == shared_memory.MAX_MAPPED - 1
    destination.close()
    assert not num_mapped(destination)


# -- what nobody may do ------------------------------------------------------------------------------------


def test_a_descriptor_that_is_handed_out_does_not_let_anybody_write():
    memory = filled(DESC)
    with open(f"/proc/self/fd/{memory.descriptor}", "r+b", buffering=0) as reopened:
        for descriptor in (memory.descriptor, reopened.fileno()):
            for forbidden in (
                lambda to=descriptor: os.write(to, b"x"),
                lambda to=descriptor: os.ftruncate(to, 1),
                lambda to=descriptor: mmap.mmap(to, 4096),
                lambda to=descriptor: fcntl.fcntl(to, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            ):
                with pytest.raises(OSError):  # noqa: PT011 - whichever it is
                    forbidden()
    assert np.array_equal(blocks_of(memory, 1000), pattern(DESC, 1))


def send_message(source, message, descriptor=None) -> None:
    protocol.ControlChannel(connection_of(source), None).send(message, soon())
    if descriptor is not None:
        unix_sockets.send_descriptor(connection_of(source), descriptor, soon())


def spans_of(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


WHOLE = FileSpans(1, [0, 4032], 4000, spans_of(0, 4000))


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": 2},
        {"tensor_offsets": [0, 4033]},
        {"tensor_offsets": [2**63 - 1, 0]},
        {"tensor_offsets": [0]},
        {"tensor_offsets": []},
        {"tensor_bytes": 3999},
        {"tensor_bytes": 2**63 - 1},
        {"spans": spans_of(-1, 4000)},
        {"spans": spans_of(1, 4000)},
        {"spans": spans_of(2**63 - 1, 4000), "tensor_bytes": 2**63 - 1},
        {"spans": spans_of(0, 3999)},
        {"spans": spans_of(0, 8000, 0, -4000)},
        {"spans": b""},
        {"spans": b"odd"},
    ],
)  # fmt: skip
def test_a_source_that_lies_is_not_believed(ends, changes):
    """Tensors begin at 0 and 4,032 of a file of 8,032 bytes."""
    source, destination = ends
    memory, into = filled(DESC), HostMemory(DESC)
    send_message(source, msgspec.structs.replace(WHOLE, **changes), memory.descriptor)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectionError):
        destination.receive(1, into, ALL, soon())
    assert not any(one.any() for one in into.tensor_bytes)
    assert len(os.listdir("/proc/self/fd")) <= num_open + 1  # of the file, which is mapped


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\x00" * 8, b""])
def test_what_is_no_message_is_refused(ends, data):
    source, destination = ends
    sockets.send(connection_of(source), [data], soon())
    source.shut_down()
    with pytest.raises(ConnectionError):
        destination.receive(1, HostMemory(DESC), ALL, soon())


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, None])
def test_memory_that_could_be_taken_away_while_it_is_read_is_not_mapped(ends, tmp_path, seals):
    if seals is None:
        descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
        os.ftruncate(descriptor, 1 << 20)
    else:
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 1 << 20)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    send_message(ends[0], WHOLE, descriptor)
    os.close(descriptor)
    with pytest.raises(OSError):  # noqa: PT011 - whichever it is
        ends[1].receive(1, HostMemory(DESC), ALL, soon())
    assert not num_mapped(ends[1])


def test_a_file_without_its_descriptor_is_refused(ends):
    send_message(ends[0], WHOLE)
    sockets.send(connection_of(ends[0]), [b"d"], soon())
    with pytest.raises(ConnectionError, match="descriptor"):
        ends[1].receive(1, HostMemory(DESC), ALL, soon())


def test_caches_beyond_the_limit_are_not_shared_and_arrive_all_the_same(ends, monkeypatch):
    monkeypatch.setattr(shared_host_memory, "MAX_SHARED_CACHES", 0)
    memory, into = filled(DESC), HostMemory(DESC)
    assert memory.descriptor is None
    ends[0].send(1, memory, ALL, soon())
    ends[1].receive(1, into, ALL, soon())
    assert np.array_equal(blocks_of(into, 1000), pattern(DESC, 1))


def test_memory_and_descriptor_go_with_the_last_view():
    before = len(os.listdir("/proc/self/fd"))
    memory = filled(DESC)
    view = memory.tensors[0]
    del memory
    assert len(os.listdir("/proc/self/fd")) == before
    assert np.array_equal(view.numpy(), pattern(DESC, 1)[0])


# -- ends that end in the middle of a copy -----------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3])
def test_bytes_are_void_if_the_source_was_given_up_under_the_copy(ends, small_parts, number):
    source, destination = ends
    source.send(1, filled(DESC), ALL, soon())
    with acting_at_part(number, source.shut_down), pytest.raises(ConnectionError, match="while its memory"):
        destination.receive(1, HostMemory(DESC), ALL, soon())


def test_a_copy_ends_with_its_end(ends, small_parts):
    source, destination = ends
    into = HostMemory(DESC)
    source.send(1, filled(DESC), ALL, soon())
    with acting_at_part(2, destination.shut_down), pytest.raises(ConnectionError):
        destination.receive(1, into, ALL, soon())
    assert not into.tensor_bytes[1][3000:].any()


def test_a_copy_ends_at_the_deadline(ends, small_parts, monkeypatch):
    source, destination = ends
    source.send(1, filled(DESC), ALL, soon())
    deadline = soon()

    def pass_deadline():
        monkeypatch.setattr(sockets.time, "monotonic", lambda: deadline)

    with acting_at_part(2, pass_deadline), pytest.raises(TimeoutError):
        destination.receive(1, HostMemory(DESC), ALL, deadline)


def test_what_fails_in_either_thread_fails_the_transfer(ends, small_parts):
    def fail():
        raise MemoryError("no room")

    threads = threading.active_count()
    for number in range(4):
        ends[0].send(1, filled(DESC), ALL, soon())
        with acting_at_part(number, fail), pytest.raises(MemoryError):
            ends[1].receive(1, HostMemory(DESC), ALL, soon())
    assert threading.active_count() == threads


@over_shared_memory
def test_a_prompt_that_ends_in_a_copy(make_pair):
    """The bytes would even be right, but nobody says so any more."""
    pair = make_pair()
    desc = byte_desc(1, 4096)
    bound(pair, desc, [CacheKey(1, 5)], seed=5)
    target = pair.dm.allocate_cache(desc)
    end = pair.process.kill if pair.process else pair.prompt.finalize
    with acting_at_part(1, end), fails_with(TIMEOUT):
        pair.dm.pull_cache(CacheKey(1, 5), target)
    with fails_with(LLMStatusCode.LLM_NOT_YET_LINK):
        pair.dm.pull_cache(CacheKey(1, 5), target)


@over_shared_memory
def test_a_source_that_is_released_in_a_copy_is_kept_for_it(make_pair):
    pair = make_pair()
    desc, key = byte_desc(1, 4096), CacheKey(1, 5)
    cache = bound(pair, desc, [key], seed=5)
    target = pair.dm.allocate_cache(desc)
    free = []

    def release():
        pair.pm.deallocate_cache(cache)
        pair.pm.remove_cache_key(key)
        free.append(free_on_prompt(pair))

    with acting_at_part(1, release):
        pair.dm.pull_cache(key, target)
    assert_slot(pair, target, 0, pattern(desc, 5)[:, 0])
    assert free == [sides.POOL - 4 * 4096]
    assert free_on_prompt(pair) == sides.POOL


@with_pairs("two-processes", "shared_memory")
def test_a_prompt_that_is_stopped_in_a_copy_confirms_when_it_goes_on(make_pair):
    pair = make_pair()
    desc, key = byte_desc(1, 4096), CacheKey(1, 5)
    bound(pair, desc, [key], seed=5)
    target = pair.dm.allocate_cache(desc)

    def stop():
        os.kill(pair.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pair.process.pid, os.WSTOPPED | os.WNOWAIT)

    going_on = threading.Timer(0.05, os.kill, (pair.process.pid, signal.SIGCONT))
    with acting_at_part(1, lambda: (stop(), going_on.start())):
        pair.dm.pull_cache(key, target)
    assert_slot(pair, target, 0, pattern(desc, 5)[:, 0])
    going_on.join()


def pull_and_stop_in_the_copy(port: int) -> None:
    """Run where nothing else runs: stops this process before the second part of a pull."""
    decoder = sides.start_decoder(transport="shared_memory")
    assert decoder.link_clusters([sides.cluster_info(1, port)])[0] is LLMStatusCode.LLM_SUCCESS
    cache = decoder.kv_cache_manager.allocate_cache(byte_desc(1, 4096))
    with acting_at_part(1, lambda: os.kill(os.getpid(), signal.SIGSTOP)):
        decoder.kv_cache_manager.pull_cache(CacheKey(1, 5), cache)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_decoder_that_stops_in_a_copy_holds_the_source_for_its_time_only(monkeypatch, is_killed):
    monkeypatch.setattr(prompt_link, "FRAME_LIMIT", 0.1)
    prompt = sides.start_prompt(transport="shared_memory")
    with remote_process() as process:
        manager = prompt.kv_cache_manager
        desc, key = byte_desc(1, 4096), CacheKey(1, 5)
        manager.deallocate_cache(write_new_cache(manager, desc, [key], seed=5))
        pulling = threading.Thread(target=_ignoring_the_end, args=(process, prompt.listen_port))
        pulling.start()
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        (held,) = caches_of(pool_of(prompt))
        assert held.num_transfers == 1
        links = threads_of(prompt)
        if is_killed:
            process.kill()
        else:  # as if its deadline had passed
            prompt.unlink_clusters([sides.cluster_info(2, 0)])
        for link in links:
            link.join()
        assert held.num_transfers == 0
        if not is_killed:
            process.kill()
        pulling.join()
        with started(LLMRole.DECODER, 9) as decoder:  # the key is there, and others are served
            assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
            target = decoder.kv_cache_manager.allocate_cache(desc)
            decoder.kv_cache_manager.pull_cache(key, target)
            assert np.array_equal(read_cache(decoder.kv_cache_manager, target), pattern(desc, 5))
    prompt.finalize()


def _ignoring_the_end(process, port: int) -> None:
    with contextlib.suppress(EOFError):
        process.call(pull_and_stop_in_the_copy, port)


# -- which links have it -----------------------------------------------------------------------------------


def transport_of(decoder) -> str:
    return link_of(decoder, PROMPT_ID).transport


def test_sides_on_one_host_share_memory_unless_one_may_not():
    for of_prompt, of_decoder, expected in [
        ({}, {}, "shared_memory"),
        ({}, {"transports": "tcp"}, "tcp"),
        ({"transports": "tcp"}, {}, "tcp"),
        ({"transports": "tcp,shared_memory"}, {}, "tcp"),
    ]:
        with (
            started(LLMRole.PROMPT, PROMPT_ID, **of_prompt) as prompt,
            started(LLMRole.DECODER, DECODER_ID, **of_decoder) as decoder,
        ):
            assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
            assert transport_of(decoder) == expected


@pytest.mark.parametrize("what", ["another host", "another user"])
def test_others_use_tcp_and_notice_nothing(monkeypatch, what):
    def unreachable(*_):
        raise ConnectionRefusedError("nobody listens there")

    with started(LLMRole.PROMPT, PROMPT_ID) as prompt, started(LLMRole.DECODER, DECODER_ID) as decoder:
        if what == "another host":
            monkeypatch.setattr(unix_sockets, "connect", unreachable)
        else:
            monkeypatch.setattr(unix_sockets, "_peer_user", lambda _: 1 + os.geteuid())
        cache = write_new_cache(prompt.kv_cache_manager, DESC, [CacheKey(PROMPT_ID, 5)], seed=3)
        assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
        assert transport_of(decoder) == "tcp"
        target = decoder.kv_cache_manager.allocate_cache(cache.cache_desc)
        decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), target)
        assert (read_cache(decoder.kv_cache_manager, target)[:, 0] == pattern(DESC, 3)[:, 0]).all()


def test_a_prompt_that_cannot_listen_on_its_host_has_tcp(monkeypatch):
    def refuse(_):
        raise PermissionError("not here")

    monkeypatch.setattr(unix_sockets, "listen", refuse)
    with started(LLMRole.PROMPT, PROMPT_ID) as prompt, started(LLMRole.DECODER, DECODER_ID) as decoder:
        assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
        assert transport_of(decoder) == "tcp"


@pytest.mark.parametrize("address", [b"", b"/tmp/quire", b"x"])
def test_only_abstract_names_are_connected_to(address):
    with pytest.raises(ValueError, match="abstract"):
        SharedMemoryTransport(listens=False).open_destination(None, address, soon())


# -- strangers on the Unix socket --------------------------------------------------------------------------


def host_connection(offer: LinkOffer) -> socket.socket:
    return unix_sockets.connect(offer.transport.parameters, soon())


def test_strangers_on_the_unix_socket_delay_nobody():
    with (
        started(LLMRole.PROMPT, PROMPT_ID, token="right") as prompt,
        RawDecoder(prompt, b"right") as peer,
        contextlib.ExitStack() as stack,
    ):
        peer.request(transports=[TransportOffer("shared_memory", b"")])
        peer.offer = peer.channel.expect(LinkOffer, soon())
        silent, garbage, stranger, other_stream = (
            stack.enter_context(host_connection(peer.offer)) for _ in range(4)
        )
        garbage.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with pytest.raises(ConnectionError):
            sockets.receive(garbage, 1, soon())
        with pytest.raises(ConnectionError):
            greet(stranger, b"wrong", new_greeting(ConnectionKind.STREAM, 0, peer.offer.link_id), soon())
        greet(other_stream, peer.key, new_greeting(ConnectionKind.STREAM, 1, peer.offer.link_id), soon())
        with pytest.raises(ConnectionError):
            sockets.receive(other_stream, 1, soon())
        mine = stack.enter_context(host_connection(peer.offer))
        greet(mine, peer.key, new_greeting(ConnectionKind.STREAM, 0, peer.offer.link_id), soon())
        peer.channel.send(OfferAccepted(), soon())
        peer.channel.expect(LinkEstablished, soon())
        assert not sockets.is_readable(silent)


def test_a_tcp_connection_is_no_end_of_shared_memory():
    source = SharedMemorySourceEnd(b"")
    with socket.socket() as connection:
        assert not source.attach(0, connection)
    with pytest.raises(TimeoutError):
        source.wait_until_complete(time.monotonic() + 0.01)
    source.close()


def test_nothing_is_left_of_blocks_that_were_shared():
    with started(LLMRole.PROMPT, PROMPT_ID):
        pass  # whatever is opened once
    before = num_open()
    with started(LLMRole.PROMPT, PROMPT_ID) as prompt, started(LLMRole.DECODER, DECODER_ID) as decoder:
        source = prompt.kv_cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(PROMPT_ID))
        blocks = decoder.kv_cache_manager.allocate_blocks_cache(DESC)
        decoder.link_clusters([address_of(prompt)])
        decoder.kv_cache_manager.pull_blocks(BlocksCacheKey(PROMPT_ID), blocks, [1, 2], [3, 0])
    del source, blocks
    wait_until_closed(before)


@over_shared_memory
def test_a_consumed_slot_is_not_mapped_any_longer(make_pair):
    pair = make_pair()
    desc, key = byte_desc(1, 128), CacheKey(1, 5)
    bound(pair, desc, [key], seed=5)
    assert_pullable(pair, key, desc, 0, seed=5)
    assert not num_mapped(link_of(pair.decoder)._destination_end)
