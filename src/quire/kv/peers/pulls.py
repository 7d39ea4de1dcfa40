"""KV that is to be read from a peer into blocks of this engine's cache."""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import ABC, abstractmethod

import numpy as np
from typing_extensions import override

from quire.datadist.decoder_link import DecoderLink
from quire.datadist.loans import ArrivingBlocks
from quire.datadist.memory import CacheMemory
from quire.datadist.protocol import LoanRequest, PrefixRequest
from quire.kv.peers.transfer_params import Address, BorrowingParams

OFFER_PATIENCE = 10.0
"""Seconds that a peer waits for a request which it has not got yet."""


@dataclasses.dataclass(slots=True, frozen=True)
class LoanLoad:
    """A loan to read for a request; its last blocks go into `block_ids`."""

    request_id: str
    params: BorrowingParams
    num_blocks: int
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
    """

    def __init__(self, request_id: str, block_ids: list[int], deadline: float) -> None:
        self.request_id = request_id
        self.transfer_id = ""  # of the loan that is read, if it is one
        self.block_ids = np.array(block_ids, dtype=np.int64)
        self.deadline = deadline
        self.seconds = 0.0  # that reading took
        self.has_ended = False  # nothing is written to the blocks any more
        self.has_failed = False
        self._lock = threading.Lock()
        self._link: DecoderLink | None = None
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._is_cancelled

    @property
    @abstractmethod
    def measures_reading(self) -> bool:
        """Whether nothing but reading takes its time."""

    def run(self, link: DecoderLink, memory: CacheMemory, block_bytes: int) -> None:
        """Read over a link.

        Raises:
            LLMException: what is wanted cannot be read.
            ConnectionError: the peer is another than the one that has answered.
        """
        with self._lock:
            if self._is_cancelled:
                return
            self._link = link
        began = time.monotonic()
        try:
            self._read(link, memory, block_bytes)
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
    def _read(self, link: DecoderLink, memory: CacheMemory, block_bytes: int) -> None:
        """Read over a link; raises what `run` does."""


class LoanPull(PeerPull):
    """Reads a loan. Its request needs the loan no more when this has ended."""

    def __init__(self, load: LoanLoad, deadline: float) -> None:
        super().__init__(load.request_id, load.block_ids, deadline)
        self.transfer_id = load.params.transfer_id
        self._load = load

    @property
    @override
    def measures_reading(self) -> bool:
        return bool(self._load.params.remote_engine_id)  # else part of the time is the peer's to compute

    @override
    def _read(self, link: DecoderLink, memory: CacheMemory, block_bytes: int) -> None:
        load, engine_id = self._load, self._load.params.remote_engine_id
        if engine_id and engine_id != engine_id_of(link.epoch):
            raise ConnectionError("it has been started anew since it computed the prompt")
        first = load.num_blocks - len(self.block_ids)
        patience = 0 if engine_id else int(OFFER_PATIENCE * 1e3)
        request = LoanRequest(0, 0, self.transfer_id, first, load.num_blocks, load.digest, patience, 0)
        link.pull_parts(request, memory, ArrivingBlocks(self.block_ids, first, block_bytes), self.deadline)


class PrefixPull(PeerPull):
    """Reads blocks of a prefix cache."""

    def __init__(self, load: PrefixLoad, deadline: float) -> None:
        super().__init__(load.request_id, load.block_ids, deadline)
        self._digests = load.digests

    @property
    @override
    def measures_reading(self) -> bool:
        return True

    @override
    def _read(self, link: DecoderLink, memory: CacheMemory, block_bytes: int) -> None:
        request = PrefixRequest(0, 0, self._digests, 0)
        link.pull_parts(request, memory, ArrivingBlocks(self.block_ids, 0, block_bytes), self.deadline)


def pull_of(load: LoanLoad | PrefixLoad, deadline: float) -> PeerPull:
    """Return what reads a load until `deadline`, seconds on the monotonic clock."""
    return LoanPull(load, deadline) if isinstance(load, LoanLoad) else PrefixPull(load, deadline)


def engine_id_of(epoch: int) -> str:
    """Return the id of a start of an engine, as peers are told."""
    return f"{epoch:016x}"
