"""A question to peers: how much of what a prompt lacks has each of them in its prefix cache?"""

from __future__ import annotations

import threading
import time

from quire.datadist.wire.protocol import MAX_PREFIX_BLOCKS
from quire.kv.blocks.block_hash import SequenceKeys
from quire.kv.peers.transfer_params import Address


class PrefixLookup:
    """One question, which the threads of several peers answer.

    Args:
        keys: of the prompt's blocks; nobody else uses them any more.
        blocks: those that are missing.
        deadline: seconds on the monotonic clock, after which answers are not waited for.
    """

    def __init__(self, keys: SequenceKeys, blocks: range, deadline: float) -> None:
        self.blocks = blocks[:MAX_PREFIX_BLOCKS]
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
        """The peer that has the most, and how many blocks of it; None: nobody has anything."""
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
        """Note that a peer has so many of the blocks, from the first on."""
        with self._lock:
            self._num_answers += 1
            if num_blocks > self._most:
                self._best, self._most = address, num_blocks
