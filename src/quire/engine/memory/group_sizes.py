"""How many blocks each cache group gets, see `quire.kv.blocks.groups`.

Of the first group, a sequence needs a block for every `block_size` tokens. Of a group with a window, it never
needs more than the window can touch, `ceil(window / block_size) + 1`; all sequences together need some more,
because tokens of two steps may have blocks before the windows move on.

Memory is divided so that `max_num_seqs` sequences of equal length can be as long as possible. While it holds
less than a window for each of them, all groups have equally many blocks, as many as one group of all layers
would have (but for the memory of `NULL_BLOCK`), so that no workload runs fewer sequences. Beyond that the
first group grows alone, as long as the others have room for cached prefixes, too: one of those needs all of
its blocks in the first group and those of a window in the others, like a sequence that runs. The others have
room for as many prefixes of maximum length as the first group has, and of `WINDOWS_PER_PREFIX` windows unless
the first group has no layers: then its blocks are no memory, and tell nothing of prefixes.

A group with a window is therefore never the one that runs out first when all sequences are equally long.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Self

from quire.config import SchedulerConfig

STEPS_AHEAD = 2
"""Steps whose tokens may have blocks before the windows of their sequences move on."""

WINDOWS_PER_PREFIX = 4
"""Length of cached prefixes, in windows, that all groups have equal room for."""

MAX_BLOCKS = 2**31 - 1
"""Block ids are 32-bit numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSizes:
    """The blocks of all cache groups of an engine, by the number of blocks of the first one.

    Args:
        bytes_per_block: [G] of each group; for the first one, the draft model's block included.
        most_running: blocks of the first group that `max_num_seqs` sequences of maximum length use.
        most_in_windows: [G - 1] blocks of each other group that sequences use, however long they are.
    """

    bytes_per_block: tuple[int, ...]
    most_running: int
    most_in_windows: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        scheduler: SchedulerConfig,
        windows: Sequence[int],
        bytes_per_block: Sequence[int],
        *,
        max_model_len: int,
    ) -> Self:
        """Return the sizes for an engine with this scheduler.

        Args:
            scheduler: with its limits of a step.
            windows: [G - 1] tokens that the layers of each group but the first see.
            bytes_per_block: [G] as for the class.
            max_model_len: longest sequence in tokens.
        """
        size, num_seqs = scheduler.block_size, scheduler.max_num_seqs
        tokens = scheduler.with_step_tokens().max_num_batched_tokens  # an engine's are decided already
        ahead = STEPS_AHEAD * (blocks_for(tokens, size) + 1)
        return cls(
            tuple(bytes_per_block),
            num_seqs * blocks_for(max_model_len, size),
            tuple(num_seqs * (blocks_for(window, size) + 1) + ahead for window in windows),
        )

    def num_blocks(self, first: int) -> list[int]:
        """Return the number of blocks of each group if the first has `first`; `NULL_BLOCK` is included."""
        return [first, *(self._in_window(first, most) for most in self.most_in_windows)]

    def _in_window(self, first: int, most: int) -> int:
        if not first:
            return 0
        of_longest = -(-most * first // self.most_running)
        of_prefixes = -(-first // WINDOWS_PER_PREFIX) if self.bytes_per_block[0] else 0
        return 1 + min(first, max(most, of_longest, of_prefixes))

    def num_bytes(self, first: int) -> int:
        """Return the bytes of all groups if the first has `first` blocks."""
        numbers = self.num_blocks(first)
        return sum(number * size for number, size in zip(numbers, self.bytes_per_block, strict=True))

    def largest(self, num_bytes: int, *, beside: int = 0) -> int:
        """Return the most blocks of the first group with which all groups fit into `num_bytes`.

        If they take no memory at all, as many are enough as sequences can use.

        Args:
            num_bytes: that there are; may be negative.
            beside: further bytes for each block of the first group.
        """
        if not any(self.bytes_per_block):
            return self.most_running
        return bisect.bisect(
            range(1, MAX_BLOCKS), num_bytes, key=lambda first: self.num_bytes(first) + beside * first
        )


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)
