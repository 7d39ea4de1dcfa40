"""The side that borrows: prompts whose KV is read from the peer that has computed it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.kv.block_hash import SequenceKeys, root_digest
from quire.kv.connector_stats import KVPeerStats
from quire.kv.load_costs import LoadCosts
from quire.kv.peers.peer import LINK_TIMEOUT, LoanPull, Peer
from quire.kv.peers.transfer_params import Address, BorrowingParams, borrowing_params
from quire.request import Request
from quire.step import SchedulerOutput

logger = logging.getLogger(__name__)

MAX_PEERS = 64
"""Peers whose loans are read at a time."""


@dataclasses.dataclass(slots=True)
class _Borrowed:
    params: BorrowingParams
    peer: Peer | None  # None: there are too many
    num_blocks: int  # of the loan
    num_local: int = 0  # tokens that the cache had when the request was last looked up
    prefers_reading: bool | None = None  # None: not decided yet
    is_over: bool = False  # it was read, or is not to be


@dataclasses.dataclass(slots=True, frozen=True)
class LoanLoad:
    """A loan to read for a request, into the blocks from `first_block` on."""

    request_id: str
    params: BorrowingParams
    num_blocks: int
    digest: bytes
    block_ids: list[int]


class Peers:
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
        """Return the transport to each peer that was linked."""
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


class BorrowedPrompts:
    """Reads the full blocks of prompts that a peer lends, all but that of the last token.

    Args:
        block_size: tokens per block.
        block_bytes: bytes of a block.
        peers: to read from.
        timeout: seconds for a loan to come.
        stats: of the connector.
        costs: of loading and computing.
    """

    def __init__(
        self,
        block_size: int,
        block_bytes: int,
        peers: Peers,
        timeout: float,
        *,
        stats: KVPeerStats,
        costs: LoadCosts,
    ) -> None:
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._peers = peers
        self._timeout = timeout
        self._stats = stats
        self._costs = costs
        # Scheduler side.
        self._borrowed: dict[str, _Borrowed] = {}
        self._new_loads: list[LoanLoad] = []
        self._cancelled: list[str] = []
        # Worker side.
        self._pulls: dict[str, LoanPull] = {}
        self._failed_block_ids: set[int] = set()  # to be reported

    @property
    def is_reading(self) -> bool:
        """Whether any load has begun and not been reported."""
        return bool(self._new_loads or self._pulls)

    # -- scheduler side ------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Keep the loan that a request names alive, if it names one.

        Raises:
            InvalidRequestError: its parameters are invalid.
        """
        params = borrowing_params(request.kv_transfer_params)
        if params is None:
            return
        peer = self._peers.get(params.address)
        num_blocks = (request.num_prompt_tokens - 1) // self._block_size
        self._borrowed[request.request_id] = _Borrowed(params, peer, num_blocks)
        if peer is None:
            logger.warning("KV is read from %d peers already, which is the limit", MAX_PEERS)
        else:
            is_offered = bool(params.remote_engine_id)
            peer.keep(params.transfer_id, request.request_id, is_offered=is_offered)

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens beyond the first `num_computed_tokens` are to be read."""
        borrowed = self._borrowed.get(request.request_id)
        if borrowed is None or borrowed.is_over or num_computed_tokens % self._block_size:
            return 0
        peer = borrowed.peer
        if peer is None or peer.has_ended(borrowed.params.transfer_id):
            logger.warning("request %r: its prompt is computed here, the peer has no KV", request.request_id)
            self._stats.num_missing_prompts += 1
            self._give_back(request.request_id)
            return 0
        borrowed.num_local = num_computed_tokens
        num_blocks = borrowed.num_blocks - num_computed_tokens // self._block_size
        if num_blocks <= 0 or not self._prefers_reading(borrowed, num_blocks):
            return 0
        return num_blocks * self._block_size

    def _prefers_reading(self, borrowed: _Borrowed, num_blocks: int) -> bool:
        """Return the cheaper choice, made once for a request.

        A prompt that the peer still computes is always read: computing it here, too, would not end sooner.
        """
        if borrowed.prefers_reading is None:
            num_queued = sum(len(pull.block_ids) for pull in list(self._pulls.values()))
            borrowed.prefers_reading = not borrowed.params.remote_engine_id or self._costs.prefers_loading(
                num_blocks, num_queued
            )
            self._stats.num_computations_chosen += not borrowed.prefers_reading
        return borrowed.prefers_reading

    def begin(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Read a loan into blocks with the next step."""
        borrowed = self._borrowed.get(request.request_id)
        if borrowed is None or borrowed.is_over or not num_external_tokens:
            return
        borrowed.is_over = True
        first = borrowed.num_local // self._block_size
        targets = [int(one) for one in block_ids[first : borrowed.num_blocks]]
        keys = SequenceKeys(root_digest(salt=request.cache_salt), self._block_size)
        keys.extend(request.prompt_array[: borrowed.num_blocks * self._block_size])
        digest = keys.digest(borrowed.num_blocks)
        load = LoanLoad(request.request_id, borrowed.params, borrowed.num_blocks, digest, targets)
        self._new_loads.append(load)
        self._stats.num_loads_chosen += 1

    def cancel(self, request_id: str) -> None:
        """Read a loan no more."""
        self._new_loads = [load for load in self._new_loads if load.request_id != request_id]
        self._cancelled.append(request_id)
        self._give_back(request_id)

    def plan(self, output: SchedulerOutput) -> tuple[list[LoanLoad], list[str]]:
        """Return the loads that begin with a step, and the requests whose load is cancelled.

        What the step begins to compute reads nothing more.
        """
        if self._borrowed:
            for new in output.scheduled_new_reqs:
                self._give_back(new.request_id)
            for resumed in output.scheduled_cached_reqs.resumed:
                self._give_back(resumed.request_id)
        plan = self._new_loads, self._cancelled
        self._new_loads, self._cancelled = [], []
        return plan

    def finish(self, request: Request) -> None:
        """Note that a request has ended."""
        self._give_back(request.request_id)
        self._borrowed.pop(request.request_id, None)

    def _give_back(self, request_id: str) -> None:
        borrowed = self._borrowed.get(request_id)
        if borrowed is None:
            return
        borrowed.is_over = True
        if borrowed.peer is not None:
            borrowed.peer.give_back(borrowed.params.transfer_id, request_id)

    # -- worker side ---------------------------------------------------------------------------------------

    def begin_step(self, loads: Sequence[LoanLoad], cancelled: Sequence[str]) -> None:
        """Cancel and begin loads."""
        for request_id in cancelled:
            pull = self._pulls.pop(request_id, None)
            if pull is not None:
                pull.cancel()
        for load in loads:
            self._pulls[load.request_id] = self._begin_pull(load)

    def finished(self) -> frozenset[str]:
        """Return the requests whose load has ended since the last call."""
        received = [request_id for request_id, pull in self._pulls.items() if pull.has_ended]
        for request_id in received:
            pull = self._pulls.pop(request_id)
            if pull.has_failed:
                self._stats.num_failed_loads += 1
                self._failed_block_ids.update(pull.block_ids.tolist())
            else:
                self._note_read(pull)
        return frozenset(received)

    def _note_read(self, pull: LoanPull) -> None:
        num_blocks = len(pull.block_ids)
        self._stats.num_loaded_blocks += num_blocks
        self._stats.loaded_bytes += num_blocks * self._block_bytes
        if pull.engine_id:  # else part of the time was the peer's to compute
            self._costs.note_load(pull.seconds, num_blocks)

    def failed_block_ids(self) -> frozenset[int]:
        """Return the blocks that could not be read since the last call."""
        failed, self._failed_block_ids = frozenset(self._failed_block_ids), set()
        return failed

    def close(self) -> None:
        """Give up all loads, and end all threads."""
        for pull in self._pulls.values():
            pull.cancel()
        self._peers.close()

    def _begin_pull(self, load: LoanLoad) -> LoanPull:
        pull = LoanPull(
            request_id=load.request_id,
            transfer_id=load.params.transfer_id,
            engine_id=load.params.remote_engine_id,
            num_blocks=load.num_blocks,
            digest=load.digest,
            block_ids=np.array(load.block_ids, dtype=np.int64),
            deadline=time.monotonic() + self._timeout,
        )
        peer = self._peers.find(load.params.address)
        if peer is None:
            pull.end(has_failed=True)
        else:
            peer.pull(pull)
        return pull
