"""The publisher with real ZeroMQ subscribers: late, slow, and never there."""

from __future__ import annotations

import contextlib
import threading
from socket import socket as tcp_socket
from socket import socketpair

import msgspec
import pytest
import zmq

from held import num_held
from quire.config import KVEventsConfig
from quire.engine import kv_events
from quire.engine.kv_events import END_OF_REPLAY, KVEventPublisher, KVEventSubscriber
from quire.errors import ConfigError
from quire.kv.blocks.events import AllBlocksCleared, BlockRemoved, KVEventBatch

LOCAL = "tcp://127.0.0.1:*"
PATIENCE = 60.0  # seconds, for what comes at once


TOPIC = "kv@pod@model"


def removed(number: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[number], medium="GPU")


def numbers(batches: list[KVEventBatch]) -> list[int | None]:
    """Which `removed(number)` the batches hold; None for a clearing."""
    events = [event for batch in batches for event in batch.events]
    return [None if isinstance(event, AllBlocksCleared) else event.block_hashes[0] for event in events]


@pytest.fixture
def publisher():
    publisher = KVEventPublisher(LOCAL, LOCAL, topic=TOPIC, buffer_steps=100)
    yield publisher
    publisher.close()


@pytest.fixture
def follow():
    subscribers = []

    def connect(publisher: KVEventPublisher, **options) -> KVEventSubscriber:
        subscriber = KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint, **options)
        subscribers.append(subscriber)
        return subscriber

    yield connect
    for subscriber in subscribers:
        subscriber.close()


def publish_until_received(publisher: KVEventPublisher, subscriber: KVEventSubscriber, first: int):
    """Publish numbered events until the subscription has taken hold; return (batches, next number)."""
    number = first
    while True:
        publisher.publish([removed(number)])
        number += 1
        if batches := subscriber.receive(0.02):
            return batches, number


def receive_up_to(subscriber: KVEventSubscriber, last: int) -> list[int | None]:
    seen: list[int | None] = []
    while last not in seen:
        batches = subscriber.receive(PATIENCE)
        assert batches, f"nothing came, after {seen}"
        seen += numbers(batches)
    return seen


def test_who_joins_late_gets_all_from_the_start(publisher, follow):
    for number in range(20):
        publisher.publish([removed(number)])
    subscriber = follow(publisher)
    batches, end = publish_until_received(publisher, subscriber, 20)
    seen = numbers(batches)
    publisher.publish([removed(end)])
    assert seen + receive_up_to(subscriber, end) == [None, *range(end + 1)]


def test_without_replay_what_was_missed_is_a_clearing(follow):
    publisher = KVEventPublisher(LOCAL, topic=TOPIC)
    for number in range(20):
        publisher.publish([removed(number)])
    subscriber = follow(publisher)
    batches, end = publish_until_received(publisher, subscriber, 20)
    assert numbers(batches)[0] is None
    publisher.publish([removed(end)])
    assert receive_up_to(subscriber, end)[-1] == end
    publisher.close()


def test_the_buffer_is_bounded_and_a_gap_is_a_clearing(follow):
    publisher = KVEventPublisher(LOCAL, LOCAL, topic=TOPIC, buffer_steps=8)
    with raw_socket(publisher.endpoint, zmq.SUB) as socket:
        receive_first(publisher, socket)
    first = 1000
    while replay(publisher, 0)[-1] < 40:  # in the thread's order: all batches have been taken
        publisher.publish([removed(first)])
        first += 1
    subscriber = follow(publisher)
    batches, end = publish_until_received(publisher, subscriber, first)
    seen = numbers(batches)
    assert seen[0] is None
    assert None not in seen[1:]
    assert len(seen) <= 1 + 8 + 1
    assert seen[1:] == list(range(end - len(seen) + 1, end))
    assert len(replay(publisher, 0)) == 8
    publisher.close()


@pytest.mark.parametrize(
    "num_before", [pytest.param(0, id="lower-numbers"), pytest.param(1000, id="higher-numbers")]
)
@pytest.mark.parametrize("replay_endpoint", ["", LOCAL])
def test_a_restarted_engine_is_a_clearing(follow, num_before, replay_endpoint):
    started, restarted = 1.0, 2.0
    publisher = KVEventPublisher(LOCAL, replay_endpoint, topic=TOPIC, clock=lambda: started)
    subscriber = follow(publisher)
    publish_until_received(publisher, subscriber, 0)
    endpoint, replay_endpoint = publisher.endpoint.replace("127.0.0.1", "*"), publisher.replay_endpoint
    publisher.close()
    publisher = KVEventPublisher(endpoint, replay_endpoint, topic=TOPIC, clock=lambda: restarted)
    for number in range(num_before):
        publisher.publish([removed(number)])
    batches: list[KVEventBatch] = []
    while not any(batch.ts == restarted for batch in batches):
        publisher.publish([removed(7)])
        batches += subscriber.receive(0.02)
    since = [batch for batch in batches if batch.ts == restarted]
    assert numbers(since)[0] is None
    assert 7 in numbers(since)
    if replay_endpoint:  # all that the new one has published
        assert numbers(since)[: num_before + 1] == [None, *range(num_before)]
    publisher.close()


