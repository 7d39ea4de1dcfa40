"""Pushes between a side and a peer that need not keep to the protocol."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
from failing import fails_with
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_peers import DECODER_ID, PROMPT_ID, RawDecoder, address_of, connection_to, soon, started
from sides import byte_desc, num_transfers, register_new

from quire.datadist import BlocksCacheKey, CacheDesc, DataType, LLMException, LLMRole, LLMStatusCode
from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import HostMemory
from quire.datadist.caches.spans import slot_spans
from quire.datadist.links.push_receiver import PushReceiver, hold_target, target_spans
from quire.datadist.links.push_sender import FIRST_TRANSFER, PushSender
from quire.datadist.wire import sockets
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting
from quire.datadist.wire.protocol import (
    BlocksSource,
    ControlChannel,
    LayerRange,
    LinkOffer,
    NumberedBlocksSource,
    SlotSource,
    encode_runs,
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

DESC = CacheDesc(2, [4, 8], DataType.DT_UINT8)
TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
FIRST = FIRST_TRANSFER


def runs_of(pairs) -> bytes:
    starts, counts = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return encode_runs(starts, counts)


TWICE = BlocksSource(0, 8, runs_of([(0, 2), (1, 1)]))


def push_request(**changes) -> PushRequest:
    fields = {
        "transfer_id": FIRST,
        "target": BlocksSource(0, 8, runs_of([(0, 1)])),
        "data_type": DataType.DT_UINT8,
        "num_tensors": 2,
        "layers": None,
        "num_bytes": 8,
        "timeout_ms": 5000,
    }
    return PushRequest(**(fields | changes))


# -- a PROMPT that is none ---------------------------------------------------------------------------------


some_runs = st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), min_size=1, max_size=3).map(runs_of)


@settings(max_examples=200)
@given(
    target=st.builds(SlotSource, st.integers(0, 4), st.integers(0, 5))
    | st.builds(BlocksSource, st.integers(0, 1), st.sampled_from([8, 8, 7]), some_runs)
    | st.builds(NumberedBlocksSource, st.integers(0, 4), st.sampled_from([8, 8, 7]), some_runs),
    num_tensors=st.integers(0, 3),
    layers=st.none() | st.builds(LayerRange, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    num_bytes=st.integers(0, 40),
)
def test_whatever_is_taken_is_within_a_registered_cache_and_written_once(**fields):
    pool = CachePool(HostMemory)
    pool.allocate(DESC)
    pool.allocate_blocks(DESC, BlocksCacheKey(1, 1))
    pool.register(DESC, HostMemory(DESC))
    pool.register_blocks(DESC, HostMemory(DESC), BlocksCacheKey(1))
    request, hold = push_request(**fields), None
    try:
        hold = hold_target(pool, request)
        spans = target_spans(hold, request)
    except LLMException:
        pass
    else:
        assert hold.cache.is_registered
        assert spans.num_bytes == fields["num_tensors"] * fields["num_bytes"]
        parts = [part for window in spans.windows(0, spans.num_bytes) for part in window]
        touched = [(tensor, offset + byte) for tensor, offset, length in parts for byte in range(length)]
        assert len(set(touched)) == len(touched)
        assert all(0 <= tensor < 2 and 0 <= byte < 32 for tensor, byte in touched)
    finally:
        if hold is not None:
            hold.end(consume=False)
    assert num_transfers(pool) == 0


@settings(max_examples=200)
@given(
    tensors=st.lists(st.integers(0, 5), min_size=1, max_size=3) | st.sampled_from([[0, 1], [2, 3], [4, 5]]),
    delta=st.sampled_from([0, 0, 8, 3, 31, 32, -1]),
    num_tensors=st.integers(1, 3) | st.just(2),
    block_bytes=st.sampled_from([8, 8, 7]),
    runs=st.just(b"") | some_runs,
    num_bytes=st.integers(0, 40) | st.just(8),
)
@pytest.mark.parametrize("is_blocks", [False, True])
def test_addresses_reach_no_byte_but_those_of_one_cache(
    is_blocks, tensors, delta, num_tensors, block_bytes, runs, num_bytes
):
    pool, memory = CachePool(HostMemory), HostMemory(DESC)
    allocated, model = pool.allocate(DESC), pool.allocate(DESC, is_of_model=True)
    cache = pool.register_blocks(DESC, memory, None) if is_blocks else pool.register(DESC, memory)
    known = [
        *memory.addresses(), *allocated.memory.addresses(), *model.memory.addresses(),
    ]  # fmt: skip
    target = AddressedTarget([known[one] + delta for one in tensors], block_bytes, runs)
    request, hold = push_request(target=target, num_tensors=num_tensors, num_bytes=num_bytes), None
    try:
        hold = hold_target(pool, request)
        spans = target_spans(hold, request)
    except LLMException:
        pass
    else:
        assert hold.cache in (cache, allocated)
        assert spans.num_bytes == num_tensors * num_bytes
        parts = [part for window in spans.windows(0, spans.num_bytes) for part in window]
        touched = [(tensor, offset + byte) for tensor, offset, length in parts for byte in range(length)]
        assert len(set(touched)) == len(touched)
        first = 0 if hold.cache is cache else 2
        assert {first + tensor for tensor, _ in touched} == set(tensors)
        assert all(0 <= byte < 32 for _, byte in touched)
        assert hold.cache.is_blocks or len({byte // 8 for _, byte in touched}) == 1
    finally:
        if hold is not None:
            hold.end(consume=False)
    assert not cache.num_transfers


class Destination:
    """Takes what comes, or fails."""

    def __init__(self, error=None) -> None:
        self.error, self.taken = error, []

    def receive(self, transfer_id, memory, spans, deadline) -> None:
        self.taken.append((transfer_id, spans.num_bytes))
        if self.error is not None:
            raise self.error


class Receiver:
    """A `PushReceiver` with one registered cache, and the PROMPT's end of its connection."""

    def __init__(self, error=None) -> None:
        mine, theirs = socket.socketpair()
        for one in (mine, theirs):
            one.setblocking(False)
        self.channel = ControlChannel(theirs, msgspec.msgpack.Decoder(FromPushReceiver))
        self.connection = theirs
        self.destination, self.busy = Destination(error), threading.Lock()
        self.broken, self.reasons = threading.Event(), []
        self.pool = CachePool(HostMemory)
        self.pool.register_blocks(DESC, HostMemory(DESC), BlocksCacheKey(1))
        self.channel.send(PushesReady(), soon())
        self.receiver = PushReceiver(
            mine,
            self.pool,
            self.destination,
            use_link=self.use,
            break_link=self.end,
            deadline=soon(),
        )

    @contextlib.contextmanager
    def use(self, deadline):
        if not self.busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LLMException(status_code=TIMEOUT)
        try:
            yield
        finally:
            self.busy.release()

    def end(self, reason: str) -> None:
        self.reasons.append(reason)
        self.broken.set()


