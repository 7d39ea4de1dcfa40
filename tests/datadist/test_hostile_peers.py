"""Whatever a peer does, it reads and writes nothing that it may not, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_peers import DECODER_ID, PROMPT_ID, RawDecoder, address_of, connection_to, soon, started
from sides import links_to_decoders, num_transfers, pool_of, session_of, threads_of, transports_of

from descriptors import num_open, wait_until_closed
from quire.datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode
from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import HostMemory
from quire.datadist.links import door, prompt_service
from quire.datadist.links.pull_sources import open_pull_source
from quire.datadist.transports.interface import Checksum
from quire.datadist.wire import protocol, sockets
from quire.datadist.wire.handshake import GREETING_BYTES, ConnectionKind, HandshakeError, greet, new_greeting
from quire.datadist.wire.protocol import (
    BlocksSource,
    KeySource,
    LayerRange,
    LinkDroppedError,
    LinkOffer,
    NumberedBlocksSource,
    PullAccepted,
    PullCompleted,
    PullConfirmed,
    PullRefused,
    PullRequest,
    SlotSource,
    TransportOffer,
    Unlink,
    Unlinked,
    encode_runs,
)

TOKEN = "correct horse"
DESC = CacheDesc(2, [4, 8], DataType.DT_UINT8)


@pytest.fixture
def prompt():
    """A PROMPT with a token, a key (slot 1, all bytes 7) and a blocks cache."""
    with started(LLMRole.PROMPT, PROMPT_ID, token=TOKEN) as side:
        manager = side.kv_cache_manager
        side.cache = manager.allocate_cache(DESC, [CacheKey(PROMPT_ID, 2**64 - 1), CacheKey(PROMPT_ID, 5)])
        for index in range(2):
            manager.get_cache_tensors(side.cache, index)[0].torch()[1] = 7
        side.blocks = manager.allocate_blocks_cache(DESC, BlocksCacheKey(PROMPT_ID))
        yield side


def assert_it_serves(prompt) -> None:
    """A DECODER with the token links and pulls."""
    with started(LLMRole.DECODER, 99, token=TOKEN) as decoder:
        assert decoder.link_clusters([address_of(prompt)], timeout=20_000)[0] is LLMStatusCode.LLM_SUCCESS
        cache = decoder.kv_cache_manager.allocate_cache(DESC)
        decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), cache, src_cache_offset=0)
        assert (decoder.kv_cache_manager.get_cache_tensors(cache)[0].numpy()[0] == 7).all()


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while True:
            data += sockets.receive(connection, 1, soon())
    return data


# -- without the token -------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(1000), b"QuireKV\n" + bytes(100)])
def test_garbage_is_answered_with_nothing(prompt, garbage):
    with connection_to(prompt) as peer:
        peer.send(garbage)
        assert read_to_end(peer) == b""
    assert_it_serves(prompt)


@settings(max_examples=30)
@given(data=st.binary(min_size=GREETING_BYTES, max_size=300), is_greeting=st.booleans())
def test_no_bytes_let_anybody_in(data, is_greeting):
    with started(LLMRole.PROMPT, PROMPT_ID, token=TOKEN) as prompt, connection_to(prompt) as peer:
        greeting = new_greeting(ConnectionKind.CONTROL).encode() if is_greeting else b""
        peer.send(greeting + data)
        assert len(read_to_end(peer)) <= GREETING_BYTES  # its greeting at most, never its proof


@pytest.mark.parametrize("token", [b"", b"incorrect", TOKEN.encode() + b"\0"])
def test_the_wrong_token_opens_nothing(prompt, token):
    with connection_to(prompt) as peer, pytest.raises(HandshakeError):
        greet(peer, token, new_greeting(ConnectionKind.CONTROL), soon())
    assert prompt.kv_cache_manager.is_initialized()


def test_a_token_where_none_is_asked_for_does_not_fit_either():
    with (
        started(LLMRole.PROMPT, PROMPT_ID) as prompt,
        started(LLMRole.DECODER, DECODER_ID, token=TOKEN) as decoder,
    ):
        assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_LINK_FAILED


def test_a_stream_of_somebody_elses_link_needs_that_links_key(prompt):
    with RawDecoder(prompt, TOKEN.encode()).link() as link, connection_to(prompt) as peer:
        for key in (TOKEN.encode(), bytes(32)):
            with pytest.raises(ConnectionError):
                link.open_stream(1, key=key)
        with pytest.raises(ConnectionError):
            link.open_stream(0, link_id=link.offer.link_id ^ 1)
        with pytest.raises(ConnectionError):
            greet(peer, link.key, new_greeting(ConnectionKind.CONTROL), soon())
        link.channel.send(Unlink(), soon())
        link.channel.expect(Unlinked, soon())


def test_a_second_stream_in_place_of_one_that_stands_is_closed(prompt):
    with RawDecoder(prompt, TOKEN.encode()).link() as link:
        link.open_stream(0)
        assert read_to_end(link.streams[-1]) == b""
        link.channel.send(Unlink(), soon())
        link.channel.expect(Unlinked, soon())


def test_peers_that_say_nothing_hold_up_nobody_and_are_let_go(monkeypatch):
    monkeypatch.setattr(door, "HALF_OPEN_LIMIT", 0.3)
    with started(LLMRole.PROMPT, PROMPT_ID, token=TOKEN) as prompt, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connection_to(prompt)) for _ in range(40)]
        for number, one in enumerate(silent):
            one.send(new_greeting(ConnectionKind.CONTROL).encode()[: number * 2])
        cache = prompt.kv_cache_manager.allocate_cache(DESC, [CacheKey(PROMPT_ID, 5)])
        prompt.kv_cache_manager.get_cache_tensors(cache)[0].torch()[0] = 7
        assert_it_serves(prompt)
        for one in silent:
            read_to_end(one)


def test_the_oldest_of_too_many_silent_peers_gives_way(prompt, monkeypatch):
    monkeypatch.setattr(door, "MAX_UNPROVED", 3)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connection_to(prompt)) for _ in range(5)]
        for one in silent[:2]:
            assert read_to_end(one) == b""
        assert_it_serves(prompt)


def test_peers_that_leave_at_once_are_forgotten(prompt):
    def num_left_open() -> int:
        assert_it_serves(prompt)
        for thread in threads_of(prompt):
            thread.join()
        return num_open()

    before = num_left_open()
    for _ in range(50):
        with connection_to(prompt) as peer:  # a reset in place of an end, too
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert num_left_open() < before + 10  # other threads of the process open files, too


# -- with the token, but without manners -------------------------------------------------------------------


def test_a_half_open_link_expires(monkeypatch):
    monkeypatch.setattr(door, "HALF_OPEN_LIMIT", 0.2)
    with started(LLMRole.PROMPT, PROMPT_ID) as prompt, RawDecoder(prompt) as one, RawDecoder(prompt) as other:
        one.request()
        one.channel.expect(LinkOffer, soon())
        for peer in (one, other):  # one opens no stream, the other does not even ask
            with pytest.raises(ConnectionError):
                peer.channel.receive(soon())


def test_more_link_operations_than_are_handled_at_once_queue(prompt):
    service = session_of(prompt).service
    with ThreadPoolExecutor(1) as executor, contextlib.ExitStack() as stack:
        for number in range(prompt_service.MAX_LINK_OPERATIONS):
            stack.enter_context(RawDecoder(prompt, TOKEN.encode(), cluster_id=100 + number))
        operations = service._operations
        while operations.acquire(blocking=False):
            operations.release()
            time.sleep(0.001)
        linking = executor.submit(assert_it_serves, prompt)
        while len(links_to_decoders(service)) <= prompt_service.MAX_LINK_OPERATIONS:
            assert not linking.done()
            time.sleep(0.001)
        stack.close()
        linking.result()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_cluster_id": 9}, "remote_cluster_id is 9"),
        ({"byte_order": "middle"}, "byte order"),
        ({"transports": []}, "no transport in common"),
        ({"transports": [TransportOffer("pigeons", b"")]}, "pigeons"),
        ({"transports": [TransportOffer("tcp", b"")]}, "tcp"),
        ({"transports": [TransportOffer("tcp", b"\x91\x00")]}, "0 streams"),
    ],
)
def test_a_link_that_cannot_be_is_refused_with_the_reason(prompt, changes, reason):
    with RawDecoder(prompt, TOKEN.encode()) as peer:
        peer.request(**changes)
        with pytest.raises(LinkDroppedError, match=reason):
            peer.channel.receive(soon())


def test_no_more_links_than_the_limit(monkeypatch):
    monkeypatch.setattr(prompt_service, "MAX_LINKS", 2)
    with started(LLMRole.PROMPT, PROMPT_ID) as prompt, contextlib.ExitStack() as stack:
        links = [stack.enter_context(RawDecoder(prompt, cluster_id=number).link()) for number in (1, 2)]
        third = stack.enter_context(RawDecoder(prompt, cluster_id=3))
        with pytest.raises(LinkDroppedError, match="2 links, which is the limit"):
            third.link()
        again = stack.enter_context(RawDecoder(prompt, cluster_id=2).link())  # in place of the second
        with pytest.raises(LinkDroppedError, match="linked again"):
            links[1].channel.receive(soon())
        again.channel.send(Unlink(), soon())
        again.channel.expect(Unlinked, soon())


def pull_request(**changes) -> PullRequest:
    fields = {
        "transfer_id": 1,
        "epoch": 0,
        "source": KeySource(5, 0, 2**64 - 1),
        "data_type": DataType.DT_UINT8,
        "num_tensors": 2,
        "layers": None,
        "offset": 0,
        "num_bytes": 8,
        "consume": False,
        "timeout_ms": 20_000,
    }
    return PullRequest(**(fields | changes))


def blocks_source(
    *pairs: tuple[int, int], block_bytes: int = 8, cache_id: int | None = None
) -> BlocksSource | NumberedBlocksSource:
    starts, counts = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    encoded = encode_runs(starts, counts)
    if cache_id is not None:
        return NumberedBlocksSource(cache_id, block_bytes, encoded)
    return BlocksSource(0, block_bytes, encoded)


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 1},
        {"offset": 2**63 - 1, "num_bytes": 2**63 - 1},
        {"num_bytes": 0},
        {"num_bytes": 9},
        {"num_tensors": 1},
        {"num_tensors": 2**32 - 1},
        {"data_type": 77},
        {"data_type": DataType.DT_INT8},
        {"layers": LayerRange(0, 2, 2)},
        {"layers": LayerRange(1, 0, 1)},
        {"layers": LayerRange(0, 1, 0)},
        {"layers": LayerRange(0, 2**63 - 1, 1)},
        {"source": SlotSource(1, 4)},
        {"source": SlotSource(2, 0)},
        {"source": blocks_source((0, 5)), "num_bytes": 40},
        {"source": blocks_source((4, 1))},
        {"source": blocks_source((-1, 1))},
        {"source": blocks_source((0, -1))},
        {"source": blocks_source((0, 0)), "num_bytes": 0},
        {"source": blocks_source((2**63 - 1, 2**63 - 1))},
        {"source": blocks_source((0, 1), block_bytes=16)},
        {"source": blocks_source((0, 1)), "num_bytes": 16},
    ],
)
def test_what_is_not_within_a_cache_is_refused_and_the_link_goes_on(prompt, changes):
    with RawDecoder(prompt, TOKEN.encode()).link() as link:
        link.channel.send(pull_request(epoch=link.offer.epoch, **changes), soon())
        refused = link.channel.expect(PullRefused, soon())
        assert refused.status_code == LLMStatusCode.LLM_PARAM_INVALID
        link.channel.send(pull_request(epoch=link.offer.epoch), soon())
        link.channel.expect(PullAccepted, soon())


def test_references_of_an_earlier_start_are_void(prompt):
    with RawDecoder(prompt, TOKEN.encode()).link() as link:
        link.channel.send(pull_request(epoch=link.offer.epoch ^ 1), soon())
        assert link.channel.expect(PullRefused, soon()).status_code == LLMStatusCode.LLM_NOT_YET_LINK


@pytest.mark.parametrize(
    "message", [PullCompleted(1), pull_request(source=BlocksSource(0, 8, b"x" * 17))], ids=["early", "runs"]
)
def test_whoever_breaks_the_protocol_loses_its_link_only(prompt, message, caplog):
    with RawDecoder(prompt, TOKEN.encode()).link() as link:
        if isinstance(message, PullRequest):
            message.epoch = link.offer.epoch
        with caplog.at_level(logging.WARNING):
            link.channel.send(message, soon())
            with pytest.raises(ConnectionError):
                link.channel.receive(soon())
    assert_it_serves(prompt)


def test_a_link_is_checked_between_pulls_only(prompt):
    with RawDecoder(prompt, TOKEN.encode()).link() as link:
        for _ in range(2):
            link.channel.send(protocol.CheckLink(), soon())
            link.channel.expect(protocol.LinkChecked, soon())
        link.channel.send(pull_request(epoch=link.offer.epoch), soon())
        link.channel.expect(PullAccepted, soon())
        link.channel.send(protocol.CheckLink(), soon())
        with pytest.raises(ConnectionError):
            link.channel.receive(soon())
    assert_it_serves(prompt)


def test_a_key_is_consumed_only_by_the_completion_of_its_own_transfer(prompt):
    with RawDecoder(prompt, TOKEN.encode()).link() as link:
        link.channel.send(pull_request(epoch=link.offer.epoch, consume=True), soon())
        link.channel.expect(PullAccepted, soon())
        link.channel.send(PullCompleted(2), soon())
        with pytest.raises(ConnectionError):
            link.channel.receive(soon())
    assert_it_serves(prompt)


def test_a_completed_transfer_is_confirmed_after_its_key_is_free(prompt):
    with RawDecoder(prompt, TOKEN.encode()).link() as link:
        link.channel.send(pull_request(epoch=link.offer.epoch, consume=True), soon())
        link.channel.expect(PullAccepted, soon())
        link.channel.send(PullCompleted(1), soon())
        link.channel.expect(PullConfirmed, soon())
        prompt.kv_cache_manager.allocate_cache(DESC, [CacheKey(PROMPT_ID, 5)])


def test_a_reader_that_stops_holds_the_source_until_its_own_deadline(monkeypatch):
    monkeypatch.setattr(protocol, "FRAME_LIMIT", 0.2)
    big = CacheDesc(1, [1, 64 << 20], DataType.DT_UINT8)
    with started(LLMRole.PROMPT, PROMPT_ID, token=TOKEN) as prompt:
        manager = prompt.kv_cache_manager
        cache = manager.allocate_cache(big, [CacheKey(PROMPT_ID, 6)])
        small = manager.allocate_cache(DESC, [CacheKey(PROMPT_ID, 5)])
        manager.get_cache_tensors(small)[0].torch()[0] = 7
        pool = pool_of(prompt)
        manager.deallocate_cache(cache)
        with RawDecoder(prompt, TOKEN.encode()).link() as link:
            link.channel.send(
                pull_request(
                    epoch=link.offer.epoch,
                    source=KeySource(6, 0, 2**64 - 1),
                    num_tensors=1,
                    num_bytes=64 << 20,
                    timeout_ms=500,
                ),
                soon(),
            )
            link.channel.expect(PullAccepted, soon())
            manager.remove_cache_key(CacheKey(PROMPT_ID, 6))
            assert pool.num_caches == 2  # the transfer holds it
            assert_it_serves(prompt)
            with pytest.raises(ConnectionError):
                link.channel.receive(soon())
        for thread in threads_of(prompt):
            thread.join()
        assert pool.num_caches == 1


@settings(max_examples=150)
@given(
    source=st.builds(KeySource, st.integers(4, 6), st.just(0), st.just(2**64 - 1))
    | st.builds(SlotSource, st.integers(0, 3), st.integers(0, 5))
    | st.builds(
        lambda pairs, size, cache_id: blocks_source(*pairs, block_bytes=size, cache_id=cache_id),
        st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), min_size=1, max_size=3),
        st.sampled_from([8, 8, 7]),
        st.none() | st.integers(0, 3),
    ),
    num_tensors=st.integers(0, 3),
    layers=st.none() | st.builds(LayerRange, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    offset=st.integers(0, 9),
    num_bytes=st.integers(0, 48),
)
def test_whatever_is_accepted_is_within_the_cache_and_as_long_as_was_said(**fields):
    pool = CachePool(HostMemory)
    pool.allocate(DESC, [CacheKey(1, 2**64 - 1), CacheKey(1, 5)])
    pool.allocate_blocks(DESC, BlocksCacheKey(1))
    before = pool.num_caches
    try:
        source = open_pull_source(pool, 0, pull_request(**fields))
    except LLMException:
        assert num_transfers(pool) == 0
        return
    spans = source.spans
    assert spans.num_bytes == fields["num_tensors"] * fields["num_bytes"]
    for window in spans.windows(0, spans.num_bytes):
        for tensor, offset, length in window:
            assert 0 <= tensor < 2
            assert 0 <= offset < offset + length <= 32
            if not isinstance(fields["source"], (BlocksSource, NumberedBlocksSource)):
                assert offset // 8 == (offset + length - 1) // 8 == source.hold.slot
    source.hold.end(consume=False)
    assert pool.num_caches == before


# -- a PROMPT that is none ---------------------------------------------------------------------------------


class RawPrompt:
    """Listens, takes one link, and answers the first pull as a test says."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listen_port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            control = stack.enter_context(self._accept(b""))
            channel = protocol.prompt_channel(control[0])
            channel.receive(soon())
            offer = TransportOffer("tcp", b"\x91\x01")
            channel.send(LinkOffer(1, 2, False, offer, 0, False), soon())
            stream = stack.enter_context(self._accept(control[1]))
            self.listener.close()  # or the DECODER would wait until a connection for pushes is taken
            channel.expect(protocol.OfferAccepted, soon())
            channel.send(protocol.LinkEstablished(), soon())
            request = channel.receive(soon())
            self.answer(channel, stream[0], request)
            sockets.wait_until_readable(control[0])

    @contextlib.contextmanager
    def _accept(self, secret: bytes):
        from quire.datadist.wire.handshake import connection_key, decode_greeting, listening_proof

        connection, _ = self.listener.accept()
        connection.setblocking(False)
        with connection:
            theirs = decode_greeting(sockets.receive(connection, GREETING_BYTES, soon()))
            mine = new_greeting(theirs.kind)
            sockets.send(connection, [mine.encode()], soon())
            key = connection_key(secret, theirs, mine)
            sockets.receive(connection, 32, soon())
            sockets.send(connection, [listening_proof(key)], soon())
            yield connection, key

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.thread.join()
        self.listener.close()


