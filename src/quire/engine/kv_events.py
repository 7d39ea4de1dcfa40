"""KV events over ZeroMQ: published live, and replayed to subscribers that missed some, as vLLM 0.33 does.

The live socket (PUB) sends `[topic, sequence number, batch]`. It binds its address if that has `*`, `::`,
`ipc://` or `inproc://`, or port 0, and connects to it otherwise, so that many engines can publish to one
subscriber. The replay socket (ROUTER) answers `[b"", first sequence number]` with `[b"", topic, sequence
number, batch]` for each buffered batch from that number on, and then `[b"", b"", END_OF_REPLAY, b""]`.
Sequence numbers have 8 bytes, big-endian, and count from 0. Batches are msgpack of `KVEventBatch`. Those who
ask for the last batch that they know, too, see whether the engine is still the one that they have followed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from socket import gethostname, socketpair

import msgspec
import zmq

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kv.blocks.events import AllBlocksCleared, KVCacheEvent, KVEventBatch

logger = logging.getLogger(__name__)

TOPIC_PREFIX = b"kv@"
"""That of the topics `kv@POD@MODEL`, which llm-d's endpoint picker subscribes to."""

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
LINGER = 100
"""Milliseconds that `close` waits for queued batches to be sent."""

Socket = zmq.Socket[bytes]
_Batch = tuple[float, Sequence[KVCacheEvent] | msgspec.Raw, int | None]  # encoded as `KVEventBatch` is


