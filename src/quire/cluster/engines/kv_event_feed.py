"""Following the KV events of one engine: validated, bounded, and applied in small batches.

While they are followed, they are known to be complete: after a while without events, the engine is asked
whether any were missed. If it does not answer, all its blocks are forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from quire.cluster.engines.registry import Engine
from quire.cluster.prefixes.block_index import BlockIndex, EngineBlocks
from quire.engine.kv_events import END_OF_REPLAY, TOPIC_PREFIX
from quire.errors import QuireError
from quire.kv.blocks.events import HASH_BYTES

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 22

MAX_QUEUED_MESSAGES = 256
"""Maximum number of queued live messages; missed ones are requested again."""

BLOCKS_PER_TURN = 2048
"""Blocks applied before yielding to other tasks."""

_NUMBER_BYTES = 8

Socket = zmq.asyncio.Socket
Hash = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has none above 2**64 - 1


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """What is read of a `BlockStored`."""

    block_hashes: list[Hash]


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[Hash]


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


_decode = msgspec.msgpack.Decoder(_Batch).decode


class EventSource(NamedTuple):
    """The source of an engine's events; it changes when the engine fails.

    Args:
        host: host of the engine's URL.
        port, replay_port: TCP ports where events are published and replayed.
        block_size: tokens per block.
        tokenizer: fingerprint of the engine's tokenizer.
        engine_id: id of the engine, a new one after each failure.
    """

    host: str
    port: int
    replay_port: int
    block_size: int
    tokenizer: str
    engine_id: int

    def address(self, port: int) -> str:
        """Return a port's ZeroMQ address."""
        return f"tcp://[{self.host}]:{port}" if ":" in self.host else f"tcp://{self.host}:{port}"


class FeedError(QuireError):
    """The events of an engine cannot be followed."""


class KVEventFeed:
    """Follows the KV events of one engine, whose `blocks` are not None while they are complete.

    Args:
        engine: the engine.
        source: the source of its events.
        context: ZeroMQ context of the router.
        index: the blocks of all engines.
        interval: seconds without an event before the engine is asked for missed ones, and before a retry
            after a failure.
        timeout: seconds for the engine to answer.
    """

    def __init__(
        self,
        engine: Engine,
        source: EventSource,
        context: zmq.asyncio.Context,
        index: BlockIndex,
        *,
        interval: float,
        timeout: float,
    ) -> None:
        self.source = source
        self._engine = engine
        self._context = context
        self._index = index
        self._interval = interval
        self._timeout = timeout

    async def run(self) -> None:
        """Follow the events until cancelled, starting over after a failure."""
        last_failure = ""
        while True:
            try:
                await self._follow()
            except (FeedError, zmq.ZMQError) as error:
                if str(error) != last_failure:
                    logger.warning("the KV events of %s are not followed: %s", self._engine.url, error)
                last_failure = str(error)
            except Exception:
                logger.exception("the KV events of %s cannot be followed", self._engine.url)
            await asyncio.sleep(self._interval)

    async def _follow(self) -> None:
        """Follow the events until they fail.

        Raises:
            FeedError: a replay was not answered in time, or a message is invalid.
            ZMQError: the host or a port is invalid.
        """
        blocks = self._index.open(self.source.block_size, self.source.tokenizer)
        try:
            with (
                self._connected(zmq.SUB, self.source.port) as live,
                self._connected(zmq.DEALER, self.source.replay_port) as replay,
            ):
                follower = _Follower(live, replay, blocks, self._index, self._timeout)
                await follower.catch_up()
                logger.info("the KV events of %s are followed", self._engine.url)
                self._engine.blocks = blocks
                while True:
                    await follower.advance(self._interval)
        finally:
            self._engine.blocks = None
            self._index.close(blocks)

    @contextlib.contextmanager
    def _connected(self, kind: int, port: int) -> Iterator[Socket]:
        with self._context.socket(kind) as socket:
            socket.linger = 0
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            socket.rcvhwm = MAX_QUEUED_MESSAGES
            socket.ipv6 = ":" in self.source.host
            if kind == zmq.SUB:
                socket.subscribe(TOPIC_PREFIX)
            socket.connect(self.source.address(port))
            yield socket


