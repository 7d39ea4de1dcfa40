"""The blocks of layers with windows: figures worked out by hand, and what must hold for any model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faulty_scheduler import OneByOne
from quire.cli.commands.plan import as_dict, memory_table
from quire.config import EngineConfig, KVTierConfig, KVTransferConfig, SchedulerConfig, SpeculationConfig
from quire.engine.building.assembly import RETRY_INTERVAL, CacheGrowth, build_scheduler, commits_of_groups
from quire.engine.memory.byte_sizes import GB
from quire.engine.memory.cache_warming import CacheWarmer
from quire.engine.memory.group_sizes import GroupSizes, blocks_for
from quire.engine.memory.plan import MemoryPlan, plan_memory, plan_memory_again
from quire.errors import ConfigError
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.paged_cache import PagedAttentionCache
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.config import ModelConfig
from quire.models.layer import LayerConfig
from quire.scheduling.context import SchedulerContext
from quire.scheduling.scheduler import Scheduler

# Of google/gemma-3-4b-it: 34 layers, every sixth without a window, 4 KV heads of 256 features, bfloat16.
GEMMA3_4B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
FULL_BLOCK = 5 * 2 * 4 * 256 * 2 * 16  # 327,680 bytes for 5 layers: keys and values of 16 tokens
WINDOW_BLOCK = 29 * 2 * 4 * 256 * 2 * 16  # 1,900,544

# Of mistralai/Mistral-7B-v0.1: all of 32 layers have the window; 8 KV heads of 128 features.
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
MISTRAL_BLOCK = 32 * 2 * 8 * 128 * 2 * 16  # 2,097,152 bytes


class DerivedScheduler(Scheduler):
    """What an engine gives it, and nothing more."""

    def __init__(self, config, *, num_blocks, max_model_len, context=None):
        self.given = num_blocks, context


def model(directory: Path, hf_config: dict) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(hf_config))
    return read_model_config(directory)


@pytest.fixture
def gemma(tmp_path: Path) -> ModelConfig:
    return model(tmp_path, GEMMA3_4B)


@pytest.fixture
def mistral(tmp_path: Path) -> ModelConfig:
    return model(tmp_path, MISTRAL_7B)


def config_of(engine: dict | None = None, **scheduler) -> EngineConfig:
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 512, **scheduler}
    return EngineConfig(**(engine or {}), scheduler=SchedulerConfig(**scheduler))


def plan(model: ModelConfig, *, gigabytes: float = 64, engine: dict | None = None, **scheduler) -> MemoryPlan:
    return plan_memory(config_of(engine, **scheduler), model, available_bytes=int(gigabytes * GB))


def blocks(plan: MemoryPlan) -> list[int]:
    return [cache.num_pages_per_layer for cache in plan.kv_caches]


# 8 sequences need 8 * (1024 / 16 + 1) = 520 blocks with a window, their steps 2 * (512 / 16 + 1) = 66, and
# there is the null block.
GEMMA_WINDOW = 520 + 66 + 1


# A block that keeps prefixes of four windows takes a quarter of a block with a window.
PREFIX_BLOCK = FULL_BLOCK + WINDOW_BLOCK // 4


def test_a_window_s_blocks_are_those_of_all_sequences_or_of_cached_prefixes(gemma: ModelConfig):
    long = {"max_model_len": 32768}
    assert blocks(plan(gemma, engine=long, num_kv_blocks=2300)) == [2300, GEMMA_WINDOW]
    result = plan(gemma, engine=long, num_kv_blocks=16_384)
    assert result.windows == (1024,)
    assert [cache.bytes_per_block for cache in result.kv_caches] == [FULL_BLOCK, WINDOW_BLOCK]
    assert blocks(result) == [16_384, 16_384 // 4 + 1]
    assert result.kv_bytes == 16_384 * FULL_BLOCK + 4097 * WINDOW_BLOCK == 13_155_237_888
    assert result.num_kv_tokens == 8 * 32_768
    assert result.max_sequences_at(32_768) == 8
    # A token takes the memory of all layers at first.
    assert result.kv_bytes_per_token == 34 * 2 * 4 * 256 * 2
    assert result.kv_bytes_per_block == FULL_BLOCK + WINDOW_BLOCK


def test_what_windows_give_back_goes_to_longer_sequences(gemma: ModelConfig):
    result = plan(gemma, engine={"max_model_len": 8192}, cache_size=2.0)
    assert blocks(result) == [(2 * GB - WINDOW_BLOCK) // PREFIX_BLOCK, 622 + 1] == [2488, 623]
    assert 2 * GB - FULL_BLOCK - WINDOW_BLOCK < result.kv_bytes <= 2 * GB
    as_before = 2 * GB // (FULL_BLOCK + WINDOW_BLOCK)
    assert as_before == 897
    assert (result.max_sequences_at(8192), as_before // 512) == (4, 1)


def test_with_less_than_a_window_each_all_groups_have_equally_many(gemma: ModelConfig):
    result = plan(gemma, cache_size=2.0, max_num_seqs=256)
    num_blocks = (2 * GB - WINDOW_BLOCK) // (FULL_BLOCK + WINDOW_BLOCK)
    assert blocks(result) == [num_blocks, num_blocks + 1] == [896, 897]
    assert blocks(plan(gemma, num_kv_blocks=77)) == [77, 78]


def test_a_cache_for_more_than_running_sequences_keeps_prefixes_in_proportion(gemma: ModelConfig):
    length = {"max_model_len": 4096}  # 8 sequences use 2,048 blocks
    assert blocks(plan(gemma, engine=length, num_kv_blocks=2048)) == [2048, 587]
    assert blocks(plan(gemma, engine=length, num_kv_blocks=4096)) == [4096, 2 * 586 + 1]
    assert blocks(plan(gemma, engine=length, num_kv_blocks=3072)) == [3072, 879 + 1]


def test_no_more_blocks_than_sequences_can_use(gemma: ModelConfig):
    result = plan(gemma, gigabytes=1000, engine={"max_model_len": 4096})
    assert blocks(result) == [2048, 587]


def test_memory_is_shared_after_weights_and_activations(gemma: ModelConfig):
    result = plan(gemma, gigabytes=16, engine={"memory_fraction": 0.5})
    allowed = (16 * GB - result.weight_bytes - result.activation_bytes) // 2
    assert allowed - FULL_BLOCK - WINDOW_BLOCK < result.kv_bytes <= allowed
    assert blocks(result)[1] > GEMMA_WINDOW
    again = plan_memory_again(config_of(), gemma, result.num_blocks, available_bytes=int(15.5 * GB))
    assert blocks(again) == blocks(result)


def test_all_layers_may_have_windows(mistral: ModelConfig):
    # A sequence has 257 blocks: of 8, with their steps, 2,122, and as many numbers as 32,768 tokens take.
    result = plan(mistral, gigabytes=24)
    assert blocks(result) == [8 * 2048, 8 * 257 + 66 + 1]
    assert [cache.bytes_per_block for cache in result.kv_caches] == [0, MISTRAL_BLOCK]
    assert result.kv_bytes == 2123 * MISTRAL_BLOCK
    assert (result.max_model_len, result.max_sequences_at(32_768)) == (32_768, 8)
    assert commits_of_groups(config_of(), result)[0] is None
    small = plan(mistral, cache_size=1.0)
    assert blocks(small) == [GB // MISTRAL_BLOCK - 1, GB // MISTRAL_BLOCK] == [475, 476]
    large = plan(mistral, cache_size=8.9)
    assert blocks(large)[0] > 8 * 2048 * 1.9
    assert 8.9 * GB - MISTRAL_BLOCK < large.kv_bytes <= 8.9 * GB


def test_a_window_that_no_sequence_fills_makes_no_group(mistral: ModelConfig):
    assert blocks(plan(mistral, engine={"max_model_len": 4096}, num_kv_blocks=2048)) == [2048]
    assert blocks(plan(mistral, engine={"max_model_len": 4097}, num_kv_blocks=2048)) == [2048, 2049]
    shortened = plan(mistral, cache_size=0.5)
    assert (blocks(shortened), shortened.max_model_len) == ([238], 238 * 16)


def test_without_windows_and_without_any_kv(gemma: ModelConfig):
    dense = dataclasses.replace(gemma, layers=(LayerConfig(gemma.layers[0].parts[1:]),) * 3)
    for size in ({}, {"cache_size": 1.0}):
        result = plan(dense, engine={"max_model_len": 1000}, **size)
        assert (blocks(result), result.kv_bytes) == ([8 * 63], 0)


def test_ranks_have_a_part_of_the_heads_of_each_group(gemma: ModelConfig):
    two = plan(gemma, engine={"tensor_parallel_size": 2, "max_model_len": 8192}, cache_size=2.0)
    assert [cache.bytes_per_block for cache in two.kv_caches] == [FULL_BLOCK // 2, WINDOW_BLOCK // 2]
    assert blocks(two) == [2488, 623]


def test_a_draft_model_keeps_all_tokens_beside_the_first_group(gemma: ModelConfig):
    draft = dataclasses.replace(gemma, layers=gemma.layers[:2])
    engine = {"speculation": SpeculationConfig(speculative_method="draft-model", draft_model="small")}
    config = config_of({**engine, "max_model_len": 8192}, cache_size=2.0)
    result = plan_memory(config, draft_model=draft, model=gemma, available_bytes=64 * GB)
    draft_block = 2 * 2 * 4 * 256 * 2 * 16
    num_blocks = (2 * GB - GEMMA_WINDOW * WINDOW_BLOCK) // (FULL_BLOCK + draft_block)
    assert num_blocks < 4 * GEMMA_WINDOW
    assert blocks(result) == [num_blocks, GEMMA_WINDOW]
    assert result.draft_cache is not None
    assert result.draft_cache.num_pages_per_layer == num_blocks
    assert result.kv_bytes == num_blocks * (FULL_BLOCK + draft_block) + GEMMA_WINDOW * WINDOW_BLOCK


@pytest.mark.parametrize(
    "engine",
    [
        {"kv_connector": "memory_connector.MemoryConnector"},
        {"scheduler_cls": OneByOne},
        {"scheduler": SchedulerConfig(num_kv_blocks=5000, use_cache_eviction=True)},
    ],
    ids=lambda engine: next(iter(engine)),
)
def test_windows_keep_all_tokens_beside_what_knows_nothing_of_groups(gemma: ModelConfig, engine: dict):
    config = EngineConfig(**{"scheduler": SchedulerConfig(num_kv_blocks=5000), **engine})
    result = plan_memory(config, gemma, available_bytes=64 * GB)
    assert blocks(result) == [5000]
    assert result.kv_bytes == 5000 * (FULL_BLOCK + WINDOW_BLOCK)


@pytest.mark.parametrize(
    "engine",
    [
        {"kv_tiering": KVTierConfig(kv_tier="memory")},
        {"role": "prefill"},
        {"kv_transfer": KVTransferConfig(kv_peers="10.0.0.2:7000")},
    ],
    ids=lambda engine: next(iter(engine)),
)
def test_tiers_and_peers_leave_windows_their_groups(gemma: ModelConfig, engine: dict):
    config = EngineConfig(scheduler=SchedulerConfig(num_kv_blocks=5000), **engine)
    result = plan_memory(config, gemma, available_bytes=64 * GB)
    assert blocks(result) == [5000, 5001]


def test_a_cache_that_does_not_fit_is_refused_with_the_largest_that_does(gemma: ModelConfig):
    left = 11 * GB - plan(gemma, num_kv_blocks=100).weight_bytes
    largest = 3190
    assert largest * FULL_BLOCK + (798 + 1) * WINDOW_BLOCK <= left
    assert (largest + 1) * FULL_BLOCK + (798 + 1) * WINDOW_BLOCK > left
    with pytest.raises(ConfigError, match=rf"num_kv_blocks asks for .* {largest} blocks"):
        plan(gemma, gigabytes=11, num_kv_blocks=largest + 1)
    assert plan(gemma, gigabytes=11, num_kv_blocks=largest).num_blocks == largest
    with pytest.raises(ConfigError, match=r"no KV block of 2\.23 MB fits"):
        plan(gemma, cache_size=0.002)


def test_the_scheduler_gets_the_blocks_of_windows(gemma: ModelConfig):
    config = config_of({"scheduler_cls": DerivedScheduler}, num_kv_blocks=5000)
    scheduler = build_scheduler(
        config, plan_memory(config, gemma, available_bytes=64 * GB), SchedulerContext()
    )
    num_blocks, context = scheduler.given
    assert num_blocks == 5000
    assert [(group.window, group.num_blocks, group.commit) for group in context.windows] == [
        (1024, 1250 + 1, None)
    ]
    growing = config_of({"scheduler_cls": DerivedScheduler})
    scheduler = build_scheduler(growing, plan(gemma, gigabytes=16), SchedulerContext())
    _, context = scheduler.given
    assert None not in (context.commit_blocks, context.windows[0].commit)


def test_groups_are_not_granted_the_same_memory():
    now = 0.0
    growth = CacheGrowth(100, read_available=lambda: 1100, clock=lambda: now)
    assert growth.grant(10, 60) == 60
    assert growth.grant(50, 10) == 8  # of the 400 bytes that are left
    assert growth.grant(1, 1) == 0
    now += RETRY_INTERVAL
    assert growth.grant(1, 1) == 0


def test_the_table_shows_the_groups(gemma: ModelConfig):
    from rich.console import Console

    result = plan(gemma, engine={"max_model_len": 32768}, num_kv_blocks=16_384)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(memory_table("m", "Gemma3ForCausalLM", result, "cpu"))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "KV cache 13.2 GB 16,384 blocks, 262,144 tokens" in lines
    assert "window 1,024 7.79 GB of it, 4,097 blocks for 29 layers" in lines
    assert "KV per token 139 kB keys and values of all layers, bfloat16" in lines
    assert "before windows 20.5 kB layers without a window alone" in lines
    [group] = as_dict("m", "Gemma3ForCausalLM", result)["window_groups"]
    assert (group["num_layers"], group["kv_bytes"]) == (29, 4097 * WINDOW_BLOCK)
    assert result.blocks_text == "16384 blocks of 328 kB, 4097 blocks of 1.9 MB for the window of 1024"


def test_a_cache_of_no_layers_takes_no_memory():
    metadata = PagedAttentionCacheMetaData.for_layers(
        [None, None], page_size=4, dtype="bfloat16", num_pages=5
    )
    cache = PagedAttentionCache.on_device(metadata, torch.device("cpu"))
    assert (cache.num_blocks, cache.bytes_per_block, cache.nbytes) == (5, 0, 0)
    cache.copy_blocks(torch.tensor([[0, 4]], dtype=torch.int32).numpy())
    warmer = CacheWarmer(cache.tensor, lambda: pytest.fail("there is nothing to warm"))
    warmer.resume()


sizes = st.integers(1, 40)


@settings(max_examples=150, deadline=None)
@given(
    num_seqs=sizes,
    block_size=st.sampled_from([1, 2, 16]),
    max_model_len=st.integers(1, 3000),
    tokens=st.integers(1, 300),
    windows=st.lists(st.integers(1, 500), max_size=3),
    data=st.data(),
)
def test_no_workload_has_less_than_with_one_group(
    num_seqs: int, block_size: int, max_model_len: int, tokens: int, windows: list[int], data: st.DataObject
):
    scheduler = SchedulerConfig(max_num_seqs=num_seqs, block_size=block_size, max_num_batched_tokens=tokens)
    first_bytes = data.draw(st.integers(0 if windows else 1, 50))
    bytes_per_block = [first_bytes, *data.draw(st.lists(sizes, min_size=len(windows), max_size=len(windows)))]
    memory = data.draw(st.integers(-10, 10**6))
    groups = GroupSizes.of(scheduler, windows, bytes_per_block, max_model_len=max_model_len)
    first = groups.largest(memory)
    numbers = groups.num_blocks(first)
    assert groups.num_bytes(first) <= max(memory, 0) < groups.num_bytes(first + 1)
    # As many as one group of all layers would have, with a null block for each window.
    assert first >= max(0, memory - sum(bytes_per_block[1:])) // sum(bytes_per_block)
    if not windows:
        assert numbers == [max(0, memory) // first_bytes]
    # Every number of sequences of any length that fits into the first group has its blocks in the others.
    length = data.draw(st.integers(1, max_model_len))
    of_one = blocks_for(length, block_size)
    together = min(num_seqs, first // of_one)
    ahead = 2 * (blocks_for(tokens, block_size) + 1)
    for window, number in zip(windows, numbers[1:], strict=True):
        of_window = blocks_for(window, block_size) + 1
        assert number - bool(first) >= min(together * of_one, together * of_window + ahead)
        assert number <= first + 1
