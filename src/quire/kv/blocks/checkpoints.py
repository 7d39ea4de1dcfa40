"""States of recurrent layers that are kept for the prefix cache.

A running sequence works on the state of its slot. A *checkpoint* is a copy of such a state behind a full
block of the sequence's tokens, and is found by that block's key, so that a sequence with the same tokens up
to there can go on from it. A prefix hit therefore ends at a checkpoint; the tokens behind it are computed.

A checkpoint is *free*, *pending* (a step in flight or a load writes it) or *kept* (it can be found). It is
copied to a slot at the start of the step that uses it, so nothing holds a reference to it: when there is no
free one, a kept one is overwritten. First go those that are of use only if another sequence parts from theirs
there, the oldest first: they lie within a prompt, or their sequence has a later one. Then go the others, the
least recently used first. Within an answer, where nothing parts from it, the later one takes the place of the
earlier one. None goes that is *held*, for a peer to read it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

from quire.kv.blocks.block_hash import BlockKey, SequenceKeys
from quire.kv.blocks.events import KVEventSink


@dataclasses.dataclass(frozen=True, slots=True)
class StateSlots:
    """The states of a model with recurrent layers, as a scheduler needs to know them.

    Args:
        num_checkpoints: states beside those that running sequences work on.
        interval: tokens between checkpoints within a prompt.
    """

    num_checkpoints: int
    interval: int


_MANY_USES = 2
"""Uses from which on a checkpoint is taken for one that several sequences have in common."""


class _Kept(NamedTuple):
    """A checkpoint that can be found, the key of the block before it, and how many sequences have used it."""

    checkpoint: int
    key: BlockKey
    num_uses: int = 0


class CheckpointPool:
    """The checkpoints, numbered from 0, and which of them can be found.

    Args:
        num_checkpoints: how many there are.
        events: gets those that become findable and those that stop being so, with the key of their block.
    """

    def __init__(self, num_checkpoints: int, events: KVEventSink | None = None) -> None:
        self.num_checkpoints = num_checkpoints
        self._events = events
        self._free = list(range(num_checkpoints))[::-1]
        self._unlikely: OrderedDict[bytes, _Kept] = OrderedDict()  # by digest; first to be overwritten first
        self._likely: OrderedDict[bytes, _Kept] = OrderedDict()  # after those
        self._held: dict[bytes, _Kept] = {}
        self._num_holds: dict[bytes, int] = {}

    @property
    def num_kept(self) -> int:
        """Checkpoints that can be found."""
        return len(self._unlikely) + len(self._likely) + len(self._held)

    @property
    def has_takeable(self) -> bool:
        """Whether `take` returns a checkpoint."""
        return bool(self._free or self._unlikely or self._likely)

    def take(self) -> int | None:
        """Return a checkpoint to be written, which is pending from now on; None: all are pending or held."""
        if self._free:
            return self._free.pop()
        for kept in (self._unlikely, self._likely):
            if kept:
                _, overwritten = kept.popitem(last=False)
                self._note_gone(overwritten)
                return overwritten.checkpoint
        return None

    def give_back(self, checkpoint: int) -> None:
        """Make a pending checkpoint free: it is not going to be found."""
        self._free.append(checkpoint)

    def keep(self, checkpoint: int, key: BlockKey, *, is_likely: bool) -> None:
        """Make a pending checkpoint findable behind a block; it is free if there is one there already.

        Args:
            checkpoint: which one.
            key: of the block.
            is_likely: whether the same sequence may well go on from there; if not, it is overwritten first.
        """
        if self._at(key.digest) is not None:
            self._free.append(checkpoint)
            if is_likely:
                self.touch(key.digest)
        else:
            (self._likely if is_likely else self._unlikely)[key.digest] = _Kept(checkpoint, key)
            if self._events is not None:
                self._events.stored(checkpoint, key)

    def find(self, keys: SequenceKeys, num_blocks: int) -> tuple[int, int]:
        """Return the deepest checkpoint within the first blocks of a sequence. Changes nothing.

        Returns:
            The number of blocks before it, and the checkpoint; 0 and -1: there is none.
        """
        if self.num_kept:
            digests = list(keys.digests(0, num_blocks))
            for index in range(len(digests) - 1, -1, -1):
                found = self._at(digests[index])
                if found is not None and found.key == keys[index]:
                    return index + 1, found.checkpoint
        return 0, -1

    def behind(self, key: BlockKey) -> int | None:
        """Return the checkpoint behind a block; None: there is none."""
        found = self._at(key.digest)
        return found.checkpoint if found is not None and found.key == key else None

    def hold(self, digest: bytes) -> None:
        """Keep the checkpoint behind a block, which is there, until as many calls of `let_go`."""
        self._num_holds[digest] = self._num_holds.get(digest, 0) + 1
        if digest not in self._held:
            kept = self._unlikely if digest in self._unlikely else self._likely
            self._held[digest] = kept.pop(digest)

    def let_go(self, digest: bytes) -> None:
        """End one `hold`; whoever held the checkpoint counts as a sequence that has used it."""
        self._num_holds[digest] -= 1
        if not self._num_holds[digest]:
            del self._num_holds[digest]
            self._likely[digest] = self._held.pop(digest)
            self.touch(digest)

    def touch(self, digest: bytes) -> None:
        """Note that a sequence has gone on behind a block, if there is a checkpoint there."""
        found = self._unlikely.pop(digest, None) or self._likely.pop(digest, None)
        if found is not None:
            self._likely[digest] = found._replace(num_uses=found.num_uses + 1)

    def leave(self, digest: bytes, *, is_within_answer: bool) -> None:
        """Note that its sequence has a later checkpoint than the one behind a block, if that is there.

        One that several sequences have used stays as likely as it is. One within an answer that none has used
        is free, so that the next one is written to memory that is in use already.
        """
        found = self._likely.get(digest)
        if found is None or found.num_uses >= _MANY_USES:
            return
        del self._likely[digest]
        if is_within_answer and not found.num_uses:
            self._note_gone(found)
            self._free.append(found.checkpoint)
        else:
            self._unlikely[digest] = found

    def forget_contents(self) -> None:
        """Make all checkpoints that can be found free, but for those that are held."""
        for kept in (self._unlikely, self._likely):
            for each in kept.values():
                self._note_gone(each)
                self._free.append(each.checkpoint)
            kept.clear()

    def check(self, pending: list[int]) -> None:
        """Check that each checkpoint is in one place; `AssertionError` names what does not hold.

        Args:
            pending: those that steps in flight and loads write.
        """
        all_kept = self._unlikely, self._likely, self._held
        kept = [each.checkpoint for one in all_kept for each in one.values()]
        assert len({*self._unlikely, *self._likely, *self._held}) == len(kept), (
            "invariant 1: a checkpoint is kept twice"
        )
        assert sorted([*self._free, *pending, *kept]) == list(range(self.num_checkpoints)), (
            f"invariant 1: of {self.num_checkpoints} checkpoints, {self._free} are free, {pending} pending "
            f"and {kept} kept: one is in two places or in none"
        )

    def _note_gone(self, kept: _Kept) -> None:
        if self._events is not None:
            self._events.removed(kept.checkpoint, kept.key)

    def _at(self, digest: bytes) -> _Kept | None:
        return self._likely.get(digest) or self._unlikely.get(digest) or self._held.get(digest)
