"""The workloads fit into what every engine gets, and prompts are what they say."""

from __future__ import annotations

import pytest
from peers_shapes import SHAPES
from peers_workload import KV_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, WORKLOADS

pytestmark = pytest.mark.representative

EACH = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
BLOCK_SIZES = (16, 32, 128)


@EACH
def test_a_workload_fits(workload):
    own = workload.prompt_tokens + workload.output_tokens
    assert workload.shared_tokens + own <= MAX_MODEL_LEN
    assert workload.shared_tokens + workload.num_requests * own <= KV_TOKENS
    assert workload.num_requests <= MAX_NUM_SEQS


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_caches_hold_equally_many_tokens_in_blocks_of_any_engine(block_size):
    assert KV_TOKENS % block_size == 0


@EACH
def test_prompts_are_the_same_for_a_seed_and_new_for_another(workload):
    prompts = workload.prompts("1")
    assert prompts == workload.prompts("1")
    assert {tuple(prompt[:16]) for prompt in prompts}.isdisjoint(
        tuple(prompt[:16]) for prompt in workload.prompts("2")
    )


@EACH
def test_prompts_have_their_length_and_share_the_prefix_alone(workload):
    prompts, shared = workload.prompts("1"), workload.shared_tokens
    assert len(prompts) == workload.num_requests
    assert {len(prompt) for prompt in prompts} == {shared + workload.prompt_tokens}
    assert len({tuple(prompt[:shared]) for prompt in prompts}) == 1
    assert len({tuple(prompt[shared : shared + 16]) for prompt in prompts}) == workload.num_requests
    smallest = min(shape.config["vocab_size"] for shape in SHAPES.values())
    assert all(0 <= token < smallest for prompt in prompts for token in prompt)


@EACH
def test_a_warm_up_has_the_same_requests_and_is_no_longer(workload):
    short = workload.warm_up
    assert (short.num_requests, short.shared_tokens) == (workload.num_requests, workload.shared_tokens)
    assert short.prompt_tokens <= workload.prompt_tokens
    assert short.output_tokens <= workload.output_tokens


def test_rates_count_outputs_and_prompts_where_they_are_what_is_measured():
    assert WORKLOADS["16x32/32"].counted_tokens == 16 * 32
    assert WORKLOADS["8x256/1"].counted_tokens == 8 * 257
