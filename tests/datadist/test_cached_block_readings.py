"""Cached blocks by themselves: a reading stands only if none of its blocks was given up since it began."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.datadist.loans.arriving_blocks import NO_BLOCK
from quire.datadist.loans.cached_blocks import PART_BLOCKS, CachedBlocks
from quire.datadist.status import LLMException
from quire.datadist.wire.protocol import DIGEST_BYTES, ProtocolError, decode_digests
from quire.kv.blocks import block_hash

NAMES = st.integers(0, 4)
EVENTS = st.one_of(
    st.tuples(st.just("add"), NAMES),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("open"), st.lists(NAMES, min_size=1, max_size=4, unique=True)),
    st.just(("clear", None)),
)


def digest(name: int) -> bytes:
    return bytes([name]) * DIGEST_BYTES


def is_held(reading) -> bool:
    try:
        reading.require_held()
    except LLMException:
        return False
    return True


@given(st.lists(EVENTS, max_size=40))
def test_a_reading_stands_until_one_of_its_blocks_is_given_up(events):
    cached, places, readings = CachedBlocks(), {}, []
    for number, (what, about) in enumerate(events):
        if what == "add" and about not in places:
            places[about] = number
            cached.add(digest(about), number)
        elif what == "remove" and about in places:
            del places[about]
            cached.remove(digest(about))
            readings = [(one, names, stands and about not in names) for one, names, stands in readings]
        elif what == "clear":
            places = {}
            cached.clear()
            readings = [(one, names, False) for one, names, _ in readings]
        elif what == "open":
            digests = [digest(name) for name in about]
            num_leading = next((i for i, name in enumerate(about) if name not in places), len(about))
            assert cached.count_leading(digests) == num_leading
            if num_leading < len(about):
                with pytest.raises(LLMException, match=f"only the first {num_leading} of"):
                    cached.open(digests, 8)
                continue
            reading = cached.open(digests, 8)
            [part] = reading.parts(0.0, lambda: True)
            assert reading.block_ids(part).tolist() == [[places[name] for name in about]]
            readings.append((reading, set(about), True))
        for reading, _, stands in readings:
            assert is_held(reading) == stands


def test_many_blocks_come_in_parts_and_none_after_one_was_given_up():
    cached = CachedBlocks()
    digests = [number.to_bytes(DIGEST_BYTES, "big") for number in range(2 * PART_BLOCKS + 1)]
    for number, one in enumerate(digests):
        cached.add(one, 1000 + number)
    reading = cached.open(digests, 8)
    parts = list(reading.parts(0.0, lambda: True))
    ids = np.concatenate([reading.block_ids(part)[0] for part in parts])
    assert ids.tolist() == list(range(1000, 1000 + len(digests)))
    assert [(part.offset, part.num_bytes) for part in parts] == [(0, 8)] * 3
    left = reading.parts(0.0, lambda: True)
    next(left)
    cached.remove(digests[PART_BLOCKS])
    with pytest.raises(LLMException, match="evicted"):
        next(left)


def test_to_read_a_long_prompt_each_block_is_looked_at_once_before_it_is_sent_and_once_at_the_end(
    monkeypatch,
):
    num_looks = 0

    class Counting(dict):
        def get(self, key):
            nonlocal num_looks
            num_looks += 1
            return super().get(key)

    cached = CachedBlocks()
    monkeypatch.setattr(cached, "_entries", [Counting()])
    digests = [number.to_bytes(DIGEST_BYTES, "big") for number in range(10 * PART_BLOCKS)]
    for number, one in enumerate(digests):
        cached.add(one, number)
    reading = cached.open(digests, 8)
    num_looks = 0
    assert len(list(reading.parts(0.0, lambda: True))) == 10
    reading.require_held()
    assert num_looks == 2 * len(digests)


def test_digests_are_those_of_the_prefix_cache():
    assert len(block_hash.root_digest()) == DIGEST_BYTES
    assert decode_digests(digest(1) + digest(2)) == [digest(1), digest(2)]
    assert decode_digests(b"") == []
    with pytest.raises(ProtocolError, match="17 bytes"):
        decode_digests(b"x" * 17)


GROUPS = st.tuples(*[st.sets(st.integers(0, 6), max_size=7)] * 3)


@given(GROUPS, st.lists(st.integers(0, 4), min_size=2, max_size=2), st.data())
def test_the_longest_prefix_that_all_groups_serve_is_found_and_read(cached_in, in_windows, data):
    """Of a prefix, the first group has all blocks, and each other one its last ones, given by number."""
    cached = CachedBlocks(in_windows)
    for group, names in enumerate(cached_in):
        for name in names:
            cached.add(digest(name), 10 * group + name, group)

    def needed(count: int) -> list[range]:
        return [range(count), *(range(max(0, count - most), count) for most in in_windows)]

    def is_served(count: int) -> bool:
        return all(set(names) <= cached_in[group] for group, names in enumerate(needed(count)))

    digests = [digest(name) for name in range(7)]
    longest = max(count for count in range(8) if is_served(count))
    assert cached.count_leading(digests) == longest
    count = data.draw(st.integers(1, 7))
    if not is_served(count):
        with pytest.raises(LLMException, match="blocks are cached"):
            cached.open(digests[:count], 8)
        return
    reading = cached.open(digests[:count], 8)
    [part] = reading.parts(0.0, lambda: True)
    expected = [
        [10 * group + name if name in names else NO_BLOCK for name in range(count)]
        for group, names in enumerate(needed(count))
    ]
    assert reading.block_ids(part).tolist() == expected
    group, name = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 6))
    if data.draw(st.booleans()):
        cached.remove(digest(name), group)
        assert is_held(reading) == (name not in needed(count)[group])
    else:
        cached.clear(group)
        assert is_held(reading) == (not needed(count)[group])


def test_a_prefix_is_as_long_as_the_blocks_before_the_deepest_whole_state():
    cached = CachedBlocks((), lambda last: [last[:1] * 15 + b"a", last[:1] * 15 + b"b"])
    for name in range(6):
        cached.add(digest(name), name)
    asked = [digest(name) for name in range(6)]
    assert cached.count_leading(asked) == 0
    states = {name: [bytes([name]) * 15 + part for part in (b"a", b"b")] for name in (1, 3, 4)}
    for name, pieces in states.items():
        for number, piece in enumerate(pieces[: 1 if name == 4 else 2]):
            cached.add(piece, 10 * name + number)
    assert cached.count_leading(asked) == 4, "the last state is not whole"
    assert cached.count_leading(asked[:3]) == 2
    reading = cached.open([*asked[:4], *states[3]], 64)
    [part] = reading.parts(0.0, lambda: True)
    assert reading.block_ids(part).tolist() == [[0, 1, 2, 3, 30, 31]]
    cached.remove(states[3][1])
    assert not is_held(reading)
    assert cached.count_leading(asked) == 2
