"""The engines that this one reads from: for each, threads that read its KV and keep its loans alive."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.status import LLMException
from quire.datadist.wire.protocol import MAX_LOAN_NAMES
from quire.kv.blocks.block_hash import SequenceKeys
from quire.kv.peers.block_layouts import BlockLayouts
from quire.kv.peers.links import LINK_TIMEOUT, OneLink, OpenLink, PeerLinks
from quire.kv.peers.pull_readers import IDLE_TIMEOUT, PullReaders, start_thread
from quire.kv.peers.pulls import PeerPull
from quire.kv.peers.transfer_params import Address

logger = logging.getLogger(__name__)

MAX_PEERS = 64
"""Peers whose KV is read at a time."""

RENEW_INTERVAL = 5.0
"""Seconds between heartbeats, at most."""

RENEWALS_PER_TIMEOUT = 4
"""Heartbeats in the time after which a lease ends without one."""

READY_INTERVAL = 0.1
"""Seconds between asking which loans are ready, while some of them are not even begun to be read."""


class PrefixLookup:
    """One question, which the threads of several peers answer.

    Args:
        keys: keys of the prompt's blocks, for this lookup alone.
        blocks: those that are missing, at most `MAX_PREFIX_BLOCKS`.
        deadline: seconds on the monotonic clock, after which answers are not waited for.
    """

    def __init__(self, keys: SequenceKeys, blocks: range, deadline: float) -> None:
        self.blocks = blocks
        self.deadline = deadline
        self._keys = keys
        self._digests: bytes | None = None
        self._hashing = threading.Lock()  # its own: the step loop must not wait for that
        self._lock = threading.Lock()
        self._num_asked = 0
        self._num_answers = 0
        self._most = 0  # blocks found by a peer
        self._best: Address | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is waited for."""
        return self._num_answers == self._num_asked or time.monotonic() >= self.deadline

    @property
    def best(self) -> tuple[Address, int] | None:
        """The peer that has the most, and how many blocks of it; None: none has any."""
        with self._lock:
            return None if self._best is None else (self._best, self._most)

    def digests(self) -> bytes:
        """Return the digests of the missing blocks, one after another; the first call computes them."""
        with self._hashing:
            if self._digests is None:
                self._digests = b"".join(self._keys.digests(self.blocks.start, self.blocks.stop))
            return self._digests

    def note_asked(self) -> None:
        """Note that one more peer is going to answer."""
        with self._lock:
            self._num_asked += 1

    def answer(self, address: Address, num_blocks: int) -> None:
        """Note that a peer has the first `num_blocks` of the blocks."""
        with self._lock:
            self._num_answers += 1
            if num_blocks > self._most:
                self._best, self._most = address, num_blocks


