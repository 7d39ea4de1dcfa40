"""Which states are kept for the prefix cache, and which are overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kv.blocks.block_hash import BlockKey, SequenceKeys, root_digest
from quire.kv.blocks.checkpoints import CheckpointPool

BLOCK_SIZE = 2


def keys_of(*tokens: int) -> SequenceKeys:
    keys = SequenceKeys(root_digest(), BLOCK_SIZE)
    keys.extend(np.array(tokens, dtype=np.int32))
    return keys


LONG = keys_of(*range(20))
OTHER = keys_of(*range(6), *range(50, 64))


def keep(pool: CheckpointPool, key: BlockKey, *, is_likely: bool = True) -> int | None:
    checkpoint = pool.take()
    if checkpoint is not None:
        pool.keep(checkpoint, key, is_likely=is_likely)
    pool.check([])
    return checkpoint


def test_the_deepest_checkpoint_within_the_blocks_is_found():
    pool = CheckpointPool(4)
    assert pool.find(LONG, 10) == (0, -1)
    for index in (1, 4):
        keep(pool, LONG[index])
    assert pool.find(LONG, 10) == (5, 1)
    assert pool.find(LONG, 4) == (2, 0)
    assert pool.find(LONG, 1) == (0, -1)
    assert pool.find(OTHER, 10) == (2, 0)


def test_a_checkpoint_of_other_tokens_with_the_same_digest_is_not_found():
    pool = CheckpointPool(4)
    keep(pool, LONG[4]._replace(tokens=OTHER[4].tokens))
    assert pool.find(LONG, 10) == (0, -1)


def test_the_least_recently_used_goes_after_all_unlikely_ones():
    pool = CheckpointPool(4)
    for index, is_likely in ((0, True), (1, False), (2, False), (3, True)):
        assert keep(pool, LONG[index], is_likely=is_likely) == index
    pool.touch(LONG[0].digest)
    overwritten = [keep(pool, OTHER[index]) for index in range(4, 7)]
    assert overwritten == [1, 2, 3]
    assert pool.find(LONG, 10) == (1, 0)


def test_one_that_is_found_or_left_changes_its_place():
    pool = CheckpointPool(3)
    for index in range(3):
        keep(pool, LONG[index], is_likely=index < 2)
    pool.touch(LONG[2].digest)
    pool.leave(LONG[1].digest, is_within_answer=False)
    pool.leave(b"unknown", is_within_answer=True)
    assert [keep(pool, OTHER[index]) for index in (4, 5)] == [1, 0]


def test_one_that_several_sequences_have_used_stays_likely():
    pool = CheckpointPool(2)
    keep(pool, LONG[0])
    keep(pool, LONG[1])
    for _ in range(2):
        pool.touch(LONG[0].digest)
        pool.leave(LONG[0].digest, is_within_answer=False)
    assert keep(pool, OTHER[5]) == 1


def test_a_second_checkpoint_behind_the_same_block_is_free_at_once():
    pool = CheckpointPool(2)
    keep(pool, LONG[3], is_likely=False)
    assert keep(pool, LONG[3]) == 1
    assert keep(pool, OTHER[9]) == 1
    assert keep(pool, OTHER[8]) == 0


def test_when_all_are_pending_there_is_none_to_take():
    pool = CheckpointPool(1)
    taken = pool.take()
    assert taken == 0
    assert pool.take() is None
    pool.check([0])
    with pytest.raises(AssertionError, match="invariant 1"):
        pool.check([])
    pool.give_back(taken)
    pool.check([])


def test_emptied_it_has_all_checkpoints_free():
    pool = CheckpointPool(3)
    keep(pool, LONG[0])
    keep(pool, LONG[1], is_likely=False)
    pool.forget_contents()
    pool.check([])
    assert not pool.num_kept
    assert pool.find(LONG, 10) == (0, -1)


def test_one_that_is_held_is_found_and_overwritten_only_afterwards():
    pool = CheckpointPool(2)
    keep(pool, LONG[0], is_likely=False)
    pool.hold(LONG[0].digest)
    pool.hold(LONG[0].digest)
    pool.touch(LONG[0].digest)
    pool.leave(LONG[0].digest, is_within_answer=False)
    assert [keep(pool, OTHER[index]) for index in (7, 8)] == [1, 1]
    assert pool.find(LONG, 10) == (1, 0)
    pool.forget_contents()
    assert (pool.num_kept, pool.behind(LONG[0])) == (1, 0)
    assert keep(pool, LONG[0]) == 1, "there is one already"
    pool.let_go(LONG[0].digest)
    assert pool.take() == 1
    assert not pool.has_takeable
    assert pool.take() is None
    pool.let_go(LONG[0].digest)
    pool.check([1])
    assert pool.has_takeable
    assert pool.take() == 0
    assert pool.behind(LONG[0]) is None


class Events:
    """Which checkpoints can be found, by their events alone."""

    def __init__(self) -> None:
        self.found: dict[bytes, int] = {}

    def stored(self, checkpoint: int, key: BlockKey) -> None:
        assert key.digest not in self.found
        self.found[key.digest] = checkpoint

    def removed(self, checkpoint: int, key: BlockKey) -> None:
        assert self.found.pop(key.digest) == checkpoint


def test_events_say_which_can_be_found():
    events = Events()
    pool = CheckpointPool(3, events)
    for index in (0, 1, 1, 2, 3):
        keep(pool, LONG[index], is_likely=index != 2)
    assert events.found == {LONG[index].digest: pool.behind(LONG[index]) for index in (0, 1, 3)}
    pool.hold(LONG[1].digest)
    pool.forget_contents()
    assert events.found == {LONG[1].digest: pool.behind(LONG[1])}
    pool.let_go(LONG[1].digest)
    pool.forget_contents()
    assert not events.found


def test_within_an_answer_the_next_takes_the_place_of_the_one_before():
    pool = CheckpointPool(4)
    keep(pool, LONG[0])
    for index in range(1, 6):
        assert keep(pool, LONG[index]) == 1 + (index - 1) % 2
        pool.leave(LONG[index - 1].digest, is_within_answer=index > 1)
        pool.check([])
    assert pool.find(LONG, 10) == (6, 1)
    assert pool.find(LONG, 5) == (1, 0), "those of the answer that were left are gone"
    assert pool.num_kept == 2


def test_within_an_answer_one_that_a_sequence_has_used_stays():
    pool = CheckpointPool(4)
    keep(pool, LONG[0])
    pool.touch(LONG[0].digest)
    keep(pool, LONG[1])
    pool.leave(LONG[0].digest, is_within_answer=True)
    assert pool.find(LONG, 1) == (1, 0)
    assert keep(pool, OTHER[5]) == 2
