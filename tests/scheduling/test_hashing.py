"""Blocks are hashed when they are looked for or computed, a bounded number at a time."""

from __future__ import annotations

import pytest
from scene import Scene

from quire.kv.blocks import block_hash
from quire.kv.blocks.block_hash import BLOCKS_AHEAD
from quire.scheduling.phases import admission as admission_phase
from quire.status import RequestStatus

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


@pytest.fixture
def lookup_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(admission_phase, "LOOKUP_BLOCKS", 128)
    return 128


def cached_beside_a_running_request(**settings) -> Scene:
    """Return a scene in which the prompt is cached and another request runs."""
    one = scene(**settings)
    one.add("a", PROMPT, max_tokens=2)
    one.finish()
    one.add("running", range(5000, 5008), max_tokens=100)
    one.step()
    return one


def test_beside_a_running_request_a_cached_prompt_is_looked_up_over_several_steps(
    hashed: Counter, lookup_blocks: int
):
    one = cached_beside_a_running_request()
    hashed.take()
    one.add("b", PROMPT, max_tokens=2)
    counts = []
    while (step := one.step()) == {"running": 1}:
        counts.append(hashed.take())
    assert step == {"running": 1, "b": BLOCK}
    assert len(counts) == NUM_BLOCKS // lookup_blocks - 1
    assert max(counts) <= lookup_blocks + BLOCKS_AHEAD
    one.finish()
    assert one.requests["b"].num_cached_tokens == len(PROMPT) - BLOCK
    one.check_naive()


def test_those_that_come_first_do_not_make_it_begin_anew(lookup_blocks: int):
    one = cached_beside_a_running_request(policy="priority", max_num_seqs=64)
    one.add("b", PROMPT, max_tokens=2, priority=1)
    for number in range(NUM_BLOCKS // lookup_blocks + 1):
        one.add(f"first {number}", range(6000, 6006))
        one.step()
    assert "b" in one.cached
    one.finish()
    assert one.requests["b"].num_cached_tokens == len(PROMPT) - BLOCK
    one.check_naive()


def test_what_is_found_and_then_forgotten_is_computed(lookup_blocks: int):
    one = cached_beside_a_running_request()
    one.add("b", PROMPT, max_tokens=2)
    for _ in range(3):
        assert one.step() == {"running": 1}
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    one.finish()
    assert one.requests["b"].num_cached_tokens == 0
    one.check_naive()


def test_a_request_that_ends_while_it_is_looked_up_leaves_nothing(lookup_blocks: int):
    one = cached_beside_a_running_request()
    one.add("b", PROMPT, max_tokens=2)
    one.step()
    one.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    one.add("b", [*range(4000), *range(7000, 7096)], max_tokens=2)
    one.finish()
    assert one.requests["b"].num_cached_tokens == 4000
    one.check_naive()


def test_what_another_began_is_found_as_far_as_it_got(hashed: Counter):
    one = scene(long_prefill_token_threshold=CHUNK // 2)
    one.add("a", PROMPT, max_tokens=2)
    one.step()
    one.add("b", [*range(CHUNK // 2 - 5), *range(5000, 5009)], max_tokens=2)
    one.step()
    assert one.requests["b"].num_cached_tokens == CHUNK // 2 - 8
    one.finish()
    one.check_naive()
