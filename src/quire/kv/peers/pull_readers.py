"""The threads that read KV from one peer."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.status import LLMException, LLMStatusCode
from quire.kv.peers.block_layouts import BlockLayouts
from quire.kv.peers.links import OneLink, PeerLinks
from quire.kv.peers.pulls import PeerPull

logger = logging.getLogger(__name__)

MAX_READERS = 4
"""Pulls that are read at a time."""

IDLE_TIMEOUT = 60.0
"""Seconds after which a thread that has nothing to do ends, and its link."""


class PullReaders:
    """Reads pulls in order, some at a time. Every method but `join` returns at once, for any thread.

    Args:
        peer_name: for the log.
        links: to the peer; each thread has its own.
        memory: this engine's KV cache.
        layouts: layouts of this engine's blocks.
        on_end: is called with each pull that has ended.
    """

    def __init__(
        self,
        peer_name: str,
        links: PeerLinks,
        memory: CacheMemory,
        layouts: BlockLayouts,
        on_end: Callable[[PeerPull], None],
    ) -> None:
        self._peer_name = peer_name
        self._links = links
        self._memory = memory
        self._layouts = layouts
        self._on_end = on_end
        self._changed = threading.Condition()
        self._queue: deque[PeerPull] = deque()
        self._num_running = 0
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether there is no thread."""
        return not self._threads

    @property
    def num_queued(self) -> int:
        """Number of pulls that no thread has begun."""
        return len(self._queue)

    def read(self, pull: PeerPull) -> None:
        """Begin to read, or queue that; without threads, the pull fails."""
        with self._changed:
            if len(self._threads) < min(self._num_running + len(self._queue) + 1, MAX_READERS):
                reader = start_thread(self._read_pulls, "kv-peer-reader")
                self._threads.update(filter(None, [reader]))
            if self._threads:
                self._queue.append(pull)
                self._changed.notify()
                return
        self._end(pull, has_failed=True)

    def take_queued(self, transfer_ids: Collection[str]) -> list[PeerPull]:
        """Remove and return the queued pulls of these loans."""
        with self._changed:
            taken = [pull for pull in self._queue if pull.load.transfer_id in transfer_ids]
            self._queue = deque(pull for pull in self._queue if pull.load.transfer_id not in transfer_ids)
        return taken

    def close(self) -> None:
        """End all threads; pulls have ended or are cancelled."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, deadline: float) -> None:
        """Wait until all threads have ended, after `close`."""
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _read_pulls(self) -> None:
        link = OneLink(self._links)
        try:
            while (pull := self._next_pull()) is not None:
                self._read_pull(pull, link)
        finally:
            link.drop()

    def _next_pull(self) -> PeerPull | None:
        """Return the next pull; None: there is none for a while, and this thread is no reader any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed, IDLE_TIMEOUT)
            if self._queue and not self._is_closed:
                self._num_running += 1
                return self._queue.popleft()
            if not self._is_closed:  # `join` waits for this thread
                self._threads.discard(threading.current_thread())
            return None

    def _read_pull(self, pull: PeerPull, link: OneLink) -> None:
        """Read a pull; however that ends, the pull has ended then."""
        has_failed = True
        try:
            if not pull.is_cancelled:
                pull.run(link.get(pull.deadline), self._memory, self._layouts)
                has_failed = False
        except LLMException as error:
            pull.was_refused = error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            logger.warning("peer %s: the KV of a prompt could not be read: %s", self._peer_name, error)
        except OSError as error:
            logger.warning("cannot link to peer %s: %s", self._peer_name, error)
        except Exception:
            logger.exception("peer %s: the KV of a prompt could not be read", self._peer_name)
            link.drop()
        finally:
            with self._changed:
                self._num_running -= 1
            self._end(pull, has_failed=has_failed)

    def _end(self, pull: PeerPull, *, has_failed: bool) -> None:
        pull.end(has_failed=has_failed)
        self._on_end(pull)


def start_thread(run: Callable[[], None], name: str) -> threading.Thread | None:
    """Return a thread that ends with the process; None: there are too many."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        logger.warning("a peer's loans cannot be read or kept alive: %s", error)
        return None
    return thread
