from __future__ import annotations

import collections

from held import num_held


class Keeper:
    def __init__(self):
        self.by_name = {}
        self.queue = collections.deque()


def test_whatever_is_kept_is_counted_wherever_it_is():
    keeper = Keeper()
    before = num_held(keeper)
    keeper.by_name["a"] = [1, 2, 3]
    assert num_held(keeper) == before + 1 + 3
    keeper.queue.append(keeper.by_name["a"])  # an entry more, but the same list
    assert num_held(keeper) == before + 1 + 3 + 1
    keeper.by_name.clear()
    keeper.queue.clear()
    assert num_held(keeper) == before


def test_what_everybody_reaches_is_not_counted():
    keeper = Keeper()
    before = num_held(keeper)
    keeper.hook = test_whatever_is_kept_is_counted_wherever_it_is
    keeper.kind = Keeper
    assert num_held(keeper) <= before + 2
