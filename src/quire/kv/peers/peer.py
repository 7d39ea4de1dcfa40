"""One engine that lends: the threads that read its KV and keep its loans alive."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from quire.datadist.memory import CacheMemory
from quire.datadist.protocol import MAX_LOAN_NAMES
from quire.datadist.status import LLMException
from quire.kv.peers.block_layouts import BlockLayouts
from quire.kv.peers.links import LINK_TIMEOUT, OneLink, OpenLink, PeerLinks
from quire.kv.peers.prefix_lookup import PrefixLookup
from quire.kv.peers.pulls import PeerPull
from quire.kv.peers.transfer_params import Address

logger = logging.getLogger(__name__)

MAX_READERS = 4
"""Loans of one peer that are read at a time."""

RENEW_INTERVAL = 5.0
"""Seconds between heartbeats."""

IDLE_TIMEOUT = 60.0
"""Seconds after which a thread that has nothing to do ends, and its link."""


class Peer:
    """Reads the loans of one peer. Every method but `join` returns at once, and may be called by any thread.

    Args:
        address: where it listens.
        open_link: links to the peer.
        memory: this engine's KV cache.
        layouts: of this engine's blocks.
    """

    def __init__(
        self, address: Address, open_link: OpenLink, memory: CacheMemory, layouts: BlockLayouts
    ) -> None:
        self.name = f"{address[0]}:{address[1]}"
        self._address = address
        self.links = PeerLinks(open_link)
        self._memory = memory
        self._layouts = layouts
        self._lock = threading.Lock()
        self._waiting: dict[str, set[str]] = {}  # requests that wait for a loan, by its transfer id
        self._offered: set[str] = set()  # of these loans, those that the peer has spoken of
        self._ended: set[str] = set()  # of these, those that it has no more
        self._released: list[str] = []
        self._lookups: deque[PrefixLookup] = deque()  # that were not answered yet
        self._pulls: queue.Queue[PeerPull | None] = queue.Queue()
        self._num_pulls = 0  # queued or running
        self._readers: set[threading.Thread] = set()
        self._messenger: threading.Thread | None = None
        self._news = threading.Event()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for any of its loans, and it has no thread."""
        return not (self._waiting or self._lookups or self._readers) and self._messenger is None

    def keep(self, transfer_id: str, request_id: str, *, is_offered: bool) -> None:
        """Keep a loan alive for a request until `give_back`.

        Args:
            transfer_id: of the loan.
            request_id: of the request.
            is_offered: whether the peer has it already, so that it has ended if the peer does not know it.
        """
        with self._lock:
            self._waiting.setdefault(transfer_id, set()).add(request_id)
            if is_offered:
                self._offered.add(transfer_id)
            self._start_messenger()
        self._news.set()

    def give_back(self, transfer_id: str, request_id: str) -> None:
        """Note that a request needs a loan no more; the peer is told when none does."""
        with self._lock:
            requests = self._waiting.get(transfer_id)
            if requests is None:
                return
            requests.discard(request_id)
            if requests:
                return
            del self._waiting[transfer_id]
            self._offered.discard(transfer_id)
            self._ended.discard(transfer_id)
            self._released.append(transfer_id)
        self._news.set()

    def look_up(self, lookup: PrefixLookup) -> None:
        """Ask the peer what it has cached, unless it is unlikely to answer soon."""
        with self._lock:
            is_late = bool(self._lookups) and time.monotonic() >= self._lookups[0].deadline
            if self.links.is_down or is_late or not self._start_messenger():
                return
            lookup.note_asked()
            self._lookups.append(lookup)
        self._news.set()

    def has_ended(self, transfer_id: str) -> bool:
        """Return whether the peer has said that there is no such loan, or cannot be reached."""
        return transfer_id in self._ended or self.links.is_down

    def pull(self, pull: PeerPull) -> None:
        """Begin to read a loan, in a thread; if there can be none, it fails."""
        with self._lock:
            if len(self._readers) < min(self._num_pulls + 1, MAX_READERS):
                reader = _start_thread(self._read_loans, "kv-peer-reader")
                self._readers.update(filter(None, [reader]))
            if self._readers:
                self._num_pulls += 1
                self._pulls.put(pull)
                return
        self._end(pull, has_failed=True)

    def close(self) -> None:
        """Let all threads end, and tell the peer what is given back; pulls have ended or are cancelled."""
        self._is_closed = True
        self._news.set()
        for _ in range(MAX_READERS):
            self._pulls.put(None)

    def join(self, deadline: float) -> None:
        """Wait until all threads have ended, after `close`."""
        with self._lock:
            threads = [*self._readers, *filter(None, [self._messenger])]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- reading loans -------------------------------------------------------------------------------------

    def _read_loans(self) -> None:
        link = OneLink(self.links)
        try:
            while (pull := self._next_pull()) is not None:
                self._read_loan(pull, link)
        finally:
            link.drop()

    def _next_pull(self) -> PeerPull | None:
        """Return the next pull; None: there is none for a while, and this thread is no reader any more."""
        while not self._is_closed:
            try:
                return self._pulls.get(timeout=IDLE_TIMEOUT)
            except queue.Empty:
                with self._lock:  # whoever adds a pull sees this reader, or that there is one less
                    if self._pulls.empty():
                        self._readers.discard(threading.current_thread())
                        return None
        return None

    def _read_loan(self, pull: PeerPull, link: OneLink) -> None:
        """Read a loan; however that ends, the pull has ended then."""
        has_failed = True
        try:
            if not pull.is_cancelled:
                pull.run(link.get(pull.deadline), self._memory, self._layouts)
                has_failed = False
        except LLMException as error:
            logger.warning("peer %s: the KV of a prompt could not be read: %s", self.name, error)
        except OSError as error:
            logger.warning("peer %s cannot be linked to: %s", self.name, error)
        except Exception:
            logger.exception("peer %s: the KV of a prompt could not be read", self.name)
            link.drop()
        finally:
            with self._lock:
                self._num_pulls -= 1
            self._end(pull, has_failed=has_failed)

    def _end(self, pull: PeerPull, *, has_failed: bool) -> None:
        pull.end(has_failed=has_failed)
        if pull.transfer_id:
            self.give_back(pull.transfer_id, pull.request_id)

    # -- heartbeats ----------------------------------------------------------------------------------------

    def _tell_news(self) -> None:
        link = OneLink(self.links)
        idle_until = time.monotonic() + IDLE_TIMEOUT
        while not self._is_closed:
            self._news.wait(RENEW_INTERVAL)
            self._news.clear()
            num_answered = self._answer_lookups(link)
            if self._tell(link) or num_answered:
                idle_until = time.monotonic() + IDLE_TIMEOUT
            elif self._is_messenger_idle(idle_until):
                break
        self._tell(link)
        link.drop()

    def _start_messenger(self) -> bool:
        """Make sure that there is one, if possible; the caller has the lock."""
        if self._messenger is None:
            self._messenger = _start_thread(self._tell_news, "kv-peer-news")
        return self._messenger is not None

    def _is_messenger_idle(self, idle_until: float) -> bool:
        """Return whether there was no news for long; this thread is no messenger any more then."""
        with self._lock:
            is_idle = time.monotonic() >= idle_until and not (
                self._waiting or self._released or self._lookups
            )
            if is_idle:
                self._messenger = None
        return is_idle

    def _tell(self, link: OneLink) -> bool:
        """Tell the peer which loans are waited for or given back, if any; return whether there were."""
        with self._lock:
            waiting = sorted(self._waiting.keys() - self._ended)
            released, self._released = self._released, []
        try:
            for start in range(0, max(len(waiting), len(released)), MAX_LOAN_NAMES):
                stop = start + MAX_LOAN_NAMES
                self._exchange_news(link, waiting[start:stop], released[start:stop])
        except (LLMException, OSError) as error:
            logger.warning("peer %s could not be told which loans are needed: %s", self.name, error)
        except Exception:
            logger.exception("peer %s could not be told which loans are needed", self.name)
            link.drop()
        return bool(waiting or released)

    def _answer_lookups(self, link: OneLink) -> int:
        """Ask the peer what the lookups ask, and return how many there were; each is answered.

        Lookups that come meanwhile are for the next time: heartbeats are due, however many come.
        """
        num_lookups = len(self._lookups)
        for _ in range(num_lookups):
            lookup = self._lookups[0]
            num_found = 0
            try:
                if not lookup.is_over:
                    num_found = self._find_prefix(lookup, link)
            finally:
                lookup.answer(self._address, num_found)
                with self._lock:  # `look_up` looks at the first one
                    self._lookups.popleft()
        return num_lookups

    def _find_prefix(self, lookup: PrefixLookup, link: OneLink) -> int:
        deadline = time.monotonic() + LINK_TIMEOUT
        try:
            linked = link.get(deadline)
            if linked.block_size != self._layouts.block_size:  # digests of other blocks
                return 0
            return linked.find_prefix(lookup.digests(), deadline)
        except (LLMException, OSError) as error:
            logger.warning("peer %s could not be asked what it has cached: %s", self.name, error)
        except Exception:
            logger.exception("peer %s could not be asked what it has cached", self.name)
            link.drop()
        return 0

    def _exchange_news(self, link: OneLink, waiting: list[str], released: list[str]) -> None:
        deadline = time.monotonic() + LINK_TIMEOUT
        unknown = link.get(deadline).exchange_news(waiting, released, deadline)
        with self._lock:
            self._ended.update(set(unknown) & self._offered)


def _start_thread(run: Callable[[], None], name: str) -> threading.Thread | None:
    """Return a thread that ends with the process; None: there are too many."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        logger.warning("a peer's loans cannot be read or kept alive: %s", error)
        return None
    return thread