def send_more(channel, stream, request):
    channel.send(PullAccepted(request.transfer_id), soon())
    sockets.send(stream, [struct.pack("<QQQ", request.transfer_id, 0, 1000), b"\xff" * 1000], soon())


def send_elsewhere(channel, stream, request):
    channel.send(PullAccepted(request.transfer_id), soon())
    sockets.send(stream, [struct.pack("<QQQ", request.transfer_id, 8, 16), b"\xff" * 16], soon())


@pytest.mark.parametrize(
    "answer",
    [
        send_more,
        send_elsewhere,
        lambda channel, _, request: channel.send(PullAccepted(request.transfer_id + 1), soon()),
        lambda channel, _, request: channel.send(PullRefused(request.transfer_id + 1, 2, ""), soon()),
        lambda channel, _, request: channel.send(PullRefused(request.transfer_id, 0, "success"), soon()),
        lambda channel, _, request: channel.send(PullRefused(request.transfer_id, 200, "?"), soon()),
        lambda channel, _, request: channel.send(PullConfirmed(request.transfer_id), soon()),
        lambda channel, _, request: channel._connection.send(b"\xff" * 100),
        lambda channel, _, request: channel.shut_down(),
    ],
    ids=["more", "elsewhere", "accepts-other", "refuses-other", "success", "code", "early", "garbage", "end"],
)  # fmt: skip
def test_a_prompt_that_lies_breaks_its_link_and_writes_nowhere_else(answer):
    with RawPrompt(answer) as prompt, started(LLMRole.DECODER, DECODER_ID) as decoder:
        assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
        manager = decoder.kv_cache_manager
        cache = manager.allocate_cache(DESC)
        with pytest.raises(LLMException) as raised:
            manager.pull_cache(CacheKey(PROMPT_ID, 5), cache, 2)
        assert raised.value.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        for index in range(2):
            values = manager.get_cache_tensors(cache, index)[0].numpy()
            assert not np.delete(values, 2, axis=0).any()
        with pytest.raises(LLMException) as raised:
            manager.pull_cache(CacheKey(PROMPT_ID, 5), cache, 2)
        assert raised.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK


