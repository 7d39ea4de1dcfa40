"""Calls of a Mooncake store with a time limit, made in a process of their own."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from quire.kv.connectors.host_blocks import ByteArray

logger = logging.getLogger(__name__)

NUM_LANES = 5
"""Calls at a time: two that read, one that writes, one that looks up, and a spare for one that hangs."""

SETUP_TIMEOUT = 10.0
"""Seconds that connecting to the store takes at most."""

CALL_TIMEOUT = 2.0
"""Seconds after which a call has failed."""

CLOSE_TIMEOUT = 3.0
"""Seconds that the process has to leave the store."""

INITIAL_BACKOFF = 1.0
"""Seconds without calls after a failure; doubles with each failure in a row."""

MAX_BACKOFF = 60.0
"""Maximum back-off in seconds."""


MAX_HANGS = 7
"""Failures in a row, two minutes, after which a process in which all calls hang is replaced."""


class StoreError(Exception):
    """The store failed, did not answer in time, or answered what cannot be."""


class ClientEndedError(StoreError):
    """The process of the store's client has ended, or is to be replaced."""

    def __init__(self) -> None:
        super().__init__("the process of the store's client has ended, or hangs")


class StoreLane:
    """One call at a time, and the memory that it reads or fills."""

    def __init__(self, connection: Connection, memory: ByteArray) -> None:
        self.memory = memory
        self._connection = connection
        self._is_pending = False

    def has_returned(self) -> bool:
        """Return whether the last call has, in time or not; before that, the memory must not be used."""
        if self._is_pending and self._connection.poll():
            self._receive()
        return not self._is_pending

    def call(self, operation: str, names: Sequence[str], num_bytes: int = 0) -> list[int]:
        """Return what the store answers, a number for each name.

        Args:
            operation: exist, put, get or remove; put and get take one name.
            names: names of values.
            num_bytes: size of the value in `memory`.

        Raises:
            StoreError: it failed.
        """
        try:
            self._is_pending = True
            self._connection.send_bytes(msgspec.msgpack.encode([operation, names, num_bytes]))
            return self.answer(len(names), CALL_TIMEOUT)
        except OSError as error:
            raise ClientEndedError from error

    def answer(self, num_numbers: int, timeout: float) -> list[int]:
        """Wait for numbers of the store.

        Raises:
            StoreError: they did not come.
        """
        if not self._connection.poll(timeout):
            raise StoreError(f"no answer within {timeout:g} s")
        answer = self._receive()
        if isinstance(answer, str):
            raise StoreError(answer)
        if len(answer) != num_numbers:
            raise StoreError(f"{len(answer)} answers to {num_numbers} questions")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _receive(self) -> list[int] | str:
        try:
            content = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise ClientEndedError from error
        self._is_pending = False
        return msgspec.msgpack.decode(content, type=list[int] | str)


class StoreClient:
    """The client of a Mooncake store, which lends it memory of this machine. May be used by several threads.

    Attributes:
        is_connected: whether there is a process to call, as far as the last call has shown.

    Args:
        setup: what `MooncakeDistributedStore.setup` takes.
        bytes_per_value: maximum size of a value.
        clock: returns seconds.
    """

    def __init__(
        self,
        setup: Mapping[str, str | int],
        bytes_per_value: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._setup = setup
        self._bytes_per_lane = -(-bytes_per_value // mmap.PAGESIZE) * mmap.PAGESIZE
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lanes: list[StoreLane] = []  # those not in use
        self.is_connected = False
        self._is_closed = False
        self._num_failures = 0  # in a row
        self._down_until = 0.0

    @property
    def is_backing_off(self) -> bool:
        """Whether a failure was so recent that no call should be made."""
        return self._clock() < self._down_until

    def connect(self) -> None:
        """Start a process in place of one that has ended, and wait until it has joined the store.

        Raises:
            StoreError: it did not.
        """
        self._end_process()
        with contextlib.ExitStack() as passed:
            memory = os.memfd_create("quire-mooncake")
            passed.callback(os.close, memory)
            os.ftruncate(memory, NUM_LANES * self._bytes_per_lane)
            content = np.frombuffer(mmap.mmap(memory, 0), dtype=np.uint8).reshape(NUM_LANES, -1)
            lanes, their_ends = [], []
            for part in content:
                ours, theirs = socket.socketpair()
                lanes.append(StoreLane(Connection(ours.detach()), part))
                their_ends.append(passed.enter_context(theirs).fileno())
            values = [memory, self._bytes_per_lane, json.dumps(self._setup), *their_ends]
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.kv.tiers.mooncake.process", *map(str, values)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[memory, *their_ends],
                env={"MC_LOG_LEVEL": "ERROR", **os.environ},
            )
        try:
            if self._is_closed:
                raise StoreError("the engine is being closed")
            lanes[0].answer(0, SETUP_TIMEOUT)
        except StoreError:
            process.kill()
            process.wait()
            raise
        with self._lock:
            self._lanes = lanes
            self.is_connected = True

    @contextlib.contextmanager
    def lane(self) -> Iterator[StoreLane]:
        """Yield a lane for calls; a `StoreError` in there begins the back-off.

        Raises:
            StoreError: all lanes have calls that hang, or the process has ended.
        """
        lane: StoreLane | None = None
        try:
            with self._lock:
                lane = next((lane for lane in self._lanes if lane.has_returned()), None)
                if lane is None:
                    raise StoreError("all calls hang") if self._num_failures < MAX_HANGS else ClientEndedError
                lanes = self._lanes
                lanes.remove(lane)
            yield lane
        except StoreError as error:
            if isinstance(error, ClientEndedError):
                self.is_connected = False
            self.note_failure(error)
            raise
        finally:
            if lane is not None:
                with self._lock:
                    lanes.append(lane)

    def note_failure(self, error: Exception) -> None:
        """Begin a back-off, unless one has begun."""
        if not self.is_backing_off:
            backoff = min(INITIAL_BACKOFF * 2**self._num_failures, MAX_BACKOFF)
            self._num_failures = min(self._num_failures + 1, 16)
            self._down_until = self._clock() + backoff
            logger.warning("the Mooncake store is not used for %g s: %s", backoff, error)

    def note_success(self) -> None:
        """Let the next back-off be short."""
        self._num_failures = 0

    def close(self) -> None:
        """Leave the store for good; the process is killed if that takes longer than `CLOSE_TIMEOUT`."""
        self._is_closed = True
        self._end_process()

    def _end_process(self) -> None:
        with self._lock:
            self.is_connected = False
            for lane in self._lanes:
                lane.close()
            self._lanes = []
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