def raw_socket(endpoint: str, kind: int) -> zmq.Socket:
    socket = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.rcvtimeo = int(PATIENCE * 1000)
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(endpoint)
    return socket


def receive_first(publisher: KVEventPublisher, socket: zmq.Socket) -> list[bytes]:
    """Publish `removed(0)` until one comes; the clearing at the start may come before it."""
    while True:
        publisher.publish([removed(0)])
        while socket.poll(20):
            frames = socket.recv_multipart()
            if b"BlockRemoved" in frames[2]:
                return frames


def replay(publisher: KVEventPublisher, first: int) -> list[int]:
    with raw_socket(publisher.replay_endpoint, zmq.DEALER) as socket:
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while (frames := socket.recv_multipart())[2] != END_OF_REPLAY:
            assert frames[:2] == [b"", TOPIC.encode()]
            found.append(int.from_bytes(frames[2], "big"))
        assert frames == [b"", b"", END_OF_REPLAY, b""]
        return found


def test_the_wire_is_topic_number_batch(publisher):
    with raw_socket(publisher.endpoint, zmq.SUB) as socket:
        topic, number, batch = receive_first(publisher, socket)
    assert topic == TOPIC.encode()
    assert len(number) == 8
    _, events, _ = msgspec.msgpack.decode(batch)
    assert events == [{"type": "BlockRemoved", "block_hashes": [0], "medium": "GPU"}]


def test_a_replay_begins_where_asked(publisher):
    for number in range(10):
        publisher.publish([removed(number)])
    assert replay(publisher, 0)[:1] == [0]
    while replay(publisher, 0)[-1] < 10:
        pass
    assert replay(publisher, 7) == [7, 8, 9, 10]
    assert replay(publisher, 11) == []


def test_a_malformed_replay_request_is_ignored(publisher):
    with raw_socket(publisher.replay_endpoint, zmq.DEALER) as socket:
        socket.send_multipart((b"nonsense",))
        socket.send_multipart((b"", b"short"))
    assert replay(publisher, 0) == [0]


def test_nobody_and_a_slow_subscriber_block_nothing(tmp_path):
    endpoint = f"ipc://{tmp_path}/slow"
    publisher = KVEventPublisher(endpoint, topic=TOPIC, buffer_steps=4)
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.rcvhwm = 1
    socket.subscribe(b"")
    socket.connect(endpoint)
    held = num_held(publisher)
    for number in range(5000):
        publisher.publish([removed(number)])
    assert num_held(publisher) <= held + 200
    context.destroy(linger=0)
    publisher.close()


def num_queued(publisher: KVEventPublisher) -> int:
    return len(publisher._queue)


def test_a_full_queue_drops_whole_batches_with_their_numbers(publisher):
    count = 0
    while not publisher.num_dropped:  # handed over far faster than they can be sent
        publisher.publish([removed(count)])
        count += 1
    while num_queued(publisher):
        replay(publisher, 10_000)
    publisher.publish([removed(0)])
    while (kept := replay(publisher, 0))[-1] != count + 1:  # the clearing at the start has number 0
        pass
    assert count not in kept
    assert kept == sorted(kept)


def test_closing_sends_what_is_queued():
    publisher = KVEventPublisher(LOCAL, LOCAL, topic=TOPIC)
    with raw_socket(publisher.endpoint, zmq.SUB) as socket:
        receive_first(publisher, socket)
        for number in (97, 98, 99):
            publisher.publish([removed(number)])
        publisher.close()
        publisher.close()
        seen: list[int | None] = []
        while 99 not in seen and socket.poll(PATIENCE * 1000):
            seen += numbers([msgspec.msgpack.decode(socket.recv_multipart()[2], type=KVEventBatch)])
    assert seen[-3:] == [97, 98, 99]


def test_an_address_in_use_is_a_config_error(publisher):
    with pytest.raises(ConfigError, match=r"KVEventsConfig\.kv_events_endpoint is .* cannot be bound"):
        KVEventPublisher(publisher.endpoint.replace("127.0.0.1", "*"), topic=TOPIC)
    with pytest.raises(ConfigError, match=r"kv_events_replay_endpoint is 'nonsense'"):
        KVEventPublisher(LOCAL, "nonsense", topic=TOPIC)


