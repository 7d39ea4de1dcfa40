"""The least time of a workload, against sums over its requests and against steps counted by hand."""

from __future__ import annotations

import math

import pytest
from peers_limit import STEP_TOKENS, Machine, ModelWork, Step, least_seconds, step_seconds, steps_of
from peers_model import work_of
from peers_shapes import SHAPES
from peers_workload import WORKLOADS, Workload

GEMM_RATE = {"bf16": 4e11, "int8": 8e11}
LAYER_WEIGHTS, HEAD_WEIGHTS, KV_VALUES = 440_401_920, 155_582_464, 57_344  # Qwen3-0.6B's, by hand
WORK = ModelWork(LAYER_WEIGHTS, HEAD_WEIGHTS, KV_VALUES, query_values=28 * 16 * 128)


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
    assert step_seconds(step, WORK, precision, machine) == pytest.approx(num_bytes * values / 3e10)
    unsampled = Step(computed=1, attended=64, cached_read=63)
    saved = step_seconds(step, WORK, precision, machine) - step_seconds(unsampled, WORK, precision, machine)
    assert saved == pytest.approx(num_bytes * HEAD_WEIGHTS / 3e10)


def test_a_step_bound_by_arithmetic_takes_its_operations():
    machine = Machine(math.inf, GEMM_RATE)
    step = Step(computed=512, sampled=2, attended=100_000)
    products = 2 * (512 * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS)
    attention = 4 * 28 * 16 * 128 * 100_000
    assert step_seconds(step, WORK, "bf16", machine) == pytest.approx((products + attention) / 4e11)
    assert step_seconds(step, WORK, "int8", machine) == pytest.approx(products / 8e11 + attention / 4e11)


def test_the_best_of_two_measurements_counts_in_each_figure():
    first, second = Machine(3e10, {"bf16": 4e11, "int8": 9e11}), Machine(4e10, {"bf16": 3e11, "int8": 8e11})
    best = Machine(4e10, {"bf16": 4e11, "int8": 9e11})
    assert first.best_of(second) == second.best_of(first) == best
    assert first.best_of(Machine(0.0, {})) == first


def test_one_stream_is_bound_by_reading_the_weights_for_every_token():
    workload = WORKLOADS["1x32/32"]
    seconds = least_seconds(workload, WORK, "bf16", Machine(3e10, GEMM_RATE))
    weights = 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) / 3e10
    assert 32 * weights < seconds < 33 * weights


# By hand, as matrices have it: rows times columns.
HYBRID = ModelWork(
    24 * 3 * 3_584 * 1_024
    + 6 * (4_096 + 512 + 512 + 2_048) * 1_024
    + 18 * ((6_144 + 2_048 + 2_048 + 2 * 16) * 1_024 + 6_144 * 4),
    248_320 * 1_024,
    kv_values=6 * 2 * 512,
    query_values=6 * 8 * 256,
)
EXPERTS = ModelWork(
    6 * ((4_096 + 512 + 512 + 4_096) * 2_048 + 128 * 2_048),
    151_936 * 2_048,
    kv_values=6 * 2 * 512,
    query_values=6 * 32 * 128,
    expert_weights=6 * 3 * 768 * 2_048,
    num_experts=128,
    experts_per_token=8,
)


@pytest.mark.parametrize(
    ("shape", "work"), [("0.6b", WORK), ("qwen3.5-0.8b", HYBRID), ("qwen3-30b-a3b", EXPERTS)]
)
def test_the_work_of_a_model_is_that_of_its_matrices(shape, work):
    assert work_of(SHAPES[shape].config) == work


def test_layers_with_windows_have_no_part_in_attention():
    work = work_of(SHAPES["gpt-oss-20b"].config)
    assert (work.kv_values, work.query_values) == (2 * 2 * 8 * 64, 2 * 64 * 64)
    # What keeps its own, and all that looks back: 3 and 7 layers with heads of 512.
    work = work_of(SHAPES["gemma4-e2b"].config)
    assert (work.kv_values, work.query_values) == (3 * 2 * 512, 7 * 8 * 512)


def test_a_step_reads_the_experts_that_its_tokens_choose():
    one = ModelWork(10, 0, 0, 0, expert_weights=100, num_experts=8, experts_per_token=2)
    assert one.token_weights == one.weights_read(1) == 10 + 2 * 100
    assert one.weights_read(2) == pytest.approx(10 + (2 + 2 * 6 / 8) * 100)
    assert one.weights_read(512) == pytest.approx(10 + 8 * 100)
