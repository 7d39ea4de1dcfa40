"""Following the events of a real publisher, and of peers that are none."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
import pytest
import zmq
import zmq.asyncio
from fake_upstream import digests_of

from held import num_held
from quire.cluster.engines.kv_event_feed import BLOCKS_PER_TURN, MAX_MESSAGE_BYTES, EventSource, KVEventFeed
from quire.cluster.engines.registry import Engine, Role
from quire.cluster.prefixes.block_index import BlockIndex
from quire.engine.kv_events import END_OF_REPLAY, KVEventPublisher
from quire.kv.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

LOCAL = "tcp://127.0.0.1:*"
BLOCK = 4
PATIENCE = 60.0  # seconds, for what comes at once
SOON = 0.01  # seconds, after which what never comes is given up


TOPIC = "kv@pod@model"


def stored(*numbers: int) -> BlockStored:
    return BlockStored(
        block_hashes=list(numbers), parent_block_hash=None, token_ids=[0] * BLOCK * len(numbers),
        block_size=BLOCK, lora_id=None, medium="GPU", lora_name=None,
    )  # fmt: skip


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(numbers), medium="GPU")


@contextlib.asynccontextmanager
async def following(ports, *, max_blocks=10**6, interval=SOON, timeout=PATIENCE):
    """Follow what is published at these ports as the events of an engine; yields the engine."""
    engine = Engine("http://127.0.0.1:1", Role.BOTH)
    source = EventSource("127.0.0.1", *ports, BLOCK, "", engine.id)
    context = zmq.asyncio.Context()
    index = BlockIndex(max_blocks)
    held = num_held(index)
    feed = KVEventFeed(engine, source, context, index, interval=interval, timeout=timeout)
    task = asyncio.create_task(feed.run())
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.blocks is None
        assert num_held(index) == held
        context.destroy(linger=0)


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0)


def known(engine):
    return (
        None if engine.blocks is None else [int.from_bytes(one, "big") for one in digests_of(engine.blocks)]
    )


async def until_known(engine, *numbers):
    await until(lambda: known(engine) == list(numbers))


@pytest.fixture
def publisher():
    publisher = KVEventPublisher(LOCAL, LOCAL, topic=TOPIC)
    yield publisher
    publisher.close()


async def test_what_was_cached_before_and_what_comes_is_known(publisher):
    publisher.publish([stored(1, 2), stored(3), removed(2)])
    async with following(publisher.tcp_ports) as engine:
        await until_known(engine, 1, 3)
        for number in range(4, 40):
            publisher.publish([stored(number), removed(number - 1)])
        await until_known(engine, 1, 39)
        publisher.publish([AllBlocksCleared(), stored(7)])
        await until_known(engine, 7)


async def test_a_large_event_is_applied_in_parts(publisher):
    numbers = range(2 * BLOCKS_PER_TURN + 1)
    publisher.publish([stored(*numbers)])
    async with following(publisher.tcp_ports, max_blocks=100) as engine:
        await until_known(engine, *numbers[-100:])
        publisher.publish([removed(*numbers[:-1])])
        await until_known(engine, numbers[-1])


async def test_what_is_missed_and_not_kept_is_forgotten():
    publisher = KVEventPublisher(LOCAL, LOCAL, topic=TOPIC, buffer_steps=4)
    publisher.publish([stored(1)])
    async with following(publisher.tcp_ports) as engine:
        await until_known(engine, 1)
        publisher._next_number += 1  # a batch for which there was no room
        publisher.publish([stored(2)])
        await until_known(engine, 2)
    publisher.close()


def published_again(ports, **options):
    """A publisher at the ports of one that has ended."""
    live, replay = ports
    return KVEventPublisher(f"tcp://*:{live}", f"tcp://127.0.0.1:{replay}", topic=TOPIC, **options)


@pytest.mark.parametrize("num_before", [0, 300])
async def test_the_blocks_of_an_engine_that_was_restarted_are_forgotten(num_before):
    publisher = KVEventPublisher(LOCAL, LOCAL, topic=TOPIC)
    for number in range(100):
        publisher.publish([stored(number)])
    ports = publisher.tcp_ports
    async with following(ports) as engine:
        await until_known(engine, *range(100))
        publisher.close()
        publisher = published_again(ports)
        for number in range(num_before):
            publisher.publish([stored(1000 + number)])
        await until_known(engine, *range(1000, 1000 + num_before))
        while known(engine) != [*range(1000, 1000 + num_before), 2]:
            publisher.publish([stored(2)])
            await asyncio.sleep(SOON)  # until it has subscribed again
    publisher.close()


async def test_live_events_of_a_restarted_engine_are_not_taken_for_those_of_before(liar):
    def numbered(number, block):
        return number.to_bytes(8, "big"), encoded(stored(block))

    async with following(liar.ports, interval=PATIENCE) as engine:
        await liar.answer(*(numbered(number, number) for number in range(6)), END)
        await until_known(engine, *range(6))
        while known(engine) != [*range(6), 6]:  # until it has subscribed
            await liar.live.send_multipart((TOPIC.encode(), *numbered(6, 6)))
            await asyncio.sleep(0)
        while not await liar.replay.poll(10):  # until it has noticed the lower number
            await liar.live.send_multipart((TOPIC.encode(), *numbered(3, 103)))
        await liar.answer(numbered(6, 106), END)  # the number that it has, with another content
        await liar.answer(*(numbered(number, 100 + number) for number in range(7)), END)
        await until_known(engine, *range(100, 107))


async def test_events_that_are_cut_off_are_not_followed_until_they_are_back(caplog):
    publisher = KVEventPublisher(LOCAL, LOCAL, topic=TOPIC)
    publisher.publish([stored(1)])
    ports = publisher.tcp_ports
    async with following(ports, timeout=0.5) as engine:
        await until_known(engine, 1)
        publisher.close()
        await until(lambda: engine.blocks is None)
        publisher = published_again(ports)
        publisher.publish([stored(2)])
        await until_known(engine, 2)
        publisher.close()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "the KV events of http://127.0.0.1:1 are not followed: a replay was not answered within 0.5 s"
    ]


class Liar:
    """Answers replays with what it is told to."""

    def __init__(self):
        self.context = zmq.asyncio.Context()
        self.live = self.context.socket(zmq.PUB)
        self.replay = self.context.socket(zmq.ROUTER)
        self.ports = tuple(one.bind_to_random_port("tcp://127.0.0.1") for one in (self.live, self.replay))

    async def answer(self, *messages):
        peer, *_ = await self.replay.recv_multipart()
        for message in messages:
            await self.replay.send_multipart((peer, b"", TOPIC.encode(), *message))

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def liar():
    liar = Liar()
    yield liar
    liar.close()


END = (END_OF_REPLAY, b"")


def encoded(*events):
    return msgspec.msgpack.encode(KVEventBatch(0.0, list(events)))


NUMBER = (5).to_bytes(8, "big")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ((NUMBER, b"\xc1"), "an event is invalid"),
        ((NUMBER, encoded(removed(-1))), "`int` >= 0"),
        ((NUMBER, encoded(BlockRemoved(block_hashes=[b"x" * 8], medium=None))), "Expected `int`"),
        ((NUMBER, msgspec.msgpack.encode([0.0, [{"type": "Other"}]])), "an event is invalid"),
        ((NUMBER, msgspec.msgpack.encode([0.0, [["BlockRemoved", [1]]]])), "an event is invalid"),
        ((b"5", encoded()), "parts of [0, 12, 1, "),
        ((NUMBER,), "parts of [0, 12, 8]"),
    ],
)
async def test_what_is_not_an_event_ends_the_following(liar, caplog, message, words):
    async with following(liar.ports) as engine:
        await liar.answer((NUMBER, encoded(stored(1))), message)
        await until(lambda: caplog.records)
        assert engine.blocks is None
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert words in record.message
        await liar.answer((NUMBER, encoded(stored(2))), END)
        await until_known(engine, 2)


async def test_a_live_message_that_is_no_event_ends_the_following(liar, caplog):
    async with following(liar.ports, interval=PATIENCE) as engine:
        await liar.answer((NUMBER, encoded(stored(1))), END)
        await until_known(engine, 1)
        while engine.blocks is not None:  # until it has subscribed
            await liar.live.send_multipart((TOPIC.encode(), b"5", b"", b"more"))
            await asyncio.sleep(0)
        assert "parts of [12, 1, 0, 4] bytes" in caplog.text


async def test_what_was_missed_is_fetched_and_what_comes_twice_is_applied_once(liar):
    def numbered(number):
        return number.to_bytes(8, "big"), encoded(stored(number))

    async with following(liar.ports, interval=PATIENCE) as engine:
        await liar.answer(numbered(5), END)
        await until_known(engine, 5)
        while not await liar.replay.poll(10):  # until it has subscribed, and noticed that 6 is missing
            await liar.live.send_multipart((TOPIC.encode(), *numbered(7)))
        await liar.answer(numbered(5), numbered(6), numbered(7), numbered(8), END)
        for number in (7, 8, 9):
            await liar.live.send_multipart((TOPIC.encode(), *numbered(number)))
        await until_known(engine, 5, 6, 7, 8, 9)


async def test_a_message_that_is_too_large_is_not_taken(liar, caplog):
    async with following(liar.ports, timeout=0.5) as engine:
        await liar.answer((NUMBER, bytes(MAX_MESSAGE_BYTES + 1)), END)
        await until(lambda: "was not answered" in caplog.text)
        assert engine.blocks is None


async def test_an_endless_replay_starves_nobody(liar):
    async with following(liar.ports) as engine:
        await liar.answer(*[(NUMBER, encoded(stored(number))) for number in range(300)])
        turns = 0
        while liar.replay.get(zmq.EVENTS) & zmq.POLLIN == 0 and turns < 1000:
            turns += 1
            await asyncio.sleep(0)
        assert engine.blocks is None  # it is not complete
        assert turns == 1000


async def test_a_port_that_cannot_be_one_is_said(caplog):
    async with following((0x10000, -1)) as engine:
        await until(lambda: caplog.records)
        assert engine.blocks is None
        assert "the KV events of http://127.0.0.1:1 are not followed" in caplog.text


def test_addresses_name_the_host_of_the_engines_url():
    assert EventSource("engine1", 7, 8, 16, "", 1).address(7) == "tcp://engine1:7"
    assert EventSource("::1", 7, 8, 16, "", 1).address(8) == "tcp://[::1]:8"