class KVEventPublisher:
    """Publishes batches from its own thread; `publish` never blocks.

    The first batch clears all blocks: what subscribers knew of a publisher before this one is gone.

    Args:
        endpoint: ZeroMQ address of the live socket, such as `tcp://*:5557`.
        replay_endpoint: that to bind the replay socket to; empty: no replay.
        topic: of all messages.
        data_parallel_rank: number of the engine among replicas, which is added to the ports; None: it has
            none.
        buffer_steps: number of batches kept for replay. Also the maximum number queued, in total and for
            each subscriber; a slow subscriber misses the rest.
        clock: returns seconds since 1970.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str,
        data_parallel_rank: int | None = None,
        buffer_steps: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.num_dropped = 0  # batches for which the queue had no room
        self._topic = topic.encode()
        self._is_bound = _is_bind_address(endpoint)
        self._rank = data_parallel_rank
        self._clock = clock
        self._next_number = 0
        self._queue: deque[tuple[int, _Batch]] = deque()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)  # (number, batch), encoded
        self._buffer_steps = buffer_steps
        self._encode = msgspec.msgpack.Encoder().encode
        self._is_closing = False
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            self._live = self._opened(zmq.PUB, endpoint, "kv_events_endpoint", binds=self._is_bound)
            self._replay = (
                self._opened(zmq.ROUTER, replay_endpoint, "kv_events_replay_endpoint", binds=True)
                if replay_endpoint
                else None
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _address(self._live)
        self.replay_endpoint = _address(self._replay) if self._replay else ""
        # Not a ZeroMQ socket: these may report that they are full when they no longer are.
        self._wake, self._woken = socketpair()
        self._wake.setblocking(False)
        self.publish([AllBlocksCleared()])
        # From here on, all sockets but `_wake` belong to the thread.
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: EngineConfig) -> KVEventPublisher | None:
        """Return the publisher of an engine's events; None: they are not to be published.

        Raises:
            ConfigError: an address cannot be bound.
        """
        events = config.kv_events
        if not events.kv_events_endpoint:
            return None
        return cls(
            events.kv_events_endpoint,
            events.kv_events_replay_endpoint,
            topic=events.topic_of(gethostname(), config.model),
            data_parallel_rank=events.kv_events_data_parallel_rank,
        )

    @property
    def tcp_ports(self) -> tuple[int, int] | None:
        """Ports of the live and of the replay socket, if both are bound to one; None if not."""
        endpoints = (self.endpoint, self.replay_endpoint)
        if not self._is_bound or not all(endpoint.startswith("tcp://") for endpoint in endpoints):
            return None
        live, replay = (int(endpoint.rpartition(":")[2]) for endpoint in endpoints)
        return live, replay

    def publish(self, events: Sequence[KVCacheEvent] | msgspec.Raw) -> None:
        """Publish the events of one step, if there are any. If the queue is full, the batch is lost.

        Subscribers detect a lost batch by the gap in the sequence numbers.
        """
        if not events or self._is_closing:
            return
        number = self._next_number
        self._next_number += 1
        if len(self._queue) >= self._buffer_steps:
            if not self.num_dropped:
                logger.warning("KV events arrive faster than they can be published; some are lost")
            self.num_dropped += 1
            return
        self._queue.append((number, (self._clock(), events, self._rank)))
        self._wake_thread()

    def close(self) -> None:
        """Send all queued batches and close the sockets; idempotent."""
        if self._wake.fileno() < 0:
            return
        self._is_closing = True
        self._wake_thread()
        self._thread.join()
        self._wake.close()
        self._woken.close()
        self._context.term()

    def _wake_thread(self) -> None:
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are pending already
            self._wake.send(b"x")

    def _opened(self, kind: int, endpoint: str, field: str, *, binds: bool) -> Socket:
        endpoint = _with_rank(endpoint, self._rank or 0)
        socket = self._context.socket(kind)
        # The queue of a peer holds a whole replay; a ROUTER drops what does not fit.
        socket.sndhwm = self._buffer_steps + 1
        try:
            socket.bind(endpoint) if binds else socket.connect(endpoint)
        except zmq.ZMQError as error:
            what = "bound" if binds else "connected to"
            raise ConfigError(
                f"KVEventsConfig.{field} is {endpoint!r}, which cannot be {what}: {error}; bind a free "
                "address such as tcp://*:5557, or connect to a subscriber's"
            ) from error
        return socket

    def _run(self) -> None:
        """Send queued batches and serve replays until closed; runs in the thread."""
        try:
            self._serve()
        except Exception:
            logger.exception("KV events are no longer published")
        finally:
            self._is_closing = True
            self._live.close(linger=LINGER)
            if self._replay:
                self._replay.close(linger=LINGER)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay:
            poller.register(self._replay, zmq.POLLIN)
        is_last = False
        while not is_last:
            ready = dict(poller.poll())
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            is_last = self._is_closing  # after its wake-up may have been taken with an earlier one
            while self._queue:
                self._send_batch(*self._queue.popleft())
            if self._replay and self._replay in ready:
                self._answer_replay(self._replay)

    def _send_batch(self, number: int, batch: _Batch) -> None:
        """Send a batch; one that cannot be encoded is lost, which subscribers see by its number."""
        try:
            message = (number.to_bytes(8, "big"), self._encode(batch))
        except Exception:
            logger.exception("a batch of KV events cannot be encoded, and is lost")
            return
        self._buffer.append(message)
        self._live.send_multipart((self._topic, *message))

    def _answer_replay(self, replay: Socket) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning(
                "ignored a replay request with frames of %s bytes", [len(frame) for frame in frames]
            )
            return
        peer, empty, first = frames
        # Big-endian bytes sort like the numbers. From the end: most subscribers miss little or nothing.
        missed = list(itertools.takewhile(lambda message: message[0] >= first, reversed(self._buffer)))
        for number, batch in reversed(missed):
            replay.send_multipart((peer, empty, self._topic, number, batch))
        replay.send_multipart((peer, empty, b"", END_OF_REPLAY, b""))


class KVEventSubscriber:
    """Subscribes to the KV events of one engine, which binds its address, and has missed ones replayed.

    Applied in order, the batches tell which blocks the engine has cached. If batches are permanently lost, a
    batch with `AllBlocksCleared` replaces them: the subscriber then knows too few blocks, never too many.

    Args:
        endpoint: live address of the publisher.
        replay_endpoint: its replay address; empty: no replay, missed batches are lost.
        replay_timeout: seconds to wait for each batch of a replay.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "", *, replay_timeout: float = 1.0) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._replay_timeout = int(replay_timeout * 1000)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next_number = 0
        self._last = b""  # the batch before that number

    def receive(self, timeout: float | None = None) -> list[KVEventBatch]:
        """Return the next batch and any missed before it; empty after `timeout` seconds (None: never)."""
        if not self._live.poll(None if timeout is None else int(timeout * 1000)):
            return []
        _, encoded_number, encoded = self._live.recv_multipart()
        number = int.from_bytes(encoded_number, "big")
        received = [(number, encoded)]
        if number != self._next_number:
            received = [*self._missed(number), *received]
        batches = self._in_order(received)
        self._next_number, self._last = number + 1, encoded
        return batches

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def _missed(self, number: int) -> list[tuple[int, bytes]]:
        """Return the batches before `number` that the publisher still has and this has not."""
        if self._next_number and number > self._next_number:
            last, *rest = self._replayed(self._next_number - 1) or [(-1, b"")]
            if last == (self._next_number - 1, self._last):
                return [item for item in rest if item[0] < number]
        self._next_number = 0  # another engine, or too much was missed: all that there is
        return [item for item in self._replayed(0) if item[0] < number]

    def _in_order(self, received: list[tuple[int, bytes]]) -> list[KVEventBatch]:
        """Return the batches, with a clearing before one that does not follow what came before it."""
        batches: list[KVEventBatch] = []
        expected = self._next_number
        for number, encoded in received:
            batch = self._decoder.decode(encoded)
            is_cleared = any(isinstance(event, AllBlocksCleared) for event in batch.events)
            if number != expected and not is_cleared:
                batches.append(KVEventBatch(batch.ts, [AllBlocksCleared()]))
            batches.append(batch)
            expected = number + 1
        return batches

    def _replayed(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches that the publisher still has, from number `first` on."""
        if not self._replay_endpoint:
            return []
        found: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as replay:
            replay.linger = 0
            replay.connect(self._replay_endpoint)
            replay.send_multipart((b"", first.to_bytes(8, "big")))
            while replay.poll(self._replay_timeout):
                _, _, number, encoded = replay.recv_multipart()
                if number == END_OF_REPLAY:
                    break
                found.append((int.from_bytes(number, "big"), encoded))
        return found


def _with_rank(endpoint: str, rank: int) -> str:
    """Return a TCP address with the port of a replica, as vLLM counts them; others as they are."""
    address, colon, port = endpoint.rpartition(":")
    if not (rank and endpoint.startswith("tcp://") and port.isdecimal()):
        return endpoint
    return f"{address}{colon}{int(port) + rank}"


def _is_bind_address(endpoint: str) -> bool:
    """Whether vLLM binds a publisher's address, and does not connect to it; nothing listens on port 0."""
    marks = ("*", "::", "ipc://", "inproc://")
    return any(mark in endpoint for mark in marks) or endpoint.endswith(":0")


def _address(socket: Socket) -> str:
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
