"""The index of a tier against a naive one: what is evicted, what is worth storing, which places are free."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.tiers.residents import ResidentBlocks
from unmutated import UNMUTATED

NUM_PLACES = 6
MIN_USES = 2
PREFIXES = [  # a tree of prompts: what they share are common nodes
    (1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 6), (1, 7, 8), (9, 10), (9, 11, 12, 13), (14,), (15, 16, 17, 18, 19),
]  # fmt: skip


def keys_of(tokens) -> list:
    keys = SequenceKeys(root_digest(), 1)
    keys.extend(np.array(tokens, dtype=np.int32))
    return [keys[index] for index in range(len(tokens))]


class ResidentsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.residents = ResidentBlocks(NUM_PLACES, MIN_USES)
        self.held: dict = {}  # key -> place
        self.num_uses: dict = {}
        self.open: list = []  # stores under way: (key, place, generation)
        self.last_use: dict = {}
        self.time = 0

    @rule(tokens=st.sampled_from(PREFIXES), length=st.integers(1, 5))
    def use(self, tokens, length) -> None:
        self.time += 1
        keys = keys_of(tokens)[:length]
        wanted = []
        for key in keys:
            if key in self.held:
                self.last_use[key] = self.time
            else:
                self.num_uses[key] = self.num_uses.get(key, 0) + 1
                if self.num_uses[key] >= MIN_USES:
                    wanted.append(key)
        assert self.residents.use(keys) == wanted

    @rule(tokens=st.sampled_from(PREFIXES), index=st.integers(0, 4), is_late=st.booleans())
    def open_place(self, tokens, index, is_late) -> None:
        key = keys_of(tokens)[min(index, len(tokens) - 1)]
        generation = self.residents.generation - is_late
        held_before = dict(self.held)
        place = self.residents.open_place(key, generation)
        is_reachable = not any(used.digest == key.parent for used in self.num_uses)
        if is_late or key in held_before or not is_reachable:
            assert place is None
            return
        busy = set(self.held.values()) | {opened[1] for opened in self.open}
        if len(busy) < NUM_PLACES:
            assert place is not None
            assert place not in busy
        else:
            self._check_eviction(key, place)
        if place is not None:
            self.open.append((key, place, generation))

    def _check_eviction(self, key, place) -> None:
        parents = {held.parent for held in self.held}
        ends = [held for held in self.held if held.digest not in parents and held.digest != key.parent]
        if place is None:
            assert not ends
            return
        [evicted] = [held for held in self.held if self.held[held] == place]
        assert evicted in ends
        older = [end for end in ends if self.last_use[end] < self.last_use[evicted]]
        parents_once = {held.parent for held in self.last_use}
        assert all(end.digest in parents_once for end in older), (
            "an older one stays only if it once was the parent of another block"
        )
        self._forget(evicted)
        self.num_uses[evicted] = MIN_USES - 1

    def _forget(self, key) -> None:
        del self.held[key]

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 5), is_written=st.booleans())
    def end_store(self, number, is_written) -> None:
        key, place, generation = self.open.pop(number % len(self.open))
        if not is_written:
            self.residents.free(place, generation)
            return
        self.residents.fill(key, place, generation)
        if generation == self.residents.generation and key not in self.held:
            self.time += 1
            self.held[key] = place
            self.last_use[key] = self.time
            self.num_uses.pop(key, None)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 5))
    def drop(self, number) -> None:
        key = list(self.held)[number % len(self.held)]
        self.residents.drop(key, self.held[key] + 1)  # the block has moved since: nothing happens
        self.residents.drop(key, self.held[key])
        self._forget(key)

    @precondition(lambda self: not self.open)
    @rule()
    def clear(self) -> None:
        self.residents.clear()
        self.held, self.num_uses, self.last_use = {}, {}, {}

    @precondition(lambda self: not self.open)
    @rule(seed=st.integers(0, 5))
    def reopen(self, seed) -> None:
        """What is found in a file, in the order in which it was written, twice here and there."""
        stored = sorted(self.held.items(), key=lambda item: item[1])
        random.Random(seed).shuffle(stored)
        num_opened = self.residents.num_opened
        self.residents.replace(stored + [(key, NUM_PLACES + 1) for key, _ in stored[:1]], num_opened)
        self.last_use = {}
        for number, (end, _) in enumerate(stored):  # from the last stored to the first
            key = end
            while key in self.held and key not in self.last_use:
                self.last_use[key] = self.time - number
                key = next((held for held in self.held if held.digest == key.parent), None)
        self.time += 1

    @invariant()
    def agrees(self) -> None:
        for tokens in PREFIXES:
            keys = keys_of(tokens)
            assert [self.residents.place_of(key) for key in keys] == [self.held.get(key) for key in keys]
            found = [key in self.held for key in keys]
            assert self.residents.count_leading(keys) == [*found, False].index(False)
        assert len(self.residents) == len(self.held) <= NUM_PLACES


ResidentsMachine.TestCase.settings = settings(backend=UNMUTATED, max_examples=36, stateful_step_count=40)
TestResidents = ResidentsMachine.TestCase


def store(residents: ResidentBlocks, keys) -> None:
    residents.use(keys)
    for key in keys:
        place = residents.open_place(key, residents.generation)
        if place is not None:
            residents.fill(key, place, residents.generation)


def test_ends_of_the_least_recently_used_prefix_go_first():
    residents = ResidentBlocks(7, 1)
    old, new = keys_of((1, 2, 3, 4)), keys_of((5, 6, 7))
    store(residents, old)
    store(residents, new)
    residents.use(new)
    store(residents, keys_of((8, 9)))
    assert residents.count_leading(old) == 2
    assert residents.count_leading(new) == 3


def test_a_prefix_longer_than_the_tier_keeps_its_start():
    residents = ResidentBlocks(3, 1)
    keys = keys_of((1, 2, 3, 4, 5))
    store(residents, keys)
    assert residents.count_leading(keys) == 3


def test_what_was_evicted_comes_back_at_its_next_use():
    residents = ResidentBlocks(1, 3)
    [first], [second] = keys_of((1,)), keys_of((2,))
    assert [residents.use([first]) for _ in range(3)] == [[], [], [first]]
    store(residents, [first])
    store(residents, [second])
    assert residents.place_of(first) is None
    assert residents.use([first]) == [first]


def test_ghosts_are_bounded():
    residents = ResidentBlocks(2, 2)
    many = keys_of(range(10_000))
    residents.use(many)
    assert residents.use(many[-1:]) == many[-1:]
    assert not residents.use(many[:1]), "the oldest ghosts are gone"


def test_a_reopened_prefix_counts_as_used_when_its_last_block_was():
    """The start of a prefix is written first; after a restart it is not the first to go for that."""
    residents = ResidentBlocks(5, 1)
    long, other = keys_of((1, 2, 3)), keys_of((7, 8))
    written = [long[0], other[0], other[1], long[1], long[2]]
    residents.replace([(key, place) for place, key in reversed(list(enumerate(written)))], 5)
    store(residents, keys_of((20, 21)))
    assert residents.count_leading(long) == 3
    assert residents.count_leading(other) == 0
