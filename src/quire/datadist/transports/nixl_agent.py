"""A wrapper of a NIXL agent whose calls have deadlines, and end in a result or an error.

A read that has not been seen to end may write to its destination whenever its peer returns, even after NIXL
has released it and removed the peer: only the end of the agent ends it for certain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import logging
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVarTuple, Unpack

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.wire import sockets

logger = logging.getLogger(__name__)

BACKEND = "UCX"
CLOSE_LIMIT = 5.0  # seconds
GRACE = 1.0  # seconds that a call may exceed its own deadline
SPIN_LIMIT = 2e-4  # seconds of polling a read before sleeping between polls
POLL_INTERVAL = 5e-5  # seconds

A = TypeVarTuple("A")
T = TypeVar("T")

_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]

Descriptors = npt.NDArray[np.uint64]
"""Address, length in bytes and device index of pieces of memory [N, 3]."""


@dataclasses.dataclass(frozen=True)
class RegionMetadata:
    """A registered cache, described for peers.

    Attributes:
        number: number of the registration, never used again by the agent.
        data: what the peer's NIXL loads.
    """

    number: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class _Region:
    metadata: RegionMetadata
    registration: Any
    storage: list[Any]  # the memory must live until it is deregistered
    finalizer: weakref.finalize[Any, Any]


def is_installed() -> bool:
    """Return whether NIXL can be imported."""
    return importlib.util.find_spec("nixl") is not None


def open_agent(name: str) -> Any:
    """Return a new NIXL agent, without NIXL's own thread, which would always be busy."""
    from nixl._api import nixl_agent, nixl_agent_config

    logging.getLogger("nixl").setLevel(logging.WARNING)  # else it prints its actions
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))


def memory_kind(memory: CacheMemory) -> tuple[str, int]:
    """Return NIXL's name for a kind of memory, and the index of the device."""
    device = memory.tensor_bytes[0].device
    return ("DRAM", 0) if device.type == "cpu" else ("VRAM", device.index)


class CallFailedError(ConnectionError):
    """NIXL raised, timed out, or returned an invalid result."""


