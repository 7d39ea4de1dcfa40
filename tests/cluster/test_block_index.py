"""What is known of engines' blocks, compared with a list of them in the order of their use."""

from __future__ import annotations

from fake_upstream import digests_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.cluster.prefixes.block_index import BlockIndex

DIGESTS = st.integers(0, 7).map(lambda number: bytes([number]) * 16)
RUNS = st.lists(DIGESTS, max_size=6)
LIMIT = 9


class KnownBlocks(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = BlockIndex(LIMIT)
        self.engines = []  # what is tested, and beside it the naive list, the least recently used first

    @precondition(lambda self: len(self.engines) < 3)
    @rule()
    def follow(self):
        self.engines.append((self.index.open(16, ""), []))

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def unfollow(self, data):
        blocks, _ = self.engines.pop(data.draw(st.integers(0, len(self.engines) - 1)))
        self.index.close(blocks)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), run=RUNS)
    def store(self, data, run):
        blocks, naive = data.draw(st.sampled_from(self.engines))
        blocks.add(run)
        for digest in run:
            naive[:] = [one for one in naive if one != digest] + [digest]
        self.index.trim()
        while sum(len(one) for _, one in self.engines) > LIMIT:
            max((one for _, one in self.engines), key=len).pop(0)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), run=RUNS)
    def remove(self, data, run):
        blocks, naive = data.draw(st.sampled_from(self.engines))
        blocks.remove(run)
        naive[:] = [one for one in naive if one not in run]

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def clear(self, data):
        blocks, naive = data.draw(st.sampled_from(self.engines))
        blocks.clear()
        naive.clear()

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), prompt=RUNS)
    def look_up_and_use(self, data, prompt):
        blocks, naive = data.draw(st.sampled_from(self.engines))
        known = [number for number, digest in enumerate(prompt, start=1) if digest in naive]
        assert blocks.num_cached(prompt) == max(known, default=0)
        blocks.use(prompt)
        for digest in reversed(prompt):
            if digest in naive:
                naive[:] = [one for one in naive if one != digest] + [digest]

    @invariant()
    def the_same_is_known_and_never_too_much(self):
        for blocks, naive in self.engines:
            assert digests_of(blocks) == naive
        assert sum(len(blocks) for blocks, _ in self.engines) <= LIMIT


TestKnownBlocks = KnownBlocks.TestCase
TestKnownBlocks.settings = settings(max_examples=60, stateful_step_count=30)
