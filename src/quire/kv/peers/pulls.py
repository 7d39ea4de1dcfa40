"""KV that is to be read from a peer into blocks of this engine's cache."""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import ABC, abstractmethod

import numpy as np
from typing_extensions import override

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.wire.protocol import LoanRequest, PrefixRequest
from quire.kv.connectors.step_times import StepMark
from quire.kv.peers.block_layouts import BlockLayouts
from quire.kv.peers.transfer_params import Address, BorrowingParams

OFFER_PATIENCE = 10.0
"""Seconds that a peer waits for a request which it has not got yet."""


@dataclasses.dataclass(slots=True, frozen=True)
class LoanLoad:
    """A loan to read for a request; its last tokens go into `block_ids`."""

    request_id: str
    params: BorrowingParams
    num_tokens: int
    digest: bytes
    block_ids: list[int]

    @property
    def address(self) -> Address:
        """Where the peer listens."""
        return self.params.address


@dataclasses.dataclass(slots=True, frozen=True)
class PrefixLoad:
    """Blocks of a peer's prefix cache to read for a request, by their digests, one after another."""

    request_id: str
    address: Address
    digests: bytes
    block_ids: list[int]


class PeerPull(ABC):
    """One reading, which a thread runs and another may cancel.

    Args:
        request_id: for which.
        block_ids: where it goes.
        deadline: seconds on the monotonic clock.
        after: steps before this may still use the blocks.
    """

    def __init__(self, request_id: str, block_ids: list[int], deadline: float, after: StepMark) -> None:
        self.request_id = request_id
        self.transfer_id = ""  # of the loan that is read, if it is one
        self.block_ids = np.array(block_ids, dtype=np.int64)
        self.deadline = deadline
        self.seconds = 0.0  # that reading took
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
        """Whether nobody waits for it any more."""
        return self._is_cancelled

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the peer had all of it when this began, so that nothing but reading takes its time."""

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
            self._read(link, memory, layouts)
        finally:
            self.seconds = time.monotonic() - began
            with self._lock:
                self._link = None

    def cancel(self) -> None:
        """Let nothing be written to the blocks once this has returned."""
        with self._lock:  # until the link is down: the next pull must not begin to use it
            self._is_cancelled = True
            if self._link is not None:
                self._link.drop()

    def end(self, *, has_failed: bool) -> None:
        """Note that the reading has ended."""
        self.has_failed = has_failed
        self.has_ended = True

    @abstractmethod
    def _read(self, link: DecoderLink, memory: CacheMemory, layouts: BlockLayouts) -> None:
        """Read over a link; raises what `run` does."""


class LoanPull(PeerPull):
    """Reads a loan. Its request needs the loan no more when this has ended."""

    def __init__(self, load: LoanLoad, deadline: float, after: StepMark) -> None:
        super().__init__(load.request_id, load.block_ids, deadline, after)
        self.transfer_id = load.params.transfer_id
        self._load = load

    @property
    @override
    def is_ready(self) -> bool:
        return bool(self._load.params.remote_engine_id)

    @override
    def _read(self, link: DecoderLink, memory: CacheMemory, layouts: BlockLayouts) -> None:
        load, engine_id = self._load, self._load.params.remote_engine_id
        if engine_id and engine_id != engine_id_of(link.epoch):
            raise ConnectionError("it has been started anew since it computed the prompt")
        size = link.block_size
        first_token = _num_blocks(load.num_tokens, layouts.block_size) - len(self.block_ids)
        first_token *= layouts.block_size
        blocks = range(first_token // size, _num_blocks(load.num_tokens, size))
        patience = 0 if engine_id else int(OFFER_PATIENCE * 1e3)
        request = LoanRequest(0, 0, self.transfer_id, blocks.start, blocks.stop, load.digest, patience, 0)
        link.pull_parts(request, memory, layouts.arriving(self.block_ids, blocks, size), self.deadline)


class PrefixPull(PeerPull):
    """Reads blocks of a prefix cache."""

    def __init__(self, load: PrefixLoad, deadline: float, after: StepMark) -> None:
        super().__init__(load.request_id, load.block_ids, deadline, after)
        self._digests = load.digests

    @property
    @override
    def is_ready(self) -> bool:
        return True

    @override
    def _read(self, link: DecoderLink, memory: CacheMemory, layouts: BlockLayouts) -> None:
        request, blocks = PrefixRequest(0, 0, self._digests, 0), range(len(self.block_ids))
        arriving = layouts.arriving(self.block_ids, blocks, layouts.block_size)
        link.pull_parts(request, memory, arriving, self.deadline)


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def pull_of(load: LoanLoad | PrefixLoad, deadline: float, after: StepMark) -> PeerPull:
    """Return what reads a load behind a mark, until `deadline`, seconds on the monotonic clock."""
    return (
        LoanPull(load, deadline, after) if isinstance(load, LoanLoad) else PrefixPull(load, deadline, after)
    )


def engine_id_of(epoch: int) -> str:
    """Return the id of a start of an engine, as peers are told."""
    return f"{epoch:016x}"
