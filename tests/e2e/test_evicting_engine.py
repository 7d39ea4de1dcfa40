"""Cache eviction through the whole engine: the same bits in any company, and no more KV than configured."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engine_checks import core_of
from late_tokens import choose_on_device
from quire import (
    LLM,
    AdaptiveRKVConfig,
    CacheEvictionConfig,
    ContinuousBatchingPipeline,
    GenerationConfig,
    KVCrushConfig,
    SamplingParams,
    SchedulerConfig,
)
from quire.front.process.resumption import RecoveryStats
from quire.request_output import RequestOutput
from quire.server.metrics.registry import Metrics

TEXT = (
    "Quire pages its KV cache in blocks, batches requests continuously and computes prompts in chunks. " * 8
)
LENGTHS = [130, 7, 180, 64]
SIZES: dict[str, Any] = {"start_size": 16, "recent_size": 16, "max_cache_size": 64}

WAYS: dict[str, tuple[CacheEvictionConfig, dict[str, Any]]] = {
    "norm_sum": (CacheEvictionConfig(**SIZES), {}),
    "sum-of-all-queries-in-float32": (
        CacheEvictionConfig(**SIZES, aggregation_mode="sum", snapkv_window_size=0),
        {"dtype": "float32"},
    ),
    "kvcrush-on-int8-kv": (
        CacheEvictionConfig(**SIZES, snapkv_window_size=40, kvcrush_config=KVCrushConfig(budget=2)),
        {"kv_cache_dtype": "int8"},
    ),
    "adaptive_rkv": (
        CacheEvictionConfig(
            **SIZES,
            aggregation_mode="adaptive_rkv",
            adaptive_rkv_config=AdaptiveRKVConfig(attention_mass=0.5, window_size=4),
        ),
        {},
    ),
    "rotation": (CacheEvictionConfig(**SIZES, apply_rotation=True), {}),
    "rotation-with-the-reference": (
        CacheEvictionConfig(**SIZES, apply_rotation=True),
        {"kernels": "reference"},
    ),
}


def run(llm: LLM, *, one_by_one: bool = False) -> list[RequestOutput]:
    prompts = [(llm.get_tokenizer().encode(TEXT) * 2)[start : start + n] for start, n in enumerate(LENGTHS)]
    params = [
        SamplingParams(max_tokens=30 - n % 9, ignore_eos=True, logprobs=2, seed=n, temperature=float(n % 2))
        for n in LENGTHS
    ]
    if one_by_one:
        return [llm.generate([one], [param])[0] for one, param in zip(prompts, params, strict=True)]
    return llm.generate(prompts, params)


def bits(outputs: list[RequestOutput]) -> list[tuple]:
    return [
        (
            output.outputs[0].token_ids,
            [
                {token: entry.logprob.hex() for token, entry in position.items()}
                for position in output.outputs[0].logprobs
            ],
        )
        for output in outputs
    ]


def evicting(way: str, **options: Any) -> LLM:
    config, numbers = WAYS[way]
    scheduler = {"num_kv_blocks": 256, "use_cache_eviction": True, "cache_eviction_config": config}
    return LLM("mini", **{**scheduler, **numbers, **options})


@functools.cache
def alone(way: str) -> list[tuple]:
    with evicting(way, enable_prefix_caching=False) as llm:
        return bits(run(llm, one_by_one=True))


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_in_company_in_chunks_and_after_preemptions(way):
    options = {"num_kv_blocks": 16, "watermark": 0.0, "reserve_full_prompt": False}
    with evicting(way, max_num_batched_tokens=19, **options) as llm:
        assert bits(run(llm)) == alone(way)
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert stats.num_evicted_blocks > 0
        assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.histories
def test_the_same_bits_in_overlapped_steps_and_out_of_the_prefix_cache():
    with evicting("norm_sum", overlap_steps=True) as llm:
        assert bits(run(llm)) == alone("norm_sum")
        assert bits(run(llm)) == alone("norm_sum")
        assert llm.stats().prefix_hit_tokens > 0


def rounded(outputs: list[tuple]) -> list[tuple]:
    """The device may add up the weights of a row in another order."""
    return [
        (ids, [{token: round(float.fromhex(one), 9) for token, one in of.items()} for of in logprobs])
        for ids, logprobs in outputs
    ]


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("way", ["norm_sum", "adaptive_rkv", "rotation"])
def test_the_same_tokens_in_steps_whose_tokens_only_the_device_knows(way, monkeypatch):
    expected = rounded(alone(way))
    unknown_tokens = choose_on_device(monkeypatch)
    options = {"num_kv_blocks": 16, "watermark": 0.0, "reserve_full_prompt": False}
    with evicting(way, overlap_steps=True, max_num_batched_tokens=40, **options) as llm:
        assert rounded(bits(run(llm))) == expected
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_evicted_blocks > 0
    assert max(unknown_tokens) > 1


@pytest.mark.histories
def test_the_same_bits_with_whole_prompts():
    with evicting("norm_sum", dynamic_split_fuse=False) as llm:
        assert bits(run(llm)) == alone("norm_sum")


@pytest.mark.histories
def test_an_engine_that_never_evicts_computes_the_same_bits_as_without():
    large = CacheEvictionConfig(max_cache_size=672)
    with LLM("mini", num_kv_blocks=256, use_cache_eviction=True, cache_eviction_config=large) as llm:
        with_scores = bits(run(llm))
        assert llm.stats().num_evicted_blocks == 0
    with LLM("mini", num_kv_blocks=256) as llm:
        assert bits(run(llm)) == with_scores


def test_completions_of_one_prompt_evict_each_for_itself():
    with evicting("norm_sum") as llm:
        prompt = (llm.get_tokenizer().encode(TEXT) * 2)[:200]
        params = SamplingParams(n=3, max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
        together = llm.generate([prompt], params)[0]
        again = llm.generate([prompt], params)[0]
        assert [one.token_ids for one in together.outputs] == [one.token_ids for one in again.outputs]
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


@pytest.mark.histories
def test_sequences_hold_no_more_than_the_maximum_once_their_prompts_are_computed():
    """As the metrics say, the block pool and Prometheus."""
    num_seqs, length, block_size = 4, 400, 32
    config = CacheEvictionConfig(start_size=32, recent_size=32, max_cache_size=160)
    scheduler = SchedulerConfig(
        num_kv_blocks=num_seqs * length // block_size + num_seqs,
        block_size=block_size,
        max_num_batched_tokens=num_seqs * length,
        use_cache_eviction=True,
        cache_eviction_config=config,
    )
    pipeline = ContinuousBatchingPipeline("mini", scheduler)
    prompt = (pipeline.get_tokenizer().encode(TEXT) * 5)[:length]
    generation = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    handles = [pipeline.add_request(number, prompt, generation) for number in range(num_seqs)]
    most_blocks = -(-(160 + block_size - 1) // block_size)
    num_shared = 1  # the start area is the same block for all
    while pipeline.has_non_finished_requests():
        pipeline.step()
        stats = core_of(pipeline).stats()
        in_use = stats.num_blocks - stats.num_free_blocks
        assert in_use <= num_seqs * (most_blocks - num_shared) + num_seqs
        assert pipeline.get_metrics().cache_usage == pytest.approx(100 * in_use / stats.num_blocks)
    assert [len(handle.read_all()[0].generated_ids) for handle in handles] == [40] * num_seqs
    metrics = Metrics("fake", block_size)
    metrics.engine.update(stats, RecoveryStats(), engine_up=True)
    evicted = f"quire_kv_blocks_evicted_total {float(stats.num_evicted_blocks)}"
    assert evicted in metrics.exposition().decode()
    assert stats.num_evicted_blocks >= num_seqs * (length - 160) // block_size
