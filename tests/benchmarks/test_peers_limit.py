"""The least time of a workload, against sums over its requests and against steps counted by hand."""

from __future__ import annotations

import math

import pytest
from peers_limit import STEP_TOKENS, Machine, Step, least_seconds, step_seconds, steps_of
from peers_workload import SHAPES, WORKLOADS, Workload

SHAPE = SHAPES["0.6b"]
GEMM_RATE = {"bf16": 4e11, "int8": 8e11}
LAYER_WEIGHTS, HEAD_WEIGHTS, KV_VALUES = 440_401_920, 155_582_464, 57_344  # Qwen3-0.6B's, by hand


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_steps_compute_each_token_once_and_look_at_all_before_it(workload):
    steps = list(steps_of(workload))
    first = workload.shared_tokens
    last = first + workload.prompt_tokens + workload.output_tokens - 1
    assert sum(step.computed for step in steps) == workload.num_requests * (last - first)
    assert sum(step.sampled for step in steps) == workload.num_requests * workload.output_tokens
    looked_at = sum(position + 1 for position in range(first, last))
    assert sum(step.attended for step in steps) == workload.num_requests * looked_at
    assert max(step.computed for step in steps) <= STEP_TOKENS


def test_a_shared_prefix_is_read_once_and_looked_at_by_all():
    steps = list(steps_of(Workload("", 2, prompt_tokens=2, output_tokens=2, shared_tokens=4)))
    assert steps == [
        Step(computed=4, sampled=2, attended=2 * (5 + 6), cached_read=4),
        Step(computed=2, sampled=2, attended=2 * 7, cached_read=4 + 2 * 2),
    ]


def test_a_prompt_longer_than_a_step_samples_at_its_end():
    steps = list(steps_of(Workload("", 1, prompt_tokens=STEP_TOKENS + 8, output_tokens=1)))
    assert [(step.computed, step.sampled, step.cached_read) for step in steps] == [
        (STEP_TOKENS, 0, 0),
        (8, 1, STEP_TOKENS),
    ]


def test_prompts_fill_the_steps_of_requests_that_generate():
    steps = list(steps_of(Workload("", 2, prompt_tokens=400, output_tokens=3)))
    assert [(step.computed, step.sampled) for step in steps] == [(512, 1), (1 + 288, 2), (2, 2), (1, 1)]


@pytest.mark.parametrize(("precision", "num_bytes"), [("bf16", 2), ("int8", 1)])
def test_a_step_bound_by_memory_takes_its_bytes(precision, num_bytes):
    machine = Machine(3e10, {"bf16": math.inf, "int8": math.inf})
    step = Step(computed=1, sampled=1, attended=64, cached_read=63)
    values = LAYER_WEIGHTS + HEAD_WEIGHTS + 64 * KV_VALUES
    assert step_seconds(step, SHAPE, precision, machine) == pytest.approx(num_bytes * values / 3e10)
    unsampled = Step(computed=1, attended=64, cached_read=63)
    saved = step_seconds(step, SHAPE, precision, machine) - step_seconds(unsampled, SHAPE, precision, machine)
    assert saved == pytest.approx(num_bytes * HEAD_WEIGHTS / 3e10)


def test_a_step_bound_by_arithmetic_takes_its_operations():
    machine = Machine(math.inf, GEMM_RATE)
    step = Step(computed=512, sampled=2, attended=100_000)
    products = 2 * (512 * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS)
    attention = 4 * 28 * 16 * 128 * 100_000
    assert step_seconds(step, SHAPE, "bf16", machine) == pytest.approx((products + attention) / 4e11)
    assert step_seconds(step, SHAPE, "int8", machine) == pytest.approx(products / 8e11 + attention / 4e11)


def test_the_best_of_two_measurements_counts_in_each_figure():
    first, second = Machine(3e10, {"bf16": 4e11, "int8": 9e11}), Machine(4e10, {"bf16": 3e11, "int8": 8e11})
    best = Machine(4e10, {"bf16": 4e11, "int8": 9e11})
    assert first.best_of(second) == second.best_of(first) == best
    assert first.best_of(Machine(0.0, {})) == first


def test_one_stream_is_bound_by_reading_the_weights_for_every_token():
    workload = WORKLOADS["1x32/32"]
    seconds = least_seconds(workload, SHAPE, "bf16", Machine(3e10, GEMM_RATE))
    weights = 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) / 3e10
    assert 32 * weights < seconds < 33 * weights
