"""Cache eviction as the scheduler sees it: lengths, tables, blocks, and who is refused."""

from __future__ import annotations

import numpy as np
import pytest
from scene import BLOCK_SIZE, Scene

from quire.config import CacheEvictionConfig, KVCrushConfig
from quire.errors import InvalidRequestError
from quire.step import DraftTokenIds

SIZES = {"start_size": 4, "recent_size": 4, "max_cache_size": 16}


def evicting(*, config=None, **options):
    eviction = CacheEvictionConfig(**{**SIZES, **(config or {})})
    return Scene(use_cache_eviction=True, cache_eviction_config=eviction, **options)


def blocks_in_use(scene):
    stats = scene.scheduler.make_stats()
    return stats.num_blocks - stats.num_free_blocks


def test_a_prompt_is_held_as_a_whole_until_it_is_computed_and_then_cut():
    scene = evicting(max_num_batched_tokens=16)
    scene.add("r", range(30), max_tokens=20)
    held = []
    while scene.scheduler.has_unfinished_requests():
        scene.step()
        held.append(blocks_in_use(scene))
    most = SIZES["max_cache_size"] // BLOCK_SIZE + 1
    assert held[0] == 4
    assert max(held[1:]) == most
    assert scene.scheduler.make_stats().num_evicted_blocks == 3 + 20 // BLOCK_SIZE
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("chunk", [3, 64])
def test_preempted_requests_are_computed_again_with_the_same_evictions(chunk):
    scene = evicting(num_blocks=24, max_num_batched_tokens=chunk)
    for number in range(4):
        scene.add(f"r{number}", range(number, number + 18), max_tokens=25)
    while scene.runner.num_evictions < 8:
        scene.step()
    scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    scene.finish()
    scene.check_naive()
    assert scene.runner.num_evictions == 8 + 4 * ((18 + 25 - 1 - 16) // BLOCK_SIZE)


def test_what_a_preempted_request_knows_is_computed_in_chunks_that_end_where_blocks_go():
    scene = evicting(config={"kvcrush_config": KVCrushConfig(budget=1)})
    scene.add("r", range(6), max_tokens=40)
    while not scene.scheduler.make_stats().num_evicted_blocks:
        scene.step()
    scene.step()
    scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    chunks = [scene.step()["r"] for _ in range(3)]
    assert chunks == [6, 16 + 2 * BLOCK_SIZE - 6, 2]
    scene.finish()
    scene.check_naive()


def test_only_the_start_area_is_found_in_the_prefix_cache():
    scene = evicting()
    scene.add("r", range(12))
    scene.finish()
    scene.add("s", range(12))
    scene.finish()
    assert scene.cached["s"] == SIZES["start_size"]


def test_a_request_is_accepted_if_the_cache_can_hold_what_it_keeps():
    scene = evicting(num_blocks=5, max_model_len=64)
    scene.add("long output", range(10), max_tokens=50)
    with pytest.raises(InvalidRequestError, match=r"could hold 21 tokens at once, .* the KV cache holds 20"):
        scene.add("long prompt", range(21), max_tokens=1)
    scene.finish()
    scene.check_naive("long output")


def test_admission_reserves_what_a_resumed_request_will_hold_and_not_all_that_it_knows():
    scene = evicting(num_blocks=10, max_model_len=64)
    scene.add("r", range(8), max_tokens=50)
    for _ in range(40):
        scene.step()
    scene.add("s", range(20, 28), max_tokens=2)
    scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scene.step() == {"r": 8, "s": 8}
    scene.finish()
    scene.check_naive()


def test_a_resumed_request_reserves_nothing_for_what_it_has_evicted_of_its_prompt():
    scene = evicting(num_blocks=12, max_model_len=128)
    scene.add("r", range(40), max_tokens=40)
    for _ in range(38):
        scene.step()
    scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scene.step() == {"r": 40}
    scene.add("s", range(60, 80), max_tokens=2)
    assert scene.step() == {"r": BLOCK_SIZE, "s": 20}
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("policy", ["reserve", "past-future"])
def test_steps_in_flight_evict_in_turn(policy):
    scene = evicting(num_blocks=24, overlap_steps=True, admission=policy)
    for number in range(3):
        scene.add(f"r{number}", range(number, number + 19), max_tokens=22)
    scene.finish_overlapped()
    scene.check_naive()
    assert scene.runner.num_evictions >= 9


def test_siblings_compute_their_prompts_each_for_itself():
    scene = evicting()
    scene.add("first", range(20))
    scene.add("second", range(20), shares_prompt_with="first")
    scene.finish()
    scene.check_naive()
    assert scene.cached["second"] == SIZES["start_size"]


def test_beam_search_is_refused():
    scene = evicting()
    with pytest.raises(
        InvalidRequestError, match="beam_width is 2, but use_cache_eviction is on: beams share"
    ):
        scene.add("r", range(5), beam_width=2)


def test_drafts_from_outside_are_not_taken():
    scene = evicting()
    scene.add("r", range(5))
    scene.step()
    scene.scheduler.update_draft_token_ids(DraftTokenIds(["r"], [[1, 2, 3]]))
    assert scene.step() == {"r": 1}
    scene.finish()
    scene.check_naive()


def test_what_was_evicted_is_explained():
    scene = evicting()
    scene.add("r", range(30), max_tokens=20)
    scene.step()
    kept = "the cache keeps 18 of its 30 tokens, the others were evicted"
    assert scene.scheduler.explain("r") == f"running: 1 output tokens, of at most 20; {kept}"


def test_32_sequences_of_2000_tokens_hold_at_most_703_each_after_prefill():
    block_size, num_seqs = 32, 32
    scene = Scene(
        num_blocks=num_seqs * 64,
        max_model_len=4096,
        block_size=block_size,
        max_num_batched_tokens=num_seqs * 2000,
        enable_prefix_caching=False,
        use_cache_eviction=True,
        cache_eviction_config=CacheEvictionConfig(start_size=32, recent_size=128, max_cache_size=672),
    )
    prompts = np.random.default_rng(0).integers(0, 50, (num_seqs, 2000)).tolist()
    for number, prompt in enumerate(prompts):
        scene.add(f"r{number}", prompt, max_tokens=8)
    scene.step()
    while scene.scheduler.has_unfinished_requests():
        assert len(scene.scheduler.accounts.running) == num_seqs
        tables = scene.runner.positions.values()
        assert max(map(len, tables)) <= 703
        assert blocks_in_use(scene) <= num_seqs * -(-703 // block_size)
        assert scene.scheduler.get_kv_cache_usage() == blocks_in_use(scene) / (num_seqs * 64)
        scene.step()
    assert scene.scheduler.make_stats().num_evicted_blocks == num_seqs * (2000 // 32 - 672 // 32)
    scene.finish()