@pytest.fixture
def new_receiver():
    made = []

    def new(error=None) -> Receiver:
        made.append(Receiver(error))
        return made[-1]

    yield new
    for one in made:
        one.receiver.shut_down()
        one.connection.close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"target": BlocksSource(7, 8, runs_of([(0, 1)]))}, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        ({"target": BlocksSource(0, 8, runs_of([(4, 1)]))}, LLMStatusCode.LLM_PARAM_INVALID),
        (
            {"target": BlocksSource(0, 8, runs_of([(0, 2), (1, 1)])), "num_bytes": 24},
            LLMStatusCode.LLM_PARAM_INVALID,
        ),
        ({"target": BlocksSource(0, 16, runs_of([(0, 1)]))}, LLMStatusCode.LLM_PARAM_INVALID),
        ({"target": SlotSource(1, 0)}, LLMStatusCode.LLM_PARAM_INVALID),
        ({"num_bytes": 16}, LLMStatusCode.LLM_PARAM_INVALID),
        ({"num_tensors": 1}, LLMStatusCode.LLM_PARAM_INVALID),
        ({"data_type": 77}, LLMStatusCode.LLM_PARAM_INVALID),
        ({"layers": LayerRange(0, 9, 2)}, LLMStatusCode.LLM_PARAM_INVALID),
    ],
)
def test_what_does_not_fit_is_refused_and_the_link_goes_on(new_receiver, changes, code):
    made = new_receiver()
    made.channel.send(push_request(**changes), soon())
    refused = made.channel.expect(PushRefused, soon())
    assert (refused.transfer_id, refused.status_code) == (FIRST, code)
    made.channel.send(push_request(), soon())
    made.channel.expect(PushAccepted, soon())
    made.channel.expect(PushCompleted, soon())
    assert made.destination.taken == [(FIRST, 16)]
    assert not made.reasons


