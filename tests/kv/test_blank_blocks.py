"""The stack of blank blocks against a list."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.blocks.block_pool import BlankBlocks, BlockPool

CALLS = st.tuples(st.sampled_from(["push", "push_below", "pop", "next"]), st.integers(0, 9))


@given(calls=st.lists(CALLS, max_size=40))
def test_it_is_a_stack(calls):
    blank, expected, unused = BlankBlocks(30), [], list(range(30))
    for call, count in calls:
        given_ids = [unused.pop() for _ in range(min(count, len(unused)))] if "push" in call else []
        top = expected[len(expected) - min(count, len(expected)) :]
        match call:
            case "push":
                blank.push(np.array(given_ids, dtype=np.int32))
                expected += given_ids
            case "push_below":
                blank.push_below(np.array(given_ids, dtype=np.int32))
                expected = given_ids + expected
            case "pop":
                assert blank.pop(count).tolist() == top
                del expected[len(expected) - len(top) :]
                unused += top
            case "next":
                assert blank.next(count).tolist() == top[::-1]
        assert list(blank) == expected
        assert len(blank) == len(expected)


def test_allocating_and_releasing_moves_no_other_blocks():
    """However many are blank: the stack is one array from beginning to end."""
    pool = BlockPool(1000, block_size=4)

    def ids() -> object:
        return pool._blank._ids

    array = ids()
    for _ in range(10):
        pool.release(pool.allocate(7))
    assert ids() is array
    pool.check([])
