"""Slots and blocks that cannot be reused yet, because a step in flight still names them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from quire.kv.blocks.block_pool import BlockPool
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.scheduling.accounts.steps_in_flight import StepsInFlight
from quire.step import IntArray


class _FencedBlocks(NamedTuple):
    step: int  # the one that cancels the load; once it has been applied, nothing writes to the blocks
    request_id: str
    block_ids: IntArray


class Fences:
    """Holds slots and blocks back until the last step that names them has been applied.

    Args:
        in_flight: the steps that may name them.
        running: gets the slots back.
        pool: gets the blocks back.
    """

    def __init__(self, in_flight: StepsInFlight, running: RunningSlots, pool: BlockPool) -> None:
        self._in_flight = in_flight
        self._running = running
        self._pool = pool
        self._slots: deque[tuple[int, int]] = deque()  # (last step that names it, slot)
        self._blocks: deque[_FencedBlocks] = deque()
        self.num_blocks = 0  # fenced

    def free_slot(self, slot: int) -> None:
        """Make a slot that was left usable: now, or once all steps in flight have been applied."""
        if self._in_flight:
            self._slots.append((self._in_flight.next_step - 1, slot))
        else:
            self._running.free(slot)

    def fence_blocks(self, request_id: str, block_ids: IntArray) -> None:
        """Hold back the blocks of a load that the next step cancels."""
        self._blocks.append(_FencedBlocks(self._in_flight.next_step, request_id, block_ids))
        self.num_blocks += len(block_ids)

    def refence_blocks(self, step: int) -> list[str]:
        """Move the fences around blocks whose loads steps up to `step` cancelled to the next step.

        Returns:
            The requests whose loads must be cancelled again.
        """
        request_ids = []
        for index, fenced in enumerate(self._blocks):
            if fenced.step <= step:
                self._blocks[index] = fenced._replace(step=self._in_flight.next_step)
                request_ids.append(fenced.request_id)
        return request_ids

    def lift(self, step: int) -> None:
        """Free what only steps up to `step`, which have been applied, could still touch."""
        while self._slots and self._slots[0][0] <= step:
            self._running.free(self._slots.popleft()[1])
        while self._blocks and self._blocks[0].step <= step:
            block_ids = self._blocks.popleft().block_ids
            self.num_blocks -= len(block_ids)
            self._pool.release(block_ids)

    def held_blocks(self) -> Iterator[int]:
        """Yield the fenced blocks, with repetition: each is one reference."""
        for fenced in self._blocks:
            yield from fenced.block_ids.tolist()

    @property
    def num_slots(self) -> int:
        """Number of fenced slots: for leak checks."""
        return len(self._slots)