@pytest.mark.parametrize(
    "message", [PushesReady(), push_request(target=BlocksSource(0, 8, b"x" * 17)), PushAccepted(1), None]
)
def test_a_prompt_that_breaks_the_protocol_loses_the_link(new_receiver, message):
    made = new_receiver()
    if message is None:
        sockets.send(made.connection, [b"\xff" * 64], soon())
    else:
        made.channel.send(message, soon())
    assert made.broken.wait(20)
    assert not made.destination.taken
    assert num_transfers(made.pool) == 0


@pytest.mark.parametrize("error", [OSError("cut"), RuntimeError("no thread"), MemoryError()])
def test_a_fault_at_the_destination_breaks_the_link_before_anything_uses_it(new_receiver, error):
    made = new_receiver(error)
    made.channel.send(push_request(), soon())
    made.channel.expect(PushAccepted, soon())
    assert made.broken.wait(20)
    with pytest.raises(OSError, match=r"\w"):
        made.channel.receive(soon())
    assert num_transfers(made.pool) == 0


def test_a_link_in_use_and_lost_memory_refuse_a_push(new_receiver):
    made = new_receiver()
    with made.busy:
        made.channel.send(push_request(timeout_ms=1), soon())
        assert made.channel.expect(PushRefused, soon()).status_code == TIMEOUT
    made.pool.cache(1).memory.is_lost = True
    made.channel.send(push_request(), soon())
    assert made.channel.expect(PushRefused, soon()).status_code == LLMStatusCode.LLM_FAILED
    assert not made.reasons


# -- a DECODER that is none --------------------------------------------------------------------------------