def test_a_pull_whose_confirmation_is_lost_has_succeeded_and_its_link_is_broken():
    def answer(channel, stream, request):
        channel.send(PullAccepted(request.transfer_id), soon())
        sockets.send(
            stream,
            [
                struct.pack("<QQQ", request.transfer_id, 0, 16),
                b"\x05" * 16,
                struct.pack("<Q", Checksum().value),
            ],
            soon(),
        )
        channel.receive(soon())
        channel.shut_down()

    with RawPrompt(answer) as prompt, started(LLMRole.DECODER, DECODER_ID, checksum="0") as decoder:
        assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
        manager = decoder.kv_cache_manager
        cache = manager.allocate_cache(DESC)
        manager.pull_cache(CacheKey(PROMPT_ID, 5), cache)
        assert (manager.get_cache_tensors(cache)[0].numpy()[0] == 5).all()
        with pytest.raises(LLMException) as raised:
            manager.pull_cache(CacheKey(PROMPT_ID, 5), cache)
        assert raised.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK


def test_nothing_is_left_of_links_threads_and_sockets():
    with started(LLMRole.PROMPT, PROMPT_ID), started(LLMRole.DECODER, DECODER_ID):
        pass  # whatever is imported or opened once
    before, threads = num_open(), set(threading.enumerate())
    for _ in range(3):
        with started(LLMRole.PROMPT, PROMPT_ID) as prompt, started(LLMRole.DECODER, DECODER_ID) as decoder:
            peer = address_of(prompt)
            for _ in range(3):
                assert decoder.link_clusters([peer])[0] is LLMStatusCode.LLM_SUCCESS
                assert decoder.unlink_clusters([peer])[0] is LLMStatusCode.LLM_SUCCESS
            decoder.link_clusters([peer])
            with RawDecoder(prompt, cluster_id=77) as half_open:
                half_open.request()
    wait_until_closed(before)
    assert set(threading.enumerate()) <= threads


def test_a_failed_link_leaves_nothing_behind(prompt):
    with started(LLMRole.DECODER, DECODER_ID) as decoder:  # without the token
        threads = set(threading.enumerate())
        for _ in range(5):
            assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_LINK_FAILED
        assert set(threading.enumerate()) <= threads
        assert transports_of(decoder) == {}
