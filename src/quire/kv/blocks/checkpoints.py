"""States of recurrent layers that are kept for the prefix cache.

A running sequence works on the state of its slot. A *checkpoint* is a copy of such a state behind a full
block of the sequence's tokens, and is found by that block's key, so that a sequence with the same tokens up
to there can go on from it. A prefix hit therefore ends at a checkpoint; the tokens behind it are computed.

A checkpoint is *free*, *pending* (a step in flight writes it) or *kept* (it can be found). It is copied to a
slot at the start of the step that uses it, so nothing holds a reference to it: the least recently used one is
overwritten when there is no free one. One that its own sequence has left behind for a later one goes first.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from quire.kv.blocks.block_hash import BlockKey, SequenceKeys


@dataclasses.dataclass(frozen=True, slots=True)
class StateSlots:
    """The states of a model with recurrent layers, as a scheduler needs to know them.

    Args:
        num_checkpoints: states beside those that running sequences work on.
        interval: tokens between checkpoints within a prompt.
    """

    num_checkpoints: int
    interval: int


class CheckpointPool:
    """The checkpoints, numbered from 0, and which of them can be found.

    Args:
        num_checkpoints: how many there are.
    """

    def __init__(self, num_checkpoints: int) -> None:
        self.num_checkpoints = num_checkpoints
        self._free = list(range(num_checkpoints))[::-1]
        self._kept: OrderedDict[bytes, tuple[int, BlockKey]] = OrderedDict()  # next to be overwritten first

    @property
    def num_free(self) -> int:
        """Checkpoints that hold nothing."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Checkpoints that can be found."""
        return len(self._kept)

    def take(self) -> int | None:
        """Return a checkpoint to be written, which is pending from now on; None: all are pending."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return None
        _, (checkpoint, _) = self._kept.popitem(last=False)
        return checkpoint

    def give_back(self, checkpoint: int) -> None:
        """Make a pending checkpoint free: it has not been written, or nobody can use it."""
        self._free.append(checkpoint)

    def keep(self, checkpoint: int, key: BlockKey) -> None:
        """Make a pending checkpoint findable behind a block; it is free if there is one there already."""
        if key.digest in self._kept:
            self._free.append(checkpoint)
        else:
            self._kept[key.digest] = checkpoint, key

    def find(self, keys: SequenceKeys, num_blocks: int) -> tuple[int, int]:
        """Return the deepest checkpoint within the first blocks of a sequence. Changes nothing.

        Returns:
            The number of blocks before it, and the checkpoint; 0 and -1: there is none.
        """
        if not self._kept:
            return 0, -1
        digests = list(keys.digests(0, num_blocks))
        for index in range(len(digests) - 1, -1, -1):
            found = self._kept.get(digests[index])
            if found is not None and found[1] == keys[index]:
                return index + 1, found[0]
        return 0, -1

    def touch(self, digest: bytes) -> None:
        """Note that the checkpoint behind a block has been used."""
        self._kept.move_to_end(digest)

    def leave(self, digest: bytes) -> None:
        """Overwrite the checkpoint behind a block before all others, if there is one."""
        if digest in self._kept:
            self._kept.move_to_end(digest, last=False)

    def forget_contents(self) -> None:
        """Make all checkpoints that can be found free."""
        self._free += [checkpoint for checkpoint, _ in self._kept.values()]
        self._kept.clear()

    def check(self, pending: list[int]) -> None:
        """Check that each checkpoint is in one place; `AssertionError` names what does not hold.

        Args:
            pending: those that steps in flight write.
        """
        places = [*self._free, *pending, *(checkpoint for checkpoint, _ in self._kept.values())]
        assert sorted(places) == list(range(self.num_checkpoints)), (
            f"invariant 1: checkpoints {self._free} are free, {pending} pending, the others of "
            f"{self.num_checkpoints} kept: one is in two places or in none"
        )