class Peer:
    """Reads the loans of one peer. Every method but `join` returns at once, and may be called by any thread.

    Loans that are not ready have readers of their own, which wait for them: the peer may compute its prompts
    in another order, and lack the blocks for the next until those that are ready are read.

    Args:
        address: where it listens.
        open_link: links to the peer.
        memory: this engine's KV cache.
        layouts: layouts of this engine's blocks.
        lease_timeout: seconds without a heartbeat after which the peer ends a loan.
    """

    def __init__(
        self,
        address: Address,
        open_link: OpenLink,
        memory: CacheMemory,
        layouts: BlockLayouts,
        *,
        lease_timeout: float,
    ) -> None:
        self.name = f"{address[0]}:{address[1]}"
        self._address = address
        self.links = PeerLinks(open_link)
        self._layouts = layouts
        self._lease_timeout = lease_timeout
        self._ready_pulls = PullReaders(self.name, self.links, memory, layouts, self._note_end)
        self._awaited_pulls = PullReaders(self.name, self.links, memory, layouts, self._note_end)
        self._lock = threading.Lock()
        self._waiting: dict[str, set[str]] = {}  # requests that wait for a loan, by its transfer id
        self._offered: set[str] = set()  # of these loans, those that the peer has spoken of
        self._ended: set[str] = set()  # of these, those that it has no more
        self._released: dict[str, float] = {}  # given back, and until when to try to notify the peer
        self._lookups: deque[PrefixLookup] = deque()  # that were not answered yet
        self._messenger: threading.Thread | None = None
        self._news = threading.Event()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for any of its loans, and it has no thread."""
        has_readers = not (self._ready_pulls.is_idle and self._awaited_pulls.is_idle)
        return not (self._waiting or self._lookups or has_readers) and self._messenger is None

    def keep(self, transfer_id: str, request_id: str, *, is_offered: bool) -> None:
        """Keep a loan alive for a request until `give_back`.

        Args:
            transfer_id: id of the loan.
            request_id: id of the request.
            is_offered: whether the peer has it already, so that it has ended if the peer does not know it.
        """
        with self._lock:
            self._waiting.setdefault(transfer_id, set()).add(request_id)
            self._released.pop(transfer_id, None)
            if is_offered:
                self._offered.add(transfer_id)
            self._start_messenger()
        self._news.set()

    def give_back(self, transfer_id: str, request_id: str) -> None:
        """Note that a request needs a loan no more; the peer is notified when none does."""
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
            self._released[transfer_id] = time.monotonic() + max(self._lease_timeout, LINK_TIMEOUT)
        self._news.set()

    def look_up(self, lookup: PrefixLookup) -> None:
        """Ask the peer what it has cached, unless it is unlikely to answer soon."""
        with self._lock:
            is_late = bool(self._lookups) and time.monotonic() >= self._lookups[0].deadline
            is_unlikely = is_late or self.links.is_down or self.links.is_doubtful
            if is_unlikely or not self._start_messenger():
                return
            lookup.note_asked()
            self._lookups.append(lookup)
        self._news.set()

    def has_ended(self, transfer_id: str) -> bool:
        """Return whether the peer has said that there is no such loan, or cannot be reached."""
        return transfer_id in self._ended or self.links.is_down

    def pull(self, pull: PeerPull) -> None:
        """Begin to read, in a thread; if there can be none, the pull fails."""
        if pull.load.is_ready:
            self._ready_pulls.read(pull)
        else:
            self._awaited_pulls.read(pull)
            self._news.set()

    def close(self) -> None:
        """End all threads, and notify the peer of returned loans; pulls have ended or are cancelled."""
        self._is_closed = True
        self._news.set()
        self._ready_pulls.close()
        self._awaited_pulls.close()

    def join(self, deadline: float) -> None:
        """Wait until all threads have ended, after `close`."""
        self._ready_pulls.join(deadline)
        self._awaited_pulls.join(deadline)
        with self._lock:
            messenger = self._messenger
        if messenger is not None:
            messenger.join(max(0.0, deadline - time.monotonic()))

    def _note_end(self, pull: PeerPull) -> None:
        if pull.load.transfer_id:
            self.give_back(pull.load.transfer_id, pull.load.request_id)
        elif pull.has_begun and not (pull.is_cancelled or pull.was_refused):
            self.links.note_delivery(has_come=not pull.has_failed)

    # -- heartbeats ----------------------------------------------------------------------------------------

    def _update_peer(self) -> None:
        link = OneLink(self.links)
        idle_until = time.monotonic() + IDLE_TIMEOUT
        while not self._is_closed:
            self._news.wait(self._news_interval())
            self._news.clear()
            num_answered = self._answer_lookups(link)
            if self._tell(link) or num_answered:
                idle_until = time.monotonic() + IDLE_TIMEOUT
            elif self._is_messenger_idle(idle_until):
                break
        self._tell(link)
        link.drop()

    def _news_interval(self) -> float:
        """Return the seconds until the peer is to be asked again."""
        if self._awaited_pulls.num_queued and not self.links.is_down:
            return READY_INTERVAL
        return min(RENEW_INTERVAL, self._lease_timeout / RENEWALS_PER_TIMEOUT)

    def _start_messenger(self) -> bool:
        """Make sure that there is one, if possible; the caller has the lock."""
        if self._messenger is None:
            self._messenger = start_thread(self._update_peer, "kv-peer-news")
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
            untold, self._released = self._released, {}
        released = list(untold)
        try:
            for start in range(0, max(len(waiting), len(released)), MAX_LOAN_NAMES):
                stop = start + MAX_LOAN_NAMES
                self._update_loans(link, waiting[start:stop], released[start:stop])
                for name in released[start:stop]:
                    del untold[name]
        except (LLMException, OSError) as error:
            logger.warning("could not tell peer %s which loans are needed: %s", self.name, error)
        except Exception:
            logger.exception("could not tell peer %s which loans are needed", self.name)
            link.drop()
        finally:
            self._requeue(untold)
        return bool(waiting or released)

    def _requeue(self, released: dict[str, float]) -> None:
        """Keep returns that the peer has not received, except for loans needed again or ended."""
        now = time.monotonic()
        with self._lock:
            for name, until in released.items():
                if now < until and name not in self._waiting:
                    self._released.setdefault(name, until)

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
            logger.warning("could not ask peer %s what it has cached: %s", self.name, error)
        except Exception:
            logger.exception("could not ask peer %s what it has cached", self.name)
            link.drop()
        return 0

    def _update_loans(self, link: OneLink, waiting: list[str], released: list[str]) -> None:
        deadline = time.monotonic() + LINK_TIMEOUT
        report = link.get(deadline).update_loans(waiting, released, deadline)
        with self._lock:
            self._ended.update(set(report.ended) & self._offered)
        for pull in self._awaited_pulls.take_queued(set(report.ready)):
            self._ready_pulls.read(pull)


class KnownPeers:
    """The peers that this engine reads from, by address.

    Args:
        new_peer: returns a peer.
    """

    def __init__(self, new_peer: Callable[[Address], Peer]) -> None:
        self._new_peer = new_peer
        self._peers: dict[Address, Peer] = {}
        self._lock = threading.Lock()

    def find(self, address: Address) -> Peer | None:
        """Return a peer; None: there is no such, or no more."""
        with self._lock:
            return self._peers.get(address)

    def get(self, address: Address) -> Peer | None:
        """Return a peer, maybe a new one in the place of one that is idle; None: there are too many.

        For one thread: a peer that another one has got might be forgotten before it is used.
        """
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                if len(self._peers) >= MAX_PEERS:
                    self._peers = {at: one for at, one in self._peers.items() if not one.is_idle}
                if len(self._peers) >= MAX_PEERS:
                    return None
                peer = self._peers[address] = self._new_peer(address)
            return peer

    def transports(self) -> list[str]:
        """Return the transport to each peer that is linked."""
        with self._lock:
            return [peer.links.transport for peer in self._peers.values() if peer.links.transport]

    def close(self) -> None:
        """End all threads; all pulls have ended or are cancelled."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
        deadline = time.monotonic() + LINK_TIMEOUT
        for peer in peers:
            peer.join(deadline)