@pytest.mark.parametrize(
    ("endpoint", "replay_endpoint", "have_ports"),
    [
        ("tcp://*:*", LOCAL, True),
        (LOCAL, "", False),
        ("inproc://live", LOCAL, False),
        ("tcp://127.0.0.1:1", LOCAL, False),  # connected to
        (LOCAL, "inproc://replay", False),
    ],
)
def test_ports_are_told_if_both_sockets_have_one(endpoint, replay_endpoint, have_ports):
    publisher = KVEventPublisher(endpoint, replay_endpoint, topic=TOPIC)
    if have_ports:
        live, replayed = publisher.tcp_ports
        with raw_socket(f"tcp://127.0.0.1:{live}", zmq.SUB) as socket:
            receive_first(publisher, socket)
        assert publisher.replay_endpoint == f"tcp://127.0.0.1:{replayed}"
    else:
        assert publisher.tcp_ports is None
    publisher.close()


def test_a_close_is_seen_if_its_wake_up_is_taken_with_an_earlier_one(monkeypatch):
    is_reading, may_read = threading.Event(), threading.Event()

    class Slow(tcp_socket):
        def recv(self, *arguments):
            is_reading.set()
            may_read.wait(10)
            return super().recv(*arguments)

    def slow_pair():
        wake, woken = socketpair()
        return wake, Slow(fileno=woken.detach())

    monkeypatch.setattr(kv_events, "socketpair", slow_pair)
    publisher = KVEventPublisher("inproc://live", topic=TOPIC)
    assert is_reading.wait(10)  # for its first batch
    closing = threading.Thread(target=publisher.close, daemon=True)
    closing.start()
    closing.join(0.2)
    may_read.set()
    closing.join(10)
    assert not closing.is_alive()


def test_many_engines_publish_to_one_subscriber():
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"kv@")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        publishers = [
            KVEventPublisher(
                f"tcp://127.0.0.1:{port}", topic=f"kv@pod{number}@model", data_parallel_rank=rank
            )
            for number, rank in enumerate([None, 0])
        ]
        seen = set()
        while len(seen) < 2:
            for publisher in publishers:  # what comes before the connection is lost
                publisher.publish([removed(0)])
            while socket.poll(20):
                topic, _, batch = socket.recv_multipart()
                seen.add((topic, *msgspec.msgpack.decode(batch)[2:]))
        for publisher in publishers:
            publisher.close()
    assert seen == {(b"kv@pod0@model", None), (b"kv@pod1@model", 0)}


def first_of_two_free_ports() -> int:
    while True:
        with tcp_socket() as one, tcp_socket() as next_one, contextlib.suppress(OSError):
            one.bind(("", 0))
            port = one.getsockname()[1]
            next_one.bind(("", port + 1))
            return port


def test_replicas_of_one_address_have_ports_of_their_own():
    port = first_of_two_free_ports()
    publisher = KVEventPublisher(
        f"tcp://*:{port - 3}", f"tcp://127.0.0.1:{port - 2}", topic=TOPIC, data_parallel_rank=3
    )
    assert publisher.tcp_ports == (port, port + 1)
    publisher.close()


def test_replay_without_publishing_is_a_config_error():
    with pytest.raises(ConfigError, match=r"set KVEventsConfig\.kv_events_endpoint too"):
        KVEventsConfig(kv_events_replay_endpoint=LOCAL)
    KVEventsConfig(kv_events_endpoint=LOCAL, kv_events_replay_endpoint=LOCAL)


def test_a_batch_that_cannot_be_encoded_is_a_gap(publisher, follow, caplog):
    subscriber = follow(publisher)
    publish_until_received(publisher, subscriber, 1)
    publisher.publish([BlockRemoved(block_hashes=[object()], medium="GPU")])
    publisher.publish([removed(10**6)])
    assert receive_up_to(subscriber, 10**6)[-2:] == [None, 10**6]
    assert "cannot be encoded" in caplog.text


def test_a_thread_that_fails_blocks_neither_publishing_nor_closing(caplog, monkeypatch):
    publisher = KVEventPublisher(LOCAL, topic=TOPIC, buffer_steps=3)
    monkeypatch.setattr(publisher, "_send_batch", None)
    publisher.publish([removed(1)])
    for thread in threading.enumerate():  # it may have ended already
        if thread.name == "quire-kv-events":
            thread.join(PATIENCE)
            assert not thread.is_alive()
    for number in range(9):
        publisher.publish([removed(number)])
    assert num_queued(publisher) <= 3
    publisher.close()
    publisher.close()
    assert "no longer published" in caplog.text
