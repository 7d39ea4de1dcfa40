"""The steps that have been planned and not been applied yet, and what cannot be reused until they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from quire.kv.blocks.block_pools import BlockPools
from quire.kv.blocks.checkpoints import CheckpointPool
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.step import IntArray, SchedulerOutput


class StepsInFlight(deque[SchedulerOutput]):
    """Planned steps, oldest first; steps are numbered from 0 in the order in which they are planned."""

    def __init__(self) -> None:
        super().__init__()
        self.next_step = 0  # number of the step that is planned next

    @property
    def await_tokens(self) -> bool:
        """Whether requests wait for the tokens of one of the steps, for drafts."""
        return any(step.may_have_drafts and step.awaits_tokens.any() for step in self)

    def num_computed_before(self, slot: int) -> int | None:
        """Return how many tokens of a slot had been computed before these steps; None: it is in none."""
        for step in self:
            for row in np.flatnonzero(step.slots == slot).tolist():
                return int(step.num_computed_tokens[row])
        return None

    def launch(self, step: SchedulerOutput) -> None:
        """Add the step that has just been planned."""
        self.append(step)
        self.next_step += 1

    def land(self, step: SchedulerOutput) -> None:
        """Remove the oldest step, which is about to be applied.

        Raises:
            ValueError: `step` is another one.
        """
        if not self or step.step != self[0].step:
            expected = self[0].step if self else None
            raise ValueError(f"step {step.step} applied, but {expected} is in flight")
        self.popleft()

    def require_newest(self, step: SchedulerOutput) -> None:
        """Raise `ValueError` unless `step` is the newest in flight."""
        if not self or step.step != self[-1].step:
            raise ValueError(f"step {step.step} is not the newest step in flight")


class _FencedBlocks(NamedTuple):
    step: int  # the one that cancels the load; once it has been applied, nothing writes to the blocks
    request_id: str
    block_ids: IntArray  # [G, blocks]
    checkpoint: int  # that it writes to, too; -1: none


class Fences:
    """Holds slots and blocks back until the last step that names them has been applied.

    Args:
        in_flight: the steps that may name them.
        running: gets the slots back.
        pools: get the blocks back.
        checkpoints: get those of states back; None: there are no states.
    """

    def __init__(
        self,
        in_flight: StepsInFlight,
        running: RunningSlots,
        pools: BlockPools,
        checkpoints: CheckpointPool | None,
    ) -> None:
        self._in_flight = in_flight
        self._running = running
        self._pools = pools
        self._checkpoints = checkpoints
        self._slots: deque[tuple[int, int]] = deque()  # (last step that names it, slot)
        self._blocks: deque[_FencedBlocks] = deque()
        self.num_blocks = 0  # fenced

    def free_slot(self, slot: int) -> None:
        """Make a slot that was left usable: now, or once all steps in flight have been applied."""
        if self._in_flight:
            self._slots.append((self._in_flight.next_step - 1, slot))
        else:
            self._running.free(slot)

    def fence_blocks(self, request_id: str, block_ids: IntArray, checkpoint: int) -> None:
        """Hold back the blocks of a load that the next step cancels, and its checkpoint; -1: it has none."""
        self._blocks.append(_FencedBlocks(self._in_flight.next_step, request_id, block_ids, checkpoint))
        self.num_blocks += block_ids.shape[1]

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
            fenced = self._blocks.popleft()
            self.num_blocks -= fenced.block_ids.shape[1]
            self._pools.release(fenced.block_ids)
            if self._checkpoints is not None and fenced.checkpoint >= 0:
                self._checkpoints.give_back(fenced.checkpoint)

    def held_blocks(self) -> Iterator[IntArray]:
        """Yield the fenced blocks, [G, blocks] of each load: each is one reference."""
        for fenced in self._blocks:
            yield fenced.block_ids

    def held_checkpoints(self) -> list[int]:
        """Return the fenced checkpoints."""
        return [fenced.checkpoint for fenced in self._blocks if fenced.checkpoint >= 0]

    @property
    def num_slots(self) -> int:
        """Number of fenced slots: for leak checks."""
        return len(self._slots)
