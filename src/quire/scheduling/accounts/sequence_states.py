"""The scheduler's part of recurrent layers: where chunks end, and which states are restored and kept.

A running sequence works on the state of its slot. A checkpoint of it can be kept where a step ends behind a
full block, so chunks are cut there: every `interval` tokens of what a request begins with, behind its last
full block, and where the prefix cache has blocks of it up to, but no checkpoint: there it forks from another
sequence. Later tokens come one by one, and the state behind each full block of them is kept in place of the
one before it. With drafts they come several at a time: a state takes in none of the drafts, and of the other
tokens those up to where a block ends; the next step begins with what it has not taken in. A sequence is most
likely continued at its end, so only its newest checkpoint is likely to be found, and those that others have
found, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quire.kv.blocks.checkpoints import CheckpointPool, StateSlots
from quire.kv.blocks.manager import KVCacheManager, Prefix
from quire.request import Request
from quire.scheduling.accounts.remote_loads import RemoteLoad
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.step import IntArray, StateCopies


class _Save(NamedTuple):
    """A checkpoint that a step in flight writes."""

    slot: int
    checkpoint: int
    num_tokens: int


@dataclasses.dataclass(eq=False)
class SequenceStates:
    """Bounds chunks, and says which states a step copies. Arrays are [S], one per slot.

    Args:
        sizes: of the pool of states.
        pool: the checkpoints.
        kv: has the keys of their blocks.
        running: the sequences.
    """

    sizes: StateSlots
    pool: CheckpointPool
    kv: KVCacheManager
    running: RunningSlots

    def __post_init__(self) -> None:
        num_slots = len(self.running.num_tokens)
        self._end = np.zeros(num_slots, dtype=np.int32)  # of the full blocks that it began with, in tokens
        self._fork = np.zeros(num_slots, dtype=np.int32)  # in tokens; 0: none
        self._newest: list[bytes] = [b""] * num_slots  # digest before its newest checkpoint
        self._has_answer = np.zeros(num_slots, dtype=bool)  # whether that is one of an answer
        self._pending: dict[int, list[_Save]] = {}  # by step

    # -- chunks --------------------------------------------------------------------------------------------

    def limit_chunks(self, slots: IntArray, wanted: IntArray) -> IntArray:
        """Return how many of the `wanted` tokens each slot may compute in one step."""
        computed = self.running.num_computed[slots]
        most = self._next_cut(computed, self._end[slots], self._fork[slots]) - computed
        limited: IntArray = np.minimum(wanted, most)
        return limited

    def first_chunk_bound(self, request: Request, prefix: Prefix) -> int:
        """Return how many tokens a request may compute at once behind its prefix."""
        computed = np.array([prefix.num_tokens], dtype=np.int32)
        end, fork = self._end_of(request), prefix.num_findable * self.kv.block_size
        return int((self._next_cut(computed, np.array([end]), np.array([fork])) - computed)[0])

    def _next_cut(self, computed: IntArray, end: IntArray, fork: IntArray) -> IntArray:
        """Return the first of the places behind `computed` tokens where a chunk is cut."""
        if not self.pool.num_checkpoints:
            return np.full(len(computed), np.iinfo(np.int32).max, dtype=np.int32)
        interval = self.sizes.interval
        cut = np.minimum((computed // interval + 1) * interval, end)
        cut = np.where(fork > computed, np.minimum(cut, fork), cut)
        cuts: IntArray = np.where(computed < end, cut, np.iinfo(np.int32).max)
        return cuts

    def _end_of(self, request: Request) -> int:
        return (request.num_tokens - 1) // self.kv.block_size * self.kv.block_size

    # -- loads ---------------------------------------------------------------------------------------------

    def can_follow(self, num_loaded: int) -> bool:
        """Return whether a state can be loaded behind `num_loaded` tokens, with their KV."""
        return num_loaded % self.kv.block_size == 0 and self.pool.has_takeable

    def prefix_of(self, load: RemoteLoad) -> Prefix | None:
        """Return what has arrived with a load; None: its checkpoint has been overwritten since then."""
        key = self.kv.key(load.request.request_id, load.num_blocks - 1)
        checkpoint = None if key is None else self.pool.behind(key)
        if checkpoint is None:
            return None
        return dataclasses.replace(load.prefix(), checkpoint=checkpoint, num_findable=load.num_blocks)

    def behind_prompt(self, request: Request) -> tuple[int | None, bytes | None]:
        """Return the checkpoint behind the full blocks of a prompt before its last token, if it is there.

        Returns:
            It, and the digest of its block; None and None: there is none.
        """
        num_blocks = (request.num_prompt_tokens - 1) // self.kv.block_size
        key = self.kv.key(request.request_id, num_blocks - 1) if num_blocks else None
        checkpoint = None if key is None else self.pool.behind(key)
        return (None, None) if key is None or checkpoint is None else (checkpoint, key.digest)

    def take_loaded(self, load: RemoteLoad) -> None:
        """Make the checkpoint of a load that has arrived, and whose blocks can be found, findable."""
        key = self.kv.key(load.request.request_id, load.num_blocks - 1)
        assert key is not None, "without a prefix cache there are no checkpoints"
        self.pool.keep(load.checkpoint, key, is_likely=True)
        load.checkpoint = -1

    # -- copies --------------------------------------------------------------------------------------------

    def enter(self, slot: int, request: Request, prefix: Prefix) -> None:
        """Note what a request begins with that has just been admitted to a slot."""
        self._end[slot] = self._end_of(request)
        self._fork[slot] = prefix.num_findable * self.kv.block_size
        key = self.kv.key(request.request_id, prefix.num_full - 1) if prefix.checkpoint >= 0 else None
        self._newest[slot] = b"" if key is None else key.digest
        self._has_answer[slot] = False
        self.pool.touch(self._newest[slot])

    def copies(
        self,
        step: int,
        restored: list[tuple[int, int]],
        slots: IntArray,
        start: IntArray,
        end: IntArray,
    ) -> StateCopies:
        """Return the copies of a step that is about to be launched.

        Args:
            step: its number.
            restored: (checkpoint, slot) of the requests that begin behind checkpoints.
            slots: [R], in the step.
            start: tokens of each before the step, [R].
            end: tokens of each after the step, without drafts, [R].
        """
        taken_in = self._taken_in(slots, start, end)
        saves = [
            _Save(slot, checkpoint, num_tokens)
            for slot, num_tokens in self._to_be_saved(slots, taken_in)
            if (checkpoint := self.pool.take()) is not None
        ]
        if saves:
            self._pending[step] = saves
        pairs = [(save.slot, save.checkpoint) for save in saves]
        before, after = (np.array(each, dtype=np.int32).reshape(-1, 2) for each in (restored, pairs))
        return StateCopies(before, after, (taken_in - start).astype(np.int64))

    def _taken_in(self, slots: IntArray, start: IntArray, end: IntArray) -> IntArray:
        """Return how many tokens each state has taken in behind a step: [R].

        All but drafts; those of an answer only up to where a block ends, for its checkpoint.
        """
        if not self.pool.num_checkpoints:
            return end
        full: IntArray = end // self.kv.block_size * self.kv.block_size
        passes = (start >= self._end[slots]) & (full > start)
        return np.where(passes, full, end)

    def _to_be_saved(self, slots: IntArray, num_computed: IntArray) -> list[tuple[int, int]]:
        """Return the slots whose states are kept behind a step, and how many tokens they have taken in."""
        if not self.pool.num_checkpoints:
            return []
        end = self._end[slots]
        is_cut = (num_computed % self.sizes.interval == 0) | (num_computed == end)
        is_cut |= num_computed == self._fork[slots]
        is_saved = is_cut | (num_computed > end)
        is_saved &= num_computed % self.kv.block_size == 0
        is_saved &= ~self.running.is_beam[slots] | (num_computed <= self.running.num_prompt[slots])
        rows = np.flatnonzero(is_saved)
        return list(zip(slots[rows].tolist(), num_computed[rows].tolist(), strict=True))

    def land(self, step: int, failed: list[int]) -> None:
        """Make the checkpoints of a step that has been applied findable, but for those of slots that failed.

        Called once the full blocks of the step can be found.
        """
        for slot, checkpoint, num_tokens in self._pending.pop(step, ()):
            key = None
            if self.running.occupied[slot] and slot not in failed:
                num_blocks = num_tokens // self.kv.block_size
                key = self.kv.key(self.running.request_at(slot).request_id, num_blocks - 1)
            if key is None:
                self.pool.give_back(checkpoint)
                continue
            goes_on = bool(num_tokens >= self._end[slot])
            if goes_on:
                self.pool.leave(self._newest[slot], is_within_answer=bool(self._has_answer[slot]))
                self._newest[slot] = key.digest
                self._has_answer[slot] = num_tokens > self._end[slot]
            is_likely = goes_on or num_tokens == self._fork[slot]
            self.pool.keep(checkpoint, key, is_likely=is_likely)

    def void(self, step: int) -> None:
        """Take back the checkpoints of a step that may not have been computed."""
        for save in self._pending.pop(step, ()):
            self.pool.give_back(save.checkpoint)

    def check(self, loading: Iterable[int]) -> None:
        """Check that each checkpoint is in one place; `AssertionError` names what does not hold.

        Args:
            loading: those that loads write.
        """
        saved = [save.checkpoint for saves in self._pending.values() for save in saves]
        self.pool.check([*saved, *loading])
