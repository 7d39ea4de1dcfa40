"""Reports to the loans which blocks steps have computed, at once or when the device has finished."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence

from quire.datadist.loans.loans import BlockIds, Loans
from quire.kv.connectors.step_times import StepMark


@dataclasses.dataclass(slots=True, frozen=True)
class LoanStep:
    """Blocks of a loan, from `first_block` on, that a step completes."""

    request_id: str
    loan: int
    first_block: int
    block_ids: list[BlockIds]


@dataclasses.dataclass(slots=True, frozen=True)
class _StepInFlight:
    steps: Sequence[LoanStep]
    end: StepMark
    failed_ids: Callable[[], frozenset[str]]


class LoanSteps:
    """Tells the loans which blocks are ready. `settle` may be called by another thread than the rest.

    Args:
        loans: what peers read.
        are_in_flight: whether steps are begun before those before them have been computed. Then blocks are
            reported when their step has been computed, and not layer by layer.
    """

    def __init__(self, loans: Loans, *, are_in_flight: bool) -> None:
        self._loans = loans
        self._are_in_flight = are_in_flight
        self._steps: Sequence[LoanStep] = ()  # of the step that was begun
        self._in_flight: deque[_StepInFlight] = deque()
        self._lock = threading.Lock()

    def begin(self, steps: Sequence[LoanStep]) -> None:
        """Note what the step completes whose forward pass comes next."""
        self._steps = steps
        if not self._are_in_flight:
            self._begin(steps)

    def advance(self, num_bytes: int) -> None:
        """Note that the step has written the first `num_bytes` of each block that it completes."""
        if self._steps:
            self._loans.advance([step.loan for step in self._steps], num_bytes)

    def end(self, failed_ids: Callable[[], frozenset[str]], end: StepMark) -> None:
        """Note that the step has been computed, or that a device has been asked to.

        Args:
            failed_ids: returns the requests that computed invalid KV as soon as that is known.
            end: the point behind the step.
        """
        steps, self._steps = self._steps, ()
        if not self._are_in_flight:
            self._end(steps, failed_ids())
            return
        with self._lock:
            if steps:
                self._in_flight.append(_StepInFlight(steps, end, failed_ids))
            while self._in_flight and self._in_flight[0].end.is_reached:
                self._settle_first()

    def settle(self, request_id: str) -> None:
        """Report all blocks that a request has computed, whose last token is known."""
        with self._lock:
            while any(step.request_id == request_id for one in self._in_flight for step in one.steps):
                self._settle_first()

    def _settle_first(self) -> None:
        one = self._in_flight.popleft()
        self._begin(one.steps)
        self._end(one.steps, one.failed_ids())

    def _begin(self, steps: Sequence[LoanStep]) -> None:
        for step in steps:
            self._loans.begin_step(step.loan, step.first_block, step.block_ids)

    def _end(self, steps: Sequence[LoanStep], failed_ids: frozenset[str]) -> None:
        for step in steps:
            if step.request_id in failed_ids:
                self._loans.end(step.loan, "its request has failed")
            else:
                self._loans.end_step(step.loan)
