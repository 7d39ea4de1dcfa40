"""A runner that evicts KV, driven by the scheduler, against a naive model that evicts for itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from naive_evicting_model import NaiveEvictingModel

from caches import cache_of
from checkpoints import make_model
from quire.config import AdaptiveRKVConfig, CacheEvictionConfig, KVCrushConfig, SchedulerConfig
from quire.execution.model_runner import ModelRunner
from quire.execution.persistent_batch import InconsistentPlanError
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduling import Scheduler
from quire.step import StepInFlight

BLOCK_SIZE = 4
NUM_OUTPUT = 40
SIZES = {"start_size": 4, "recent_size": 8, "max_cache_size": 32}
PROMPT = np.random.default_rng(3).integers(3, 380, 70).tolist()


@pytest.fixture(scope="module")
def reference():
    return make_model("qwen3")


def build(model, config, *, num_blocks=64, **options):
    scheduler_config = SchedulerConfig(
        block_size=BLOCK_SIZE, use_cache_eviction=True, cache_eviction_config=config, **options
    ).validate()
    shape = model.config
    kv_cache = cache_of(shape, num_blocks, BLOCK_SIZE, model.dtype)
    sizes = {"max_model_len": 256}
    runner = ModelRunner(
        model,
        [kv_cache],
        max_num_seqs=scheduler_config.max_num_seqs,
        block_size=BLOCK_SIZE,
        eviction=config,
        **sizes,
    )
    return Scheduler(scheduler_config, num_blocks=num_blocks, **sizes), runner


def run(scheduler, runner, prompt=PROMPT, num_output=NUM_OUTPUT):
    """Return one request's tokens and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output, logprobs=0)
    scheduler.add_request(Request("r", prompt, params))
    tokens, logprobs = [], []
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        computed = runner.execute(plan)
        result = computed.result() if isinstance(computed, StepInFlight) else computed
        for outputs in scheduler.update_from_output(plan, result).values():
            for output in outputs.outputs:
                assert output.error is None
                tokens += output.new_token_ids
                logprobs += [entry.logprobs[0] for entry in output.logprobs]
    return tokens, logprobs


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation_mode": "sum", "snapkv_window_size": 0},
        {"snapkv_window_size": 30, "apply_rotation": True},
        {"aggregation_mode": "sum", "kvcrush_config": KVCrushConfig(budget=2)},
        {"apply_rotation": True, "kvcrush_config": KVCrushConfig(budget=1, anchor_point_mode="mean")},
        {"aggregation_mode": "adaptive_rkv", "apply_rotation": True, "score_pooling": "centered"},
        {
            "aggregation_mode": "adaptive_rkv",
            "adaptive_rkv_config": AdaptiveRKVConfig(attention_mass=0.3, window_size=3),
        },
    ],
)
@pytest.mark.parametrize(("chunk", "num_prompt"), [(512, 70), (11, 30)])
def test_tokens_and_logprobs_are_those_of_dense_attention_to_what_is_kept(
    models, reference, options, chunk, num_prompt
):
    config = CacheEvictionConfig(**SIZES, **options)
    prompt = PROMPT[:num_prompt]
    expected = NaiveEvictingModel(reference, config, BLOCK_SIZE).continuation(prompt, NUM_OUTPUT)
    scheduler, runner = build(models["float32"], config, max_num_batched_tokens=chunk)
    tokens, logprobs = run(scheduler, runner, prompt)
    assert scheduler.make_stats().num_evicted_blocks > 0
    assert tokens == expected[0]
    np.testing.assert_allclose(logprobs, expected[1], atol=2e-4)


def test_a_plan_that_counts_evicted_tokens_otherwise_is_refused(models):
    scheduler, runner = build(models["float32"], CacheEvictionConfig(**SIZES))
    scheduler.add_request(Request("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=9)))
    plan = scheduler.schedule()
    wrong = dataclasses.replace(plan.evictions, num_evicted_tokens=np.array([4], dtype=np.int32))
    with pytest.raises(InconsistentPlanError, match=r"\[4\] tokens of its rows are evicted, but \[0\] are"):
        runner.execute(dataclasses.replace(plan, evictions=wrong))
