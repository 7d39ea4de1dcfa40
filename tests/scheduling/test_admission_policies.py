from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_requests import Arrivals, run_to
from test_policies import example

from quire.config import SchedulerConfig
from quire.scheduling.policies import ADMISSIONS
from quire.scheduling.policies.admission import (
    PAST_OUTPUTS,
    Candidate,
    MemoryView,
    OutputLengths,
    RunningMemory,
    peak_blocks,
)
from quire.status import RequestStatus

STOPPED, CAPPED = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


def build(choice, **fields):
    return ADMISSIONS.build(choice, config=SchedulerConfig(**fields))


def running_memory(rows):
    """Rows of (tokens, output tokens, token limit, blocks)."""
    return RunningMemory(*np.array(rows, dtype=np.int32).reshape(-1, 4).T)


def view(*, num_free, rows=(), num_blocks=100, block_size=4):
    return MemoryView(
        block_size=block_size,
        num_blocks=num_blocks,
        num_free=num_free,
        read_running=lambda: running_memory(rows),
    )


ROWS = st.builds(
    lambda prompt, output, more, held: (prompt + output, output, prompt + output + more, held),
    st.integers(1, 60),
    st.integers(0, 40),
    st.integers(0, 50),
    st.integers(0, 30),
)
CANDIDATES = st.builds(Candidate, st.integers(1, 80), st.just(100), st.integers(0, 3), st.integers(3, 20))


@given(
    rows=st.lists(ROWS, max_size=6),
    candidates=st.lists(st.tuples(CANDIDATES, st.integers(0, 100), st.booleans()), max_size=6),
    watermark=st.sampled_from([0.0, 0.01, 0.2]),
    full=st.booleans(),
    peek=st.booleans(),
)
def test_reserve_leaves_what_earlier_prompts_need_and_the_watermark(rows, candidates, watermark, full, peek):
    policy = build("reserve", watermark=watermark, reserve_full_prompt=full)
    memory = view(num_free=0, rows=rows)
    promised = sum(max(math.ceil(row[0] / 4) - row[3], 0) for row in rows)
    for candidate, num_free, is_added in candidates:
        memory.num_free = num_free
        prompt = math.ceil(candidate.num_tokens / 4)
        needed = (prompt if full else candidate.num_chunk_blocks) - candidate.num_cached_blocks
        withheld = math.floor(watermark * 100) + (promised if full else 0)
        assert policy.admits(candidate, memory) == (needed + withheld <= num_free)
        if is_added:
            memory.add(candidate)
            promised += max(prompt - candidate.num_chunk_blocks, 0)
        if peek:
            assert len(memory.running.num_tokens) >= len(rows)
        assert memory.reserved_blocks == promised


def test_the_running_requests_are_read_only_if_a_policy_wants_to_know():
    def fail():
        raise AssertionError("read")

    memory = MemoryView(block_size=4, num_blocks=100, num_free=50, read_running=fail)
    candidate = Candidate(num_tokens=8, token_limit=100, num_cached_blocks=0, num_chunk_blocks=2)
    assert build("reserve", reserve_full_prompt=False).admits(candidate, memory)
    memory.add(candidate)


def blocks_step_by_step(rows, num_remaining, block_size):
    """Let each request grow by a token per step until it ends; return the most blocks at any time."""
    return max(
        sum(
            math.ceil((row[0] + step) / block_size)
            for row, more in zip(rows, num_remaining, strict=True)
            if more >= step
        )
        for step in range(max(num_remaining) + 1)
    )


@given(st.lists(st.tuples(ROWS, st.integers(0, 30)), min_size=1, max_size=8), st.sampled_from([1, 4, 16]))
def test_the_peak_is_that_of_a_step_by_step_simulation(requests, block_size):
    rows, more = zip(*requests, strict=True)
    exact = blocks_step_by_step(rows, more, block_size)
    remaining = np.array(more, dtype=np.int32)
    peak = peak_blocks(running_memory(rows), remaining, block_size=block_size, num_shared=0)
    # Each request's last block is taken to be full, so it may be up to one block per request too high.
    assert exact <= peak <= exact + (len(rows) if block_size > 1 else 0)
    outside = peak_blocks(running_memory(rows), remaining, block_size=block_size, num_shared=-7)
    assert outside == peak + 7


