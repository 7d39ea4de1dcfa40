"""Blocks lent to peers by name, even while they are being computed.

The owner's thread reports which blocks are ready, or how many bytes of blocks being computed; any number of
readers take what is ready, in order. A loan that ends during a reading fails it, even if all bytes have been
sent, so that blocks with new content are never mistaken for the lent ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from quire.datadist.caches.spans import Int64Array
from quire.datadist.status import LLMException, LLMStatusCode, failure, invalid

BlockIds = tuple[int, ...]
"""The numbers of one block in each group, or `NO_BLOCK`, see `quire.datadist.loans.arriving_blocks`."""

_CHECK_INTERVAL = 0.5
"""Seconds between a waiting reader's checks whether it is still wanted."""

_MAX_OVER = 1024
"""Maximum remembered names of loans that have ended, or were released before they were offered."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPart:
    """`num_bytes` bytes from `offset` on of each of some adjacent blocks of a loan."""

    first_block: int
    num_blocks: int
    offset: int
    num_bytes: int

    def split(self, max_blocks: int) -> Iterator[BlockPart]:
        """Yield the same part of at most `max_blocks` blocks at a time."""
        for done in range(0, self.num_blocks, max_blocks):
            num_blocks = min(max_blocks, self.num_blocks - done)
            yield BlockPart(self.first_block + done, num_blocks, self.offset, self.num_bytes)


@dataclasses.dataclass(slots=True)
class _Loan:
    name: str
    owner: str
    num_blocks: int
    digest: bytes
    number: int
    block_ids: list[BlockIds] = dataclasses.field(default_factory=list)
    num_ready: int = 0  # complete leading blocks
    computed_stop: int = 0  # blocks from `num_ready` to this one are being computed
    computed_bytes: int = 0  # bytes of each of them that are ready
    num_readers: int = 0
    ended_because: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether all its blocks are ready."""
        return self.num_ready == self.num_blocks


