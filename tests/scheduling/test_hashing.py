"""Blocks are hashed when they are looked for or computed, a bounded number at a time."""

from __future__ import annotations

import pytest
from scene import Scene

from quire.kv import block_hash
from quire.kv.block_hash import BLOCKS_AHEAD

BLOCK = 4
PROMPT = range(4096)
NUM_BLOCKS = len(PROMPT) // BLOCK
CHUNK = 512


class Counter:
    """Counts the blocks that are hashed, and not the salts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._num_hashed = 0
        blake2b = block_hash.blake2b

        def counting(*data, **options):
            self._num_hashed += len(data)
            return blake2b(*data, **options)

        monkeypatch.setattr(block_hash, "blake2b", counting)

    def take(self) -> int:
        """Return how many were hashed since the last call."""
        count, self._num_hashed = self._num_hashed, 0
        return count


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def scene(**settings) -> Scene:
    sizes = {"num_blocks": 4 * NUM_BLOCKS, "max_model_len": 2 * len(PROMPT), "max_num_batched_tokens": CHUNK}
    return Scene(**sizes, **settings)


def test_a_long_prompt_is_hashed_chunk_by_chunk(hashed: Counter):
    one = scene()
    one.add("a", PROMPT, max_tokens=2)
    assert hashed.take() == 0, "not when it is added"
    counts = []
    while one.scheduler.has_unfinished_requests():
        one.step()
        counts.append(hashed.take())
    assert sum(counts) == NUM_BLOCKS
    assert max(counts) <= CHUNK // BLOCK + BLOCKS_AHEAD


def test_looking_for_what_is_not_there_hashes_little(hashed: Counter):
    one = scene(max_num_seqs=1)
    one.add("a", PROMPT, max_tokens=30)
    one.add("b", range(1, 4097))
    while "a" not in one.reasons:
        one.step()
    assert hashed.take() <= NUM_BLOCKS + 30 // BLOCK + BLOCKS_AHEAD


def test_a_long_prompt_is_found_whole_and_hashed_once(hashed: Counter):
    one = scene()
    one.add("a", PROMPT, max_tokens=2)
    one.finish()
    hashed.take()
    one.add("b", PROMPT, max_tokens=2)
    assert one.step() == {"b": BLOCK}
    assert hashed.take() == NUM_BLOCKS
    one.finish()
    assert hashed.take() == 0


def test_what_another_began_is_found_as_far_as_it_got(hashed: Counter):
    one = scene(long_prefill_token_threshold=CHUNK // 2)
    one.add("a", PROMPT, max_tokens=2)
    one.step()
    one.add("b", [*range(CHUNK // 2 - 5), *range(5000, 5009)], max_tokens=2)
    one.step()
    assert one.requests["b"].num_cached_tokens == CHUNK // 2 - 8
    one.finish()
    one.check_naive()