class _Follower:
    """Applies the events of one engine in the order of their numbers, including missed ones."""

    def __init__(
        self, live: Socket, replay: Socket, blocks: EngineBlocks, index: BlockIndex, timeout: float
    ) -> None:
        self._live = live
        self._replay = replay
        self._blocks = blocks
        self._index = index
        self._timeout = timeout
        self._next = 0  # expected number of the next batch
        self._last = b""  # the batch before that
        self._last_live = 0  # the last live number: live batches before `_next` have been replayed

    async def advance(self, patience: float) -> None:
        """Apply the next live batch; if none arrives within `patience` seconds, apply missed ones."""
        if not await self._live.poll(_milliseconds(patience)):
            await self.catch_up()
            return
        match await self._live.recv_multipart():
            case [_, encoded_number, batch] if len(encoded_number) == _NUMBER_BYTES:
                number = int.from_bytes(encoded_number)
            case frames:
                raise FeedError(f"an event has parts of {list(map(len, frames))} bytes")
        if number > self._next or number < self._last_live:  # some were missed, or the engine has restarted
            await self.catch_up()
        self._last_live = number
        if number == self._next:
            await self._apply(number, batch)
        await asyncio.sleep(0)  # receiving queued messages does not yield

    async def catch_up(self) -> None:
        """Apply missed batches that the engine still has: all of them, if it is not the one of before.

        Raises:
            FeedError: the engine did not answer in time, or its answer is invalid.
        """
        if self._next and not await self._go_on_from(self._next - 1):
            self._next = 0
            self._blocks.clear()
        if not self._next:
            async for number, batch in self._replayed(0):
                await self._apply(number, batch)

    async def _go_on_from(self, first: int) -> bool:
        """Apply the batches behind number `first`; False if that is not the batch which this knows."""
        is_known = False
        async for number, batch in self._replayed(first):
            if is_known:
                await self._apply(number, batch)
            elif (number, batch) == (first, self._last):
                is_known = True
            else:
                first = -1  # whatever follows
        return is_known

    async def _replayed(self, first: int) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the batches that the engine still has, from number `first` on."""
        await self._replay.send_multipart((b"", first.to_bytes(_NUMBER_BYTES)))
        while True:
            if not await self._replay.poll(_milliseconds(self._timeout)):
                raise FeedError(f"a replay was not answered within {self._timeout:g} s")
            match await self._replay.recv_multipart():
                case [_, _, number, batch] if number == END_OF_REPLAY:
                    return
                case [_, _, number, batch] if len(number) == _NUMBER_BYTES:
                    yield int.from_bytes(number), batch
                case frames:
                    raise FeedError(f"a replay has parts of {list(map(len, frames))} bytes")
            await asyncio.sleep(0)

    async def _apply(self, number: int, encoded: bytes) -> None:
        """Apply a batch. If earlier ones are missing, forget all blocks: some may have been removed."""
        try:
            batch = _decode(encoded)
        except msgspec.DecodeError as error:
            raise FeedError(f"an event is invalid: {error}") from error
        if number != self._next:
            self._blocks.clear()
        self._next, self._last = number + 1, encoded
        for event in batch.events:
            match event:
                case _Cleared():
                    self._blocks.clear()
                case _Stored(hashes):
                    await self._in_parts(hashes, stored=True)
                case _Removed(hashes):
                    await self._in_parts(hashes, stored=False)

    async def _in_parts(self, hashes: list[int], *, stored: bool) -> None:
        for start in range(0, len(hashes), BLOCKS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            part = [number.to_bytes(HASH_BYTES) for number in hashes[start : start + BLOCKS_PER_TURN]]
            if stored:
                self._blocks.add(part)
                self._index.trim()
            else:
                self._blocks.remove(part)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
