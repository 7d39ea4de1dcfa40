"""The scheduler's specification, section 3: prefix caching."""

from __future__ import annotations

import timeit

import numpy as np
import pytest
from conformance import row
from scene import Scene

from quire.kv.blocks.block_hash import root_digest
from quire.kv.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventCollector
from quire.kv.blocks.retention import LruBlocks

# -- prefix caching ----------------------------------------------------------------------------------------


def cached_tokens(scene: Scene, name: str, prompt, **fields) -> int:
    """Serve a request; return how many of its tokens came out of the cache."""
    scene.add(name, prompt, max_tokens=1, **fields)
    scene.finish()
    scene.check_naive(name)
    return scene.cached[name]


@row("chained hash over parent, tokens and extra keys")
def test_a_block_is_found_behind_the_same_blocks_and_with_the_same_keys_only():
    scene = Scene(num_blocks=40)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    cached_tokens(scene, "a", [*first, *second, 9])
    assert cached_tokens(scene, "same", [*first, *second, 10]) == 8
    assert cached_tokens(scene, "other parent", [*second, *second, 9]) == 0
    assert cached_tokens(scene, "other order", [*second, *first, 9]) == 4, "its own second block"
    assert cached_tokens(scene, "other key", [*first, *second, 9], salt="s") == 0
    assert cached_tokens(scene, "same key", [*first, *second, 9], salt="s") == 8


@row("extra keys are tagged by source")
def test_no_source_of_keys_can_imitate_another():
    digests = {
        root_digest(),
        root_digest(salt="a"),
        root_digest(adapter="a"),
        root_digest(salt="a", adapter="b"),
        root_digest(salt="b", adapter="a"),
        root_digest(salt="ab"),
        root_digest(salt="a\x00adapterb"),
    }
    assert len(digests) == 7


@row("on a hit the tokens themselves are compared")
def test_a_collision_of_digests_is_a_miss(monkeypatch):
    class Collision:
        def __init__(self, *_, **__): ...
        def update(self, _): ...
        def digest(self):
            return b"the same digest."

    monkeypatch.setattr("quire.kv.blocks.block_hash.blake2b", Collision)
    scene = Scene()
    cached_tokens(scene, "a", [1, 2, 3, 4, 9])
    assert cached_tokens(scene, "b", [5, 6, 7, 8, 9]) == 0


@row("the last prompt token is always computed")
@pytest.mark.parametrize(("num_tokens", "computed"), [(7, 3), (8, 4), (9, 1)])
def test_the_last_prompt_token_is_always_computed(num_tokens, computed):
    scene = Scene()
    for name in ("first", "second"):
        scene.add(name, range(num_tokens), max_tokens=1)
        step = scene.step()
        scene.finish()
    assert step == {"second": computed}


@row("free blocks form an O(1) LRU list")
def test_the_lru_list_costs_the_same_whatever_its_length():
    def cost(size: int) -> float:
        blocks, none = LruBlocks(size), np.zeros(1, np.int32)
        blocks.put(np.arange(size, dtype=np.int32), np.zeros(size, np.int32), 0)
        middle = np.array([size // 2], np.int32)

        def turn() -> None:
            blocks.put(blocks.evict(1), none, 0)
            blocks.take(middle)
            blocks.put(middle, none, 0)

        return min(timeit.repeat(turn, number=500, repeat=10))

    assert cost(50_000) < 10 * cost(100)


@row("a request's blocks are freed tail first", "retention by LRU")
def test_the_start_of_a_prefix_lives_longest():
    scene = Scene(num_blocks=6)
    cached_tokens(scene, "a", range(17))
    cached_tokens(scene, "b", range(30, 43))
    assert cached_tokens(scene, "again", range(17)) == 8, "two of its four full blocks were rewritten"


@row("retention by priority")
def test_blocks_of_important_requests_live_longer():
    scene = Scene(num_blocks=6, prefix_retention="priority", policy="priority")
    cached_tokens(scene, "important", range(9), priority=-5)
    cached_tokens(scene, "not", range(20, 29), priority=5)
    cached_tokens(scene, "other", range(30, 42), priority=5)
    assert cached_tokens(scene, "important again", range(9), priority=-5) == 8


@row("retention by pin with a lease")
def test_a_pin_holds_a_prefix_for_its_time():
    scene = Scene(num_blocks=6)
    scene.add("pinned", range(9), max_tokens=1, pin_prefix=10.0)
    for number in range(2):
        scene.add(f"other {number}", range(20 * number + 20, 20 * number + 33), max_tokens=1)
        scene.finish_but_pins()
    scene.add("again", range(9), max_tokens=1)
    assert scene.step() == {"again": 1}
    scene.clock.advance(11)
    scene.step()
    scene.check_nothing_is_held()


@row("KV events: stored, removed, cleared")
def test_events_tell_what_can_be_found():
    events = KVEventCollector()
    scene = Scene(num_blocks=3, kv_events=events)
    cached_tokens(scene, "a", range(9))
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.block_size, stored.parent_block_hash) == (list(range(8)), 4, None)
    cached_tokens(scene, "b", range(20, 29))
    told = events.take()
    removed = [digest for event in told if isinstance(event, BlockRemoved) for digest in event.block_hashes]
    assert set(removed) == set(stored.block_hashes)
    assert scene.scheduler.reset_prefix_cache()
    assert isinstance(events.take()[-1], AllBlocksCleared)


@row("cost at 0 % hits under 1 % of a step")
def test_a_decode_step_that_fills_no_block_does_nothing_for_the_cache(monkeypatch):
    scene = Scene(num_blocks=40)
    for number in range(4):
        scene.add(f"r{number}", range(number, number + 5), max_tokens=8)
    scene.step()
    calls = []
    monkeypatch.setattr(
        scene.scheduler.accounts.kv.pools.first, "cache", lambda *arguments: calls.append(arguments)
    )
    scene.step()
    assert calls == []