def test_a_shared_prefix_is_counted_about_once():
    rows = [(164, 4, 200, 41)] * 10  # 160 tokens, 40 blocks, are shared by all
    ends = np.arange(10, dtype=np.int32) * 4
    peak = peak_blocks(running_memory(rows), ends, block_size=4, num_shared=9 * 40)
    exact = 40 + blocks_step_by_step([(4,)] * 10, ends.tolist(), 4)
    assert exact - 40 <= peak <= exact + 10


def learn(policy, lengths, status=STOPPED):
    arrivals = Arrivals()
    for length in lengths:
        policy.left(run_to(arrivals.request(1), length, status))


def test_past_future_reserves_the_limit_until_it_has_seen_outputs():
    policy = build("past-future", watermark=0.0)
    candidate = Candidate(num_tokens=40, token_limit=240, num_cached_blocks=0, num_chunk_blocks=10)
    memory = view(num_free=80, rows=[(80, 0, 280, 20)])  # both to their limits: 130 blocks
    assert not policy.admits(candidate, memory)
    learn(policy, [500] * 200, RequestStatus.FINISHED_ABORTED)
    learn(policy, [10] * 200, RequestStatus.PREEMPTED)
    assert not policy.admits(candidate, memory)
    learn(policy, [10] * 100)
    assert policy.admits(candidate, memory)
    learn(policy, [190] * PAST_OUTPUTS)
    assert not policy.admits(candidate, memory)


def test_past_future_sees_what_it_has_admitted_in_this_step():
    policy = build("past-future", watermark=0.0)
    learn(policy, [8] * 1000)
    memory = view(num_free=100)
    admitted = 0
    candidate = Candidate(num_tokens=40, token_limit=1000, num_cached_blocks=0, num_chunk_blocks=10)
    while policy.admits(candidate, memory):
        memory.add(candidate)
        memory.num_free -= 10
        admitted += 1
    assert admitted == 7  # of 48 tokens each, and a block for rounding: 13 blocks each; 8 would take 104


def test_past_future_never_admits_what_has_no_blocks_for_its_first_chunk():
    policy = build("past-future", watermark=0.0)
    candidate = Candidate(num_tokens=8, token_limit=8, num_cached_blocks=0, num_chunk_blocks=2)
    assert policy.admits(candidate, view(num_free=2))
    assert not policy.admits(candidate, view(num_free=1))


@given(
    st.lists(st.integers(1, 50), max_size=80),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=20),
)
def test_a_predicted_length_is_a_past_one_that_is_longer_or_the_limit(past, requests):
    lengths = OutputLengths()
    for request in past:
        lengths.learn(run_to(Arrivals().request(1), request, CAPPED))
    num_output, most = np.array(requests, dtype=np.int32).T
    for predicted, (produced, limit) in zip(
        lengths.remaining(num_output, most).tolist(), requests, strict=True
    ):
        possible = {length - produced for length in past if length > produced} | {limit}
        assert predicted in {min(length, limit) for length in possible}


def test_predictions_are_spread_like_the_past():
    rng = np.random.default_rng(5)
    past = rng.geometric(0.02, PAST_OUTPUTS)
    lengths = OutputLengths()
    for length in [3] * 500 + past.tolist():  # what is older than the window is forgotten
        lengths.learn(run_to(Arrivals().request(1), length, STOPPED))
    for produced in (0, 30):
        rows = np.full(400, produced, dtype=np.int32)
        predicted = produced + lengths.remaining(rows, np.full(400, 100_000, dtype=np.int32))
        expected = past[past > produced]
        for quantile in (0.1, 0.5, 0.9):
            assert np.quantile(predicted, quantile) == pytest.approx(np.quantile(expected, quantile), rel=0.1)


def test_the_example_of_the_page_runs():
    policy = build(example("HalfFull"))
    candidate = Candidate(num_tokens=40, token_limit=100, num_cached_blocks=2, num_chunk_blocks=5)
    assert policy.admits(candidate, view(num_free=58))
    assert not policy.admits(candidate, view(num_free=57))