class CallThread:
    """Runs calls of NIXL one after another in a separate thread, since they may hang.

    Errors of NIXL become `CallFailedError`s with only their text, as the exceptions would keep NIXL's objects
    alive.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._overdue: Future[Any] | None = None
        thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="datadist-NIXL", daemon=True)
        thread.start()

    def submit(self, function: Callable[[Unpack[A]], T], *arguments: *A) -> Future[T]:
        """Queue a function for the thread without waiting; may be called by a finalizer."""
        future: Future[T] = Future()
        self._jobs.put((future, function, arguments))
        return future

    def call(self, deadline: float, function: Callable[[Unpack[A]], T], *arguments: *A) -> T:
        """Run a function in the thread, and return its result.

        Raises:
            CallFailedError: it raised or timed out, or an earlier call is still running.
        """
        overdue = self._overdue
        if overdue is not None and not overdue.done():
            raise CallFailedError("an earlier call of NIXL is still running")
        return self.result(self.submit(function, *arguments), deadline)

    def result(self, future: Future[T], deadline: float) -> T:
        """Return the result of a submitted call; raises like `call`."""
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            if future.done():
                raise  # the function's own
            self._overdue = future
        raise CallFailedError("a call of NIXL timed out")

    def end(self) -> None:
        """End the thread after the submitted calls."""
        self._jobs.put(None)


def _run_jobs(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, function, arguments = job
        reason = None
        try:
            future.set_result(function(*arguments))
        except (CallFailedError, TimeoutError) as error:
            future.set_exception(error)
        except BaseException as error:
            reason = f"NIXL raised {type(error).__name__}: {error}"
        if reason is not None:
            future.set_exception(CallFailedError(reason))
        del job, future, function, arguments  # may keep memory alive


class NixlAgent:
    """An agent with its registrations. Thread-safe; NIXL is called from one thread.

    Args:
        deadline: for opening it.

    Raises:
        CallFailedError: as from every method with a deadline.
    """

    def __init__(self, deadline: float) -> None:
        self._thread = CallThread()
        self._agent: Any = None
        self._regions: weakref.WeakKeyDictionary[CacheMemory, _Region] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._peer = b""
        self._name: Any = None  # of the peer's agent
        self._loaded: int | None = None  # region of the peer
        self._lists: list[Any] = []  # prepared descriptors, of this side and of the peer
        self._transfer: Any = None
        self._is_stopped = False
        self._closing: Future[bool] | None = None
        try:
            self._thread.call(deadline, self._open)
        except BaseException:
            self.close()
            raise

    def register(self, memory: CacheMemory, deadline: float) -> RegionMetadata:
        """Register a cache with NIXL, for as long as the cache lives."""
        return self._thread.call(deadline, self._register, memory)

    def forget(self, memory: CacheMemory, deadline: float) -> None:
        """Deregister a cache, before its owner takes back its memory."""
        if self._closing is None:
            self._thread.call(deadline, self._forget, memory)
        elif not self.close():
            raise CallFailedError("NIXL did not shut down")

    def connection(self, deadline: float) -> bytes:
        """Return the connection metadata that a peer loads before any region."""
        return self._thread.call(deadline, self._connection)

    def connect(self, peer: bytes, deadline: float) -> None:
        """Connect to the agent with this `connection` metadata."""
        self._thread.call(deadline, self._connect, peer)

    def progress(self, deadline: float) -> None:
        """Let NIXL answer its peers."""
        self._thread.call(deadline, self._progress)

    def prepare_read(
        self,
        region: RegionMetadata,
        kinds: tuple[str, str],
        local: Descriptors,
        remote: Descriptors,
        deadline: float,
    ) -> None:
        """Prepare to read pieces of a region of the peer into pieces of registered memory."""
        self._thread.call(deadline, self._prepare, region, kinds, local, remote)

    def start_read(self, first: int, stop: int, deadline: float) -> Future[None]:
        """Read some of the prepared pieces; `wait` for it."""
        return self._thread.submit(self._read, first, stop, deadline)

    def wait(self, read: Future[None], deadline: float) -> None:
        """Wait until the read data is in place.

        Raises:
            TimeoutError: it did not arrive in time.
            CallFailedError: it failed. After either, only `close` ends running reads.
        """
        self._thread.result(read, deadline + GRACE)

    def finish_read(self, deadline: float) -> None:
        """Release the prepared read."""
        self._thread.call(deadline, self._release_handles)

    def stop(self) -> None:
        """Make a read fail soon. Thread-safe."""
        self._is_stopped = True

    def close(self) -> bool:
        """End the agent; return whether it can certainly no longer read or write."""
        self._is_stopped = True
        if self._closing is None:
            self._closing = self._thread.submit(self._close)
            self._thread.end()
        try:
            return self._thread.result(self._closing, time.monotonic() + CLOSE_LIMIT)
        except CallFailedError:
            return False

    def _open(self) -> None:
        self._agent = open_agent(f"quire-{secrets.token_hex(8)}")

    def _register(self, memory: CacheMemory) -> RegionMetadata:
        region = self._regions.get(memory)
        if region is None:
            kind, device = memory_kind(memory)
            storage = list(memory.tensor_bytes)
            pieces = np.array([(one.data_ptr(), one.numel(), device) for one in storage], dtype=np.uint64)
            registration = self._agent.register_memory(pieces, kind, [BACKEND])
            finalizer = weakref.finalize(memory, self._thread.submit, self._deregister, registration, storage)
            finalizer.atexit = False
            data = self._agent.get_partial_agent_metadata(registration, False, [BACKEND])
            metadata = RegionMetadata(next(self._numbers), data)
            region = self._regions[memory] = _Region(metadata, registration, storage, finalizer)
            memory.add_user(self.forget)
        return region.metadata

    def _forget(self, memory: CacheMemory) -> None:
        region = self._regions.pop(memory, None)
        if region is not None:
            region.finalizer.detach()
            self._agent.deregister_memory(region.registration, [BACKEND])

    def _deregister(self, registration: Any, storage: list[Any]) -> None:
        """Deregister, while `storage` keeps the memory."""
        if self._agent is None:
            return
        try:
            self._agent.deregister_memory(registration, [BACKEND])
        except Exception as error:
            logger.warning("NIXL cannot deregister a cache: %s", error)

    def _connection(self) -> bytes:
        nothing = self._agent.get_reg_descs(np.zeros((1, 3), dtype=np.uint64), "DRAM")
        nothing.clear()
        data: bytes = self._agent.get_partial_agent_metadata(nothing, True, [BACKEND])
        return data

    def _connect(self, peer: bytes) -> None:
        self._name = self._agent.add_remote_agent(peer)
        self._peer = peer

    def _progress(self) -> None:
        self._agent.get_new_notifs([BACKEND])

    def _prepare(
        self, region: RegionMetadata, kinds: tuple[str, str], local: Descriptors, remote: Descriptors
    ) -> None:
        self._load(region)
        self._lists.append(self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, kinds[0], [BACKEND]))
        self._lists.append(self._agent.prep_xfer_dlist(self._name, remote, kinds[1], [BACKEND]))

    def _load(self, region: RegionMetadata) -> None:
        """Load one region of the peer only, as an earlier one may be gone, with another at its address."""
        if self._loaded == region.number:
            return
        if self._loaded is not None:
            self._loaded = None
            self._agent.remove_remote_agent(self._name)
            self._connect(self._peer)
        name = self._agent.add_remote_agent(region.data)
        if name != self._name:
            raise CallFailedError(f"the peer's region belongs to the agent {name!r}, not to {self._name!r}")
        self._loaded = region.number

    def _read(self, first: int, stop: int, deadline: float) -> None:
        indices = np.arange(first, stop, dtype=np.int32)
        local, remote = self._lists
        self._transfer = self._agent.make_prepped_xfer(
            "READ", local, indices, remote, indices, b"", [BACKEND]
        )
        del local, remote  # an error's traceback keeps this frame
        begin = time.monotonic()
        state = self._agent.transfer(self._transfer)
        while state == "PROC":
            if self._is_stopped:
                raise CallFailedError("the link has been shut down in a read")
            sockets.seconds_left(deadline)
            if time.monotonic() - begin > SPIN_LIMIT:
                time.sleep(POLL_INTERVAL)
            state = self._agent.check_xfer_state(self._transfer)
        if state != "DONE":
            raise CallFailedError(f"NIXL reports {state!r} for a read")
        self._agent.release_xfer_handle(self._transfer)
        self._transfer = None

    def _release_handles(self) -> None:
        while self._lists:
            self._agent.release_dlist_handle(self._lists.pop())

    def _close(self) -> bool:
        if self._agent is None:
            return True
        with contextlib.suppress(Exception):  # the rest is released with the agent
            if self._transfer is not None:
                self._agent.release_xfer_handle(self._transfer)
        with contextlib.suppress(Exception):
            self._release_handles()
        for region in list(self._regions.values()):
            region.finalizer.detach()
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(region.registration, [BACKEND])
        self._regions.clear()
        self._lists.clear()
        ended = weakref.ref(self._agent.agent)
        self._transfer = self._agent = None
        if ended() is not None:
            gc.collect()
        return ended() is None