class Sender:
    """A `PushSender`, and the DECODER's end of its connection."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        for one in (mine, theirs):
            one.setblocking(False)
        self.connection, self.reasons, self.sent = theirs, [], []
        self.channel = ControlChannel(theirs, msgspec.msgpack.Decoder(FromPushSender))
        self.sender = PushSender(mine, "DECODER 2", self.send, self.reasons.append)
        self.sender.announce()
        self.channel.expect(PushesReady, soon())

    def send(self, transfer_id, memory, spans, deadline) -> None:
        self.sent.append(transfer_id)

    def push(self, seconds: float = 20) -> None:
        spans = slot_spans(range(2), 0, 8)
        self.sender.push(push_request(), HostMemory(DESC), spans, time.monotonic() + seconds)


@pytest.fixture
def sender():
    made = Sender()
    yield made
    made.sender.close()
    made.connection.close()


def encoded(*messages) -> bytes:
    parts = [msgspec.msgpack.encode(one) for one in messages]
    return b"".join(len(one).to_bytes(4, "little") + one for one in parts)


@pytest.mark.parametrize(
    ("answer", "num_sent"),
    [
        (encoded(PushAccepted(FIRST + 1)), 0),
        (encoded(PushCompleted(FIRST)), 0),
        (encoded(PushRefused(FIRST + 1, 5, "")), 0),
        (encoded(PushRefused(FIRST, 0, "")), 0),
        (encoded(PushRefused(FIRST, 99, "")), 0),
        (encoded(PushesReady()), 0),
        (b"\xff" * 8, 0),
        (encoded(PushAccepted(FIRST), PushCompleted(FIRST + 1)), 1),
        (encoded(PushAccepted(FIRST), PushAccepted(FIRST)), 1),
        (encoded(PushAccepted(FIRST), PushRefused(FIRST, 5, "")), 1),
    ],
)
def test_a_decoder_that_breaks_the_protocol_loses_the_link(sender, answer, num_sent):
    thread = threading.Thread(target=answer_one, args=(sender, answer))
    thread.start()
    with fails_with(TIMEOUT):
        sender.push()
    thread.join()
    assert (len(sender.sent), len(sender.reasons)) == (num_sent, 1)


def answer_one(sender: Sender, answer: bytes) -> None:
    sender.channel.expect(PushRequest, soon())
    sockets.send(sender.connection, [answer], soon())


def test_a_refusal_and_another_push(sender):
    answer = encoded(PushRefused(FIRST, LLMStatusCode.LLM_PARAM_INVALID, "too large"))
    thread = threading.Thread(target=answer_one, args=(sender, answer))
    thread.start()
    with pytest.raises(LLMException, match="too large"):
        sender.push()
    thread.join()
    answer = encoded(PushAccepted(FIRST + 1), PushCompleted(FIRST + 1))
    thread = threading.Thread(target=answer_one, args=(sender, answer))
    thread.start()
    sender.push()
    thread.join()
    assert (sender.sent, sender.reasons) == ([FIRST + 1], [])


def test_a_decoder_that_says_nothing_or_is_gone(sender):
    with fails_with(TIMEOUT):
        sender.push(0.02)
    sender.connection.close()
    with fails_with(LLMStatusCode.LLM_NOT_YET_LINK):
        sender.push()
    sender.sender.close()
    with fails_with(LLMStatusCode.LLM_NOT_YET_LINK):
        sender.push()
    assert not sender.sent


@pytest.fixture
def prompt():
    with started(LLMRole.PROMPT, PROMPT_ID, transports="tcp") as side:
        yield side


def open_pushes(link: RawDecoder, link_id: int | None = None, key: bytes | None = None) -> ControlChannel:
    connection = connection_to(link.prompt)
    link.streams.append(connection)
    chosen = link.offer.link_id if link_id is None else link_id
    greeting = new_greeting(ConnectionKind.PUSHES, 0, chosen)
    greet(connection, link.key if key is None else key, greeting, soon())
    return ControlChannel(connection, msgspec.msgpack.Decoder(FromPushSender))


def test_pushes_have_one_connection_of_an_established_link(prompt):
    with RawDecoder(prompt) as link:
        link.request()
        link.offer = link.channel.expect(LinkOffer, soon())
        with pytest.raises(OSError, match=r"\w"):
            open_pushes(link).receive(soon())
    with RawDecoder(prompt).link() as link:
        for link_id, key in ((link.offer.link_id ^ 1, None), (None, b"x" * 32)):
            with pytest.raises(OSError, match=r"\w"):
                open_pushes(link, link_id, key).receive(soon())
        open_pushes(link).expect(PushesReady, soon())
        with pytest.raises(OSError, match=r"\w"):
            open_pushes(link).receive(soon())


def test_a_prompt_that_never_gets_ready_for_pushes_is_linked_without_them(prompt, monkeypatch):
    from quire.datadist.links.prompt_link import PromptLink

    monkeypatch.setattr(PromptLink, "attach_pushes", lambda *_: False)
    with started(LLMRole.DECODER, DECODER_ID, transports="tcp") as decoder:
        cache = register_new(decoder.kv_cache_manager, byte_desc(), BlocksCacheKey(2), seed=1)
        assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
        decoder.check_link_status(PROMPT_ID)
        source = prompt.kv_cache_manager.allocate_blocks_cache(byte_desc())
        with fails_with(LLMStatusCode.LLM_PARAM_INVALID):
            prompt.kv_cache_manager.push_blocks(BlocksCacheKey(2), source, [0], [0])
        assert cache.cache_id == 1