class Loans:
    """The loans of an owner. Thread-safe.

    Args:
        block_bytes: bytes of a block.
        clock: returns seconds.
    """

    def __init__(self, block_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.block_bytes = block_bytes
        self._clock = clock
        self._loans: dict[str, _Loan] = {}  # by name
        self._by_number: dict[int, _Loan] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._is_closed = False
        self._renewed: set[str] = set()
        self._released: set[str] = set()
        self._given_back: set[int] = set()  # numbers of loans released by peers, still to be ended
        self._over: dict[str, bool] = {}  # released before being offered (True), or ended

    @property
    def is_empty(self) -> bool:
        """Whether nothing is lent."""
        return not self._loans

    # -- the owner -----------------------------------------------------------------------------------------
    #
    # It refers to loans by number, as a name may be reused while a step of the earlier loan is computed.

    def offer(self, name: str, owner: str, num_blocks: int, digest: bytes) -> int | None:
        """Lend blocks that are not ready yet; return the loan's number, or None if the name is taken.

        A loan that was released before this call ends at once.

        Args:
            name: that peers know.
            owner: that `take_renewed` and `take_released` return.
            num_blocks: how many, at least 1.
            digest: digest of the content of all of them.
        """
        with self._changed:
            if name in self._loans:
                return None
            number = next(self._numbers)
            loan = _Loan(name, owner, num_blocks, digest, number)
            self._loans[name] = self._by_number[number] = loan
            if self._over.pop(name, False):
                self._given_back.add(number)
                self._end(loan, "a peer has given it back before it was offered")
            self._changed.notify_all()
        return number

    def begin_step(self, number: int, first_block: int, block_ids: Sequence[BlockIds]) -> None:
        """Note that a step completes the blocks of a loan from `first_block` on.

        Ends a loan whose previous step has not ended, as what that step wrote is unknown, and one whose
        blocks do not follow the previous ones, as it is recomputed into other blocks.
        """
        with self._changed:
            loan = self._by_number.get(number)
            if loan is None:
                return
            if loan.computed_stop > loan.num_ready:
                self._end(loan, "its blocks were not computed to the end")
                return
            if first_block != len(loan.block_ids):
                self._end(loan, "its blocks are recomputed")
                return
            loan.block_ids += block_ids
            loan.computed_stop, loan.computed_bytes = len(loan.block_ids), 0

    def advance(self, numbers: Iterable[int], num_bytes: int) -> None:
        """Note that the first `num_bytes` of the blocks being computed for these loans are ready."""
        with self._changed:
            for loan in filter(None, map(self._by_number.get, numbers)):
                loan.computed_bytes = num_bytes
            self._changed.notify_all()

    def end_step(self, number: int) -> None:
        """Note that the step has completed its blocks."""
        with self._changed:
            loan = self._by_number.get(number)
            if loan is not None:
                loan.num_ready = loan.computed_stop
                self._changed.notify_all()

    def is_ready(self, number: int) -> bool:
        """Return whether all blocks of a loan are ready; False if there is none."""
        with self._changed:
            loan = self._by_number.get(number)
            return loan is not None and loan.is_ready

    def was_given_back(self, number: int) -> bool:
        """Return whether a peer has released a loan that its owner has not ended yet."""
        with self._changed:
            return number in self._given_back

    def end(self, number: int, reason: str) -> None:
        """End a loan; its readers fail. Has no effect if there is no such loan."""
        with self._changed:
            self._given_back.discard(number)
            loan = self._by_number.get(number)
            if loan is not None:
                self._end(loan, reason)

    def close(self, reason: str) -> None:
        """Lend nothing more, and end all waits for offers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for loan in list(self._loans.values()):
                self._end(loan, reason)

    def take_renewed(self) -> set[str]:
        """Return the owners of loans that peers are reading, or have renewed since the last call."""
        with self._changed:
            renewed, self._renewed = self._renewed, set()
            return renewed | {loan.owner for loan in self._loans.values() if loan.num_readers}

    def take_released(self) -> set[str]:
        """Return the owners of loans that peers have released since the last call."""
        with self._changed:
            released, self._released = self._released, set()
            return released

    # -- readers -------------------------------------------------------------------------------------------

    def open(
        self,
        name: str,
        first_block: int,
        num_blocks: int,
        digest: bytes,
        *,
        patience: float,
        is_wanted: Callable[[], bool],
    ) -> LoanReading:
        """Begin to read the blocks of a loan from `first_block` on.

        Args:
            name: name of the loan.
            first_block: counted in the loan.
            num_blocks: that the reader takes the loan to have.
            digest: digest of the content that the reader expects of all of them.
            patience: seconds to wait for the loan to be offered, unless one of this name has ended.
            is_wanted: returns whether to go on waiting; it is asked now and then.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST (there is no such loan), LLM_PARAM_INVALID.
            ConnectionError: the loan is no longer needed.
        """
        with self._changed:
            self._wait_for_offer(name, self._clock() + patience, is_wanted)
            loan = self._loans.get(name)
            if loan is None:
                raise _not_lent(name, "it was never offered, or has ended")
            if (num_blocks, digest) != (loan.num_blocks, loan.digest):
                raise invalid(f"loan {name!r} is {loan.num_blocks} blocks of other tokens")
            if not 0 <= first_block < num_blocks:
                raise invalid(f"block {first_block} is not among the {num_blocks} of loan {name!r}")
            loan.num_readers += 1
            return LoanReading(self, name, loan, range(first_block, num_blocks))

    def _wait_for_offer(self, name: str, deadline: float, is_wanted: Callable[[], bool]) -> None:
        while not self._is_decided(name) and (left := deadline - self._clock()) > 0:
            if not is_wanted():
                raise ConnectionError(f"loan {name!r} is no longer needed")
            self._changed.wait(min(left, _CHECK_INTERVAL))

    def _is_decided(self, name: str) -> bool:
        """Return whether it is known if such a loan exists or never will."""
        return name in self._loans or name in self._over or self._is_closed

    def renew(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Renew loans for a peer; return those that do not exist, and the ready ones."""
        with self._changed:
            wanted = set(names)
            held = [self._loans[name] for name in sorted(wanted & self._loans.keys())]
            self._renewed.update(loan.owner for loan in held)
            return sorted(wanted - self._loans.keys()), [loan.name for loan in held if loan.is_ready]

    def release(self, names: Iterable[str]) -> None:
        """Release loans for a peer: they end, even those that are offered later."""
        with self._changed:
            for name in names:
                loan = self._loans.get(name)
                if loan is None:
                    self._note_over(name, is_early=True)
                else:
                    self._released.add(loan.owner)
                    self._given_back.add(loan.number)
                    self._end(loan, "a peer has released it")

    def _end(self, loan: _Loan, reason: str) -> None:
        del self._loans[loan.name], self._by_number[loan.number]
        self._note_over(loan.name, is_early=False)
        loan.ended_because = reason
        self._changed.notify_all()

    def _note_over(self, name: str, *, is_early: bool) -> None:
        self._over.setdefault(name, is_early)
        if len(self._over) > _MAX_OVER:
            del self._over[next(iter(self._over))]

    # -- one reading ---------------------------------------------------------------------------------------

    def _next_part(self, reading: LoanReading, deadline: float, is_wanted: Callable[[], bool]) -> BlockPart:
        with self._changed:
            while True:
                reading.require_held()
                part = reading.ready_part()
                if part is not None:
                    return part
                left = deadline - self._clock()
                if left <= 0:
                    raise TimeoutError(f"blocks of loan {reading.name!r} were not computed in time")
                if not is_wanted():
                    raise ConnectionError(f"loan {reading.name!r} is no longer needed")
                self._changed.wait(min(left, _CHECK_INTERVAL))

    def _end_reading(self, loan: _Loan) -> None:
        with self._changed:
            loan.num_readers -= 1


class LoanReading:
    """One reading of a loan's blocks, used and closed by one thread."""

    def __init__(self, loans: Loans, name: str, loan: _Loan, blocks: range) -> None:
        self.name = name
        self._loans = loans
        self._loan = loan
        self._next = blocks.start  # all blocks before this one have been taken
        self._stop = blocks.stop
        self._group_stop = blocks.start  # end of the partly taken blocks
        self._offset = 0  # bytes taken of each of them

    def parts(self, deadline: float, is_wanted: Callable[[], bool]) -> Iterator[BlockPart]:
        """Yield the parts to read, each as soon as it is ready.

        Args:
            deadline: on the clock.
            is_wanted: returns whether to go on waiting; it is asked now and then.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST (the loan has ended).
            OSError: the rest was not ready in time, or is no longer needed.
        """
        while self._next < self._stop:
            yield self._loans._next_part(self, deadline, is_wanted)

    def block_ids(self, part: BlockPart) -> Int64Array:
        """Return the owner's numbers of a part's blocks, of each group [G, N]."""
        first = part.first_block
        return np.array(self._loan.block_ids[first : first + part.num_blocks], dtype=np.int64).T

    def require_held(self) -> None:
        """Raise `LLMException` (LLM_KV_CACHE_NOT_EXIST) if the loan has ended."""
        if self._loan.ended_because:
            raise _not_lent(self.name, self._loan.ended_because)

    def ready_part(self) -> BlockPart | None:
        """Take the next ready part, if any; the caller holds the lock."""
        loan, block_bytes = self._loan, self._loans.block_bytes
        if self._group_stop == self._next:
            self._group_stop = max(self._next, min(self._stop, loan.num_ready))
            if self._group_stop == self._next and loan.computed_bytes:
                self._group_stop = max(self._next, min(self._stop, loan.computed_stop))
        if self._group_stop == self._next:
            return None
        ready = block_bytes if loan.num_ready >= self._group_stop else loan.computed_bytes
        if ready <= self._offset:
            return None
        part = BlockPart(self._next, self._group_stop - self._next, self._offset, ready - self._offset)
        self._offset = ready
        if ready == block_bytes:
            self._next, self._offset = self._group_stop, 0
        return part

    def close(self) -> None:
        """End the reading; call it once."""
        self._loans._end_reading(self._loan)


def _not_lent(name: str, reason: str) -> LLMException:
    return failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"loan {name!r} cannot be read: {reason}")
