"""A cache that grows on demand: memory is committed as blocks are needed, and a refusal is lived with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scene import Scene

from memory_connector import MemoryConnector
from quire.status import FinishReason
from unmutated import UNMUTATED


class Memory:
    """Grants blocks until there is no more memory for them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.granted = 0
        self.num_calls = 0

    def __call__(self, count: int) -> int:
        self.num_calls += 1
        count = max(0, min(count, self.limit - self.granted))
        self.granted += count
        return count


def growing(memory: Memory, **settings) -> Scene:
    settings = {"max_num_batched_tokens": 8, "max_num_seqs": 2, **settings}
    return Scene(num_blocks=settings.pop("num_blocks", 100), commit_blocks=memory, **settings)


def test_no_block_is_committed_before_there_is_work():
    memory = Memory(100)
    scene = growing(memory)
    assert memory.granted == 0
    assert scene.scheduler.make_stats().num_free_blocks == 100
    scene.add("a", range(5))
    scene.step()
    assert 2 <= memory.granted < 20
    scene.finish()
    scene.check_naive()


def test_the_cache_grows_with_what_runs():
    memory = Memory(100)
    scene = growing(memory)
    scene.add("a", range(50), max_tokens=2)
    scene.step()
    early = memory.granted
    scene.finish()
    assert early < memory.granted <= 50
    before = memory.granted
    scene.add("b", range(50), max_tokens=2)
    scene.finish()
    assert memory.granted - before <= 6, "what was freed is used again"
    scene.check_naive()


def test_committed_blocks_alone_are_given_out():
    memory = Memory(100)
    scene = growing(memory)
    scene.add("a", range(30), max_tokens=8)
    while scene.scheduler.has_requests():
        plan = scene.plan()
        used = {block for new in plan.scheduled_new_reqs for block in new.block_ids[0].tolist()}
        used |= set(plan.scheduled_cached_reqs.block_ids[0].tolist())
        assert max(used, default=0) < memory.granted
        scene.apply(plan)
    scene.check_naive()


def test_when_memory_runs_out_requests_take_turns():
    memory = Memory(7)
    scene = growing(memory, enable_prefix_caching=False)
    scene.add("a", range(9), max_tokens=12)
    scene.add("b", range(20, 29), max_tokens=12)
    scene.finish()
    scene.check_naive()
    assert memory.granted == 7
    assert scene.scheduler.make_stats().num_preemptions > 0


def test_a_request_that_memory_turns_out_too_small_for_ends_with_the_reason():
    scene = growing(Memory(3), enable_prefix_caching=False)
    scene.add("small", range(5), max_tokens=3)
    scene.add("large", range(30), max_tokens=3)
    scene.add("also small", range(5), max_tokens=3)
    scene.finish()
    assert scene.reasons["large"] is FinishReason.ERROR
    assert "3 KV blocks that there is memory for now, of 100" in scene.errors["large"]
    assert "num_kv_blocks" in scene.errors["large"]
    scene.check_naive("small", "also small")


def test_without_any_memory_requests_end_instead_of_waiting():
    scene = growing(Memory(0))
    scene.add("a", range(5))
    scene.finish()
    assert scene.reasons == {"a": FinishReason.ERROR}


def test_memory_that_comes_back_is_asked_for_again():
    memory = Memory(3)
    scene = growing(memory, enable_prefix_caching=False)
    scene.add("large", range(30), max_tokens=3)
    scene.finish()
    assert scene.reasons["large"] is FinishReason.ERROR
    memory.limit = 100
    scene.add("large", range(30), max_tokens=3)
    scene.finish()
    scene.check_naive()


@pytest.mark.parametrize("load_steps", [0, 2])
def test_loads_that_take_no_budget_find_the_cache_as_large_as_it_is(load_steps):
    connector = MemoryConnector(4, load_steps=load_steps)
    memory = Memory(20)
    scene = growing(memory, connector=connector, enable_prefix_caching=False, max_num_seqs=4)
    for number in range(4):
        scene.add(f"before {number}", range(number, number + 33), max_tokens=1)
    scene.finish()
    for number in range(4):
        scene.add(f"again {number}", range(number, number + 33))
    scene.finish()
    scene.check_naive()
    assert memory.granted == 20


@settings(max_examples=36, backend=UNMUTATED)
@given(
    limit=st.integers(0, 30),
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=6),
    caching=st.booleans(),
    budget=st.sampled_from([3, 16]),
)
def test_whatever_memory_there_is_all_end(limit, requests, caching, budget):
    scene = growing(
        Memory(limit), num_blocks=30, enable_prefix_caching=caching, max_num_batched_tokens=budget
    )
    for number, (num_prompt, max_tokens) in enumerate(requests):
        scene.add(f"r{number}", range(num_prompt), max_tokens=max_tokens)
    scene.finish(max_steps=2000)
    for name, reason in scene.reasons.items():
        if reason is not FinishReason.ERROR:
            scene.check_naive(name)
