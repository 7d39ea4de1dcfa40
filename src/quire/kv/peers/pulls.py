"""KV that is to be read from a peer into blocks of this engine's cache."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import Int64Array
from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.loans.arriving_blocks import ArrivingBlocks
from quire.datadist.wire.protocol import LoanRequest, PrefixRequest
from quire.kv.connectors.step_times import StepMark
from quire.kv.peers.block_layouts import BlockLayouts
from quire.kv.peers.transfer_params import Address, BorrowingParams

OFFER_PATIENCE = 10.0
"""Seconds that a peer waits for a request which it has not got yet."""


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class LoanLoad:
    """A loan to read for a request; its last tokens go into `block_ids` [G, N], see `moved_blocks`.

    With states, the one behind the tokens goes into the blocks `state`, see `StateBlocks`.
    """

    request_id: str
    params: BorrowingParams
    num_tokens: int
    digest: bytes
    block_ids: Int64Array
    state: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks that are filled."""
        return len(self.block_ids[0]) + len(self.state)

    @property
    def address(self) -> Address:
        """Where the peer listens."""
        return self.params.address

    @property
    def transfer_id(self) -> str:
        """Of the loan."""
        return self.params.transfer_id

    @property
    def is_ready(self) -> bool:
        """Whether the peer had all of it when this was planned, so that only reading takes time."""
        return bool(self.params.remote_engine_id)

    def ask(self, link: DecoderLink, layouts: BlockLayouts) -> tuple[LoanRequest, ArrivingBlocks]:
        """Return what to ask for over a link, and the blocks that the answer fills.

        Raises:
            ConnectionError: the peer is another than the one that has answered.
        """
        engine_id, size = self.params.remote_engine_id, link.block_size
        if engine_id and engine_id != engine_id_of(link.epoch):
            raise ConnectionError("it has been restarted since it computed the prompt")
        first_token = _num_blocks(self.num_tokens, layouts.block_size) - len(self.block_ids[0])
        first_token *= layouts.block_size
        blocks = range(first_token // size, _num_blocks(self.num_tokens, size) + len(self.state))
        patience = 0 if engine_id else int(OFFER_PATIENCE * 1e3)
        request = LoanRequest(0, 0, self.transfer_id, blocks.start, blocks.stop, self.digest, patience, 0)
        return request, layouts.arriving(_with_state(self.block_ids, self.state), blocks, size)


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class PrefixLoad:
    """Blocks of a peer's prefix cache to read for a request, by their digests, one after another.

    They go into `block_ids` [G, N], see `moved_blocks`; with states, the last ones into the blocks `state`.
    """

    request_id: str
    address: Address
    digests: bytes
    block_ids: Int64Array
    state: tuple[int, ...] = ()
    transfer_id: str = ""  # it is no loan
    is_ready: bool = True

    @property
    def num_blocks(self) -> int:
        """Blocks that are filled."""
        return len(self.block_ids[0]) + len(self.state)

    def ask(self, _link: DecoderLink, layouts: BlockLayouts) -> tuple[PrefixRequest, ArrivingBlocks]:
        """Return what to ask for over a link, and the blocks that the answer fills."""
        targets = _with_state(self.block_ids, self.state)
        blocks = layouts.arriving(targets, range(self.num_blocks), layouts.block_size)
        return PrefixRequest(0, 0, self.digests, 0), blocks


class PeerPull:
    """One reading, which a thread runs and another may cancel. Its request needs a loan no more afterwards.

    Args:
        load: what is read.
        deadline: seconds on the monotonic clock.
        after: steps before this may still use the blocks.
    """

    def __init__(self, load: LoanLoad | PrefixLoad, deadline: float, after: StepMark) -> None:
        self.load = load
        self.deadline = deadline
        self.seconds = 0.0  # that reading took
        self.num_bytes = 0  # that were read
        self.has_begun = False
        self.has_ended = False  # nothing is written to the blocks any more
        self.has_failed = False
        self.was_refused = False  # the peer has it no more
        self._after = after
        self._lock = threading.Lock()
        self._link: DecoderLink | None = None
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """Whether its result is not wanted any more."""
        return self._is_cancelled

    def run(self, link: DecoderLink, memory: CacheMemory, layouts: BlockLayouts) -> None:
        """Read over a link.

        Raises:
            LLMException: what is wanted cannot be read.
            ConnectionError: the peer is another than the one that has answered.
            Exception: the device has failed that was to compute the steps before.
        """
        self._after.wait()
        with self._lock:
            if self._is_cancelled:
                return
            self._link = link
        self.has_begun = True
        began = time.monotonic()
        try:
            request, blocks = self.load.ask(link, layouts)
            link.pull_parts(request, memory, blocks, self.deadline)
            self.num_bytes = blocks.num_bytes
        finally:
            self.seconds = time.monotonic() - began
            with self._lock:
                self._link = None

    def cancel(self) -> None:
        """Stop; nothing is written to the blocks once this has returned."""
        with self._lock:  # until the link is down: the next pull must not begin to use it
            self._is_cancelled = True
            if self._link is not None:
                self._link.drop()

    def end(self, *, has_failed: bool) -> None:
        """Note that the reading has ended."""
        self.has_failed = has_failed
        self.has_ended = True


def _with_state(block_ids: Int64Array, state: tuple[int, ...]) -> Int64Array:
    """Return blocks [G, N] and those of a state behind them, beside which there is one group."""
    return np.append(block_ids, [state], axis=1) if state else block_ids


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def engine_id_of(epoch: int) -> str:
    """Return the id of one start of an engine, as peers know it."""
    return f"{epoch:016x}"
