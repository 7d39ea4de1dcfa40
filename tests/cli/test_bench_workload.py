"""`quire bench`: lengths, tokens and arrivals, against what they are said to be."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from quire.cli.bench.load import arrival_times
from quire.cli.bench.workload import (
    ASSUMED_SIGMA,
    PUBLISHED,
    RequestShape,
    build_workload,
    clip_shape,
    regular_token_ids,
    reusable_tokens,
    sample_shapes,
)
from quire.cli.bench_options import WorkloadConfig
from quire.errors import ConfigError
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.tokenizers.reading import read_tokenizer

VOCABULARY = np.arange(300, 1000)
MANY = 20_000
STANDARD_ERRORS = 4.0


def kolmogorov_smirnov(values, cdf) -> float:
    """Return the largest distance between the empirical distribution of `values` and `cdf`."""
    ordered = np.sort(np.asarray(values, dtype=float))
    expected = np.array([cdf(value) for value in ordered])
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return max(np.max(steps[1:] - expected), np.max(expected - steps[:-1]))


def critical_distance(count: int) -> float:
    """Return the distance that one sample in a thousand exceeds."""
    return 1.95 / math.sqrt(count)


@pytest.mark.parametrize("dataset", PUBLISHED)
def test_lengths_have_the_published_means(dataset: str):
    shapes = sample_shapes(WorkloadConfig(dataset=dataset, num_prompts=MANY))
    published = PUBLISHED[dataset]
    lengths = {
        published.mean_input: [shape.input_len for shape in shapes],
        published.mean_output: [shape.output_len for shape in shapes],
    }
    for mean, drawn in lengths.items():
        error = np.std(drawn) / math.sqrt(MANY)
        assert abs(np.mean(drawn) - mean) < STANDARD_ERRORS * error
        assert min(drawn) >= 1


def test_lengths_are_lognormal():
    shapes = sample_shapes(WorkloadConfig(dataset="mooncake", num_prompts=MANY))
    logarithms = [math.log(shape.input_len) for shape in shapes]
    normal = NormalDist(math.log(7590) - ASSUMED_SIGMA**2 / 2, ASSUMED_SIGMA)
    assert kolmogorov_smirnov(logarithms, normal.cdf) < critical_distance(MANY)


def test_scale_is_a_factor_on_all_lengths():
    whole, tenth = (
        sample_shapes(WorkloadConfig(dataset="mooncake", num_prompts=500, scale=scale)) for scale in (1, 0.1)
    )
    for shape, small in zip(whole, tenth, strict=True):
        assert small.input_len == pytest.approx(shape.input_len / 10, abs=0.56)
        assert small.output_len == pytest.approx(shape.output_len / 10, abs=0.56) or small.output_len == 1
        assert small.prefix == shape.prefix


def test_half_of_the_mooncake_prompts_is_shared_in_whole_blocks():
    shapes = sample_shapes(WorkloadConfig(dataset="mooncake", num_prompts=MANY))
    assert all(shape.prefix_len % 512 == 0 and shape.prefix_len <= shape.input_len for shape in shapes)
    share = sum(shape.prefix_len for shape in shapes) / sum(shape.input_len for shape in shapes)
    assert share == pytest.approx(0.5, abs=0.01)


def test_reusable_tokens_are_those_that_a_naive_search_finds():
    config = WorkloadConfig(dataset="mooncake", num_prompts=40, scale=0.02)
    workload = build_workload(config, VOCABULARY, None)
    prompts = [request.prompt_token_ids for request in workload.requests]

    def common(one: list[int], other: list[int]) -> int:
        pairs = enumerate(zip(one, other, strict=False))
        return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))

    found = sum(
        max((common(prompt, earlier) for earlier in prompts[:index]), default=0)
        for index, prompt in enumerate(prompts)
    )
    chance = len(prompts)  # a token that is no part of a prefix may still be equal by accident
    assert 0 < workload.reusable_tokens <= found <= workload.reusable_tokens + chance
    assert workload.as_dict()["reusable_prompt_share"] == workload.reusable_tokens / sum(map(len, prompts))


def test_reusable_tokens_of_few_shapes_by_hand():
    shapes = [
        RequestShape(9, 1, 0, 4),
        RequestShape(9, 1, 1, 8),
        RequestShape(9, 1, 0, 6),
        RequestShape(9, 1, 0, 6),
        RequestShape(9, 1, 1, 2),
    ]
    assert reusable_tokens(shapes) == 4 + 6 + 2


def test_random_prompts_share_the_prefix_and_nothing_else():
    config = WorkloadConfig(num_prompts=5, input_len=32, output_len=7, prefix_len=20)
    workload = build_workload(config, VOCABULARY, 59)
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert {len(prompt) for prompt in prompts} == {52}
    assert {request.output_len for request in workload.requests} == {7}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 5
    assert workload.warmup[0].prompt_token_ids[:20] != prompts[0][:20]
    assert set().union(*prompts) <= set(VOCABULARY.tolist())


def test_a_seed_gives_the_same_requests_and_another_gives_others():
    first, again, other = (
        build_workload(WorkloadConfig(dataset="alpaca", seed=seed), VOCABULARY, None) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.requests != other.requests


def test_more_warmup_changes_no_measured_request():
    few, many = (
        build_workload(WorkloadConfig(num_prompts=2, input_len=9, warmup=warmup), VOCABULARY, None)
        for warmup in (0, 5)
    )
    assert few.requests == many.requests
    assert (len(few.warmup), len(many.warmup)) == (0, 5)


def test_warmup_sends_none_of_the_measured_prompts():
    workload = build_workload(WorkloadConfig(num_prompts=4, input_len=16, warmup=6), VOCABULARY, None)
    warmup, measured = (
        {tuple(request.prompt_token_ids) for request in requests}
        for requests in (workload.warmup, workload.requests)
    )
    assert (len(warmup), len(measured)) == (6, 4)
    assert not warmup & measured


def test_requests_that_are_too_long_are_shortened_and_counted():
    config = WorkloadConfig(dataset="sharegpt", num_prompts=200)
    drawn = sample_shapes(config)
    workload = build_workload(config, VOCABULARY, 600)
    sizes = [len(request.prompt_token_ids) + request.output_len for request in workload.requests]
    too_long = [shape.input_len + shape.output_len > 600 for shape in drawn]
    assert max(sizes) == 600
    assert workload.num_clipped == sum(too_long) > 0
    for shape, size, is_long in zip(drawn, sizes, too_long, strict=True):
        assert size == (600 if is_long else shape.input_len + shape.output_len)


@pytest.mark.parametrize(
    "shape",
    [RequestShape(1, 5000), RequestShape(5000, 1), RequestShape(4000, 4000, 0, 3500), RequestShape(70, 31)],
)
def test_what_is_clipped_has_a_prompt_and_an_output(shape: RequestShape):
    small = clip_shape(shape, 100)
    assert small.input_len + small.output_len == 100
    assert min(small.input_len, small.output_len) >= 1
    assert small.prefix_len <= small.input_len


def test_lengths_that_were_asked_for_and_do_not_fit_are_refused():
    config = WorkloadConfig(input_len=60, output_len=41)
    with pytest.raises(ConfigError, match=r"60 and an output of 41 tokens make 101; the limit is 100"):
        build_workload(config, VOCABULARY, 100)
    assert build_workload(config, VOCABULARY, 101).num_clipped == 0


def test_prompts_are_made_of_ordinary_tokens():
    tokenizer = read_tokenizer(resolve_model("mini"))
    ids = regular_token_ids(tokenizer)
    assert tokenizer.special_token_ids
    assert not set(ids.tolist()) & {*tokenizer.special_token_ids, *tokenizer.eos_token_ids}
    assert len(ids) == tokenizer.vocab_size - len({*tokenizer.special_token_ids, *tokenizer.eos_token_ids})
    assert regular_token_ids(tokenizer, 500).max() == 499


def test_poisson_arrivals_have_exponential_gaps_of_the_right_mean():
    times = arrival_times(MANY, 8.0, 1.0, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0
    assert abs(gaps.mean() - 1 / 8) < STANDARD_ERRORS * (1 / 8) / math.sqrt(MANY)
    assert kolmogorov_smirnov(gaps, lambda gap: 1 - math.exp(-8 * gap)) < critical_distance(MANY)


def test_poisson_arrivals_are_counted_with_a_variance_equal_to_the_mean():
    counts = np.bincount(arrival_times(MANY, 5.0, 1.0, np.random.default_rng(1)).astype(int))[:-1]
    assert counts.mean() == pytest.approx(5, rel=0.05)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_spread_and_not_the_rate(burstiness: float):
    gaps = np.diff(arrival_times(MANY, 2.0, burstiness, np.random.default_rng(2)))
    assert gaps.mean() == pytest.approx(0.5, rel=STANDARD_ERRORS / math.sqrt(burstiness * MANY))
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times(7, math.inf, 1.0, np.random.default_rng(0)).tolist() == [0.0] * 7
