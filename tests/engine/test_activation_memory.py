"""What the plan counts for key selection and cache eviction, against what a worst case allocates."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from caches import make_cache
from checkpoints import FAMILIES, make_checkpoint
from counted_memory import CountedMemory
from paged_harness import PagedHarness, random_prompts
from quire.config import CacheEvictionConfig, EngineConfig, SchedulerConfig, SparseAttentionConfig
from quire.engine.memory.byte_sizes import GB
from quire.engine.memory.eviction import eviction_bytes, score_bytes_per_token
from quire.engine.memory.plan import activation_bytes, plan_memory
from quire.execution.eviction import evicted_keys
from quire.execution.eviction.cache_evictor import CacheEvictor
from quire.execution.eviction.evicted_keys import KeyRotation, cached_keys, copy_blocks
from quire.kernels import bounds
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.key_scores import KeyScores
from quire.kernels.attention.paged import Scores
from quire.kernels.attention.sparse_prefill import KeySelection
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.cpu.layers import native_layer, native_plan
from quire.kernels.cpu.step_bounds import step_addresses
from quire.kernels.triton.attention import key_selection
from quire.kernels.triton.attention.call import AttentionCall
from quire.kernels.triton.attention.layer import triton_layer
from quire.kernels.triton.attention.paged import paged_attention
from quire.kernels.triton.attention.plan import attention_plan
from quire.kv.eviction.diversity import diversity
from quire.models.config import ModelConfig, RopeConfig
from quire.models.layers.attention import (
    AttentionConfig,
    attention_of,
    gpu_key_selection_bytes,
    key_selection_bytes,
    native_attention_bytes,
)
from subprocesses import python_output

KERNEL_CALL = """
import resource, sys
import numpy as np, torch
from quire.kernels.dispatch import kernel_set
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.sparse_prefill import KeySelection
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.page_layout import KVLayerSpec
from quire.kv.cache.paged_cache import PagedAttentionCache

kernels = kernel_set("native")
kernels.use_threads(2)
layers = [KVLayerSpec(1, 16, 16)]
metadata = PagedAttentionCacheMetaData.for_layers(layers, page_size=64, dtype=torch.float32, num_pages=1)
kv = PagedAttentionCache.init_cache(None, metadata).views[0]
kv.key_pages.fill_(1.0), kv.value_pages.fill_(1.0)

def attend(cached, tokens, **options):
    tables = np.zeros((1, -(-(cached + tokens) // 64)), dtype=np.int32)  # the same keys again and again
    batch = AttentionBatch.build([cached], [tokens], tables, 64, **options)
    kernels.paged_attention(torch.ones(tokens, 16, 16), kv, batch, scale=0.25)

def allocated():
    return int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()

attend(0, 64)
before = allocated()
if sys.argv[1] == "selection":
    attend(131_072, 128, key_selection=KeySelection(np.array([131_200]), 0.001, 64, 4))
else:
    attend(1448, 600, first_scoring_token=[0])
# Scratch memory is kept. It is half as large again as needed; the system provides what is used.
print((allocated() - before) * 2 // 3)
"""


def scheduler(**options) -> SchedulerConfig:
    return SchedulerConfig(use_cache_eviction=True, **options).validate()


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    from quire.models.checkpoints.config_reading import read_model_config
    from quire.models.checkpoints.hub import resolve_model

    return read_model_config(resolve_model("mini"))


def shaped(model: ModelConfig, num_layers: int, **attention: Any) -> ModelConfig:
    """Return a model with so many layers, whose attention has other numbers."""
    layers = model.layers[:1] * num_layers
    return dataclasses.replace(model, layers=layers).changed(AttentionConfig, **attention)


def bytes_without_layers(config: SchedulerConfig, model: ModelConfig, max_model_len: int) -> int:
    """Return what of `eviction_bytes` does not grow with the number of layers."""
    one, two = (
        eviction_bytes(config, dataclasses.replace(model, layers=model.layers[:1] * count), max_model_len)
        for count in (1, 2)
    )
    return 2 * one - two


@pytest.mark.parametrize(("num_threads", "num_tasks"), [(1, 3), (2, 7), (14, 55), (14, 56), (64, 255)])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "group"),
    [(128, 128, 4), (256, 256, 1), (64, 64, 200), (576, 576, 16), (192, 128, 16), (64, 256, 4)],
)
@pytest.mark.parametrize("length", [500, 5000, 20_000])
def test_native_attention_stays_within_its_bound(
    num_threads: int, num_tasks: int, head_dim: int, value_dim: int, group: int, length: int
):
    shape = AttentionConfig(
        num_heads=num_tasks * group, num_kv_heads=num_tasks, head_dim=head_dim, value_dim=value_dim
    )
    bound = native_attention_bytes(shape, length, num_threads)
    table = np.zeros((1, -(-length // 16)), dtype=np.int32)
    batch = AttentionBatch.build(np.array([length - 1]), np.array([1]), table, 16)
    layer = native_layer(make_cache(1, 1, num_tasks, 16, head_dim, torch.float32, value_dim).views[0]).native
    needed = native_plan(batch, step_addresses(batch, 1, 16), window=0, group=group).scratch_bytes(
        layer, num_threads=num_threads
    )
    assert needed <= bound
    spans_are_tasks = num_tasks < 4 * num_threads and bound < bounds.MAX_SPAN_BYTES
    if spans_are_tasks or length <= bounds.SPAN or num_threads == 1:
        assert needed > 0.9 * bound


def test_the_estimate_of_a_key_selection_stays_within_its_bound():
    shape = AttentionConfig(num_heads=16, num_kv_heads=1, head_dim=16)
    sparse = SparseAttentionConfig(mode="xattention", xattention_stride=4)
    config = SchedulerConfig(
        use_sparse_attention=True, sparse_attention_config=sparse, max_num_batched_tokens=128, max_num_seqs=1
    )
    bound = key_selection_bytes(config, shape, 131_200, num_threads=2)
    measured = int(python_output(KERNEL_CALL, "selection", preload=True))
    assert 0.8 * bound < measured < bound
    assert not key_selection_bytes(SchedulerConfig(), shape, 131_200, num_threads=2)


class NoKernel:
    """Is launched in place of a kernel, and computes nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("stride", "length"), [(4, 131_072), (32, 131_072), (8, 40_000)])
def test_a_key_selection_on_a_gpu_stays_within_its_bound(
    stride: int, length: int, monkeypatch: pytest.MonkeyPatch
):
    for kernel in ("weigh_key_blocks", "add_masses", "write_visits"):
        monkeypatch.setattr(key_selection, kernel, NoKernel())
    shape = AttentionConfig(num_heads=16, num_kv_heads=2, head_dim=16)
    sparse = SparseAttentionConfig(mode="xattention", xattention_stride=stride)
    config = SchedulerConfig(
        use_sparse_attention=True, sparse_attention_config=sparse, max_num_batched_tokens=4096, max_num_seqs=1
    )
    bound = gpu_key_selection_bytes(config, shape, length)
    batch = AttentionBatch.build(
        np.array([length - 4096]),
        np.array([4096]),
        np.zeros((1, length // 16), dtype=np.int32),
        16,
        key_selection=KeySelection(np.array([length]), 0.5, 64, stride),
    )
    layer = triton_layer(make_cache(1, 1, 2, 16, 16, torch.bfloat16).views[0])
    query = torch.zeros(4096, 16, 16, dtype=torch.bfloat16)
    heads = HeadLayout(16, 2, 16)
    call = AttentionCall(query, layer, query, heads, Scores(1.0, 0.0, None), window=0)
    plan = attention_plan(batch, heads, 0, is_float32=False, is_converted=False, device=query.device)
    with CountedMemory(1 << 40) as memory:
        call = dataclasses.replace(call, selected=key_selection.select_keys(call, batch))
        visits = [key_selection.list_visits(call, tiles) for tiles in plan.classes]
    assert len(visits) == 1
    assert 0.4 * bound < memory.peak < bound
    assert not gpu_key_selection_bytes(SchedulerConfig(), shape, length)


def test_the_rows_of_attention_stay_within_their_bound(model: ModelConfig):
    shape = shaped(model, 1, num_heads=16, num_kv_heads=1, head_dim=16)
    config = scheduler(
        cache_eviction_config=CacheEvictionConfig(max_cache_size=2032),
        max_num_batched_tokens=600,
        max_num_seqs=1,
    )
    written = 600 * 2048 * 4  # the rows of one layer
    bound = bytes_without_layers(config, shape, 4096) + written
    measured = int(python_output(KERNEL_CALL, "rows", preload=True))
    assert 0.8 * bound < measured < bound


NUM_LAYERS = 24


def scored(evictor: CacheEvictor, batch: SimpleNamespace, num_computed, num_tokens) -> int:
    """Let sequences score, and register it; return the peak of what that takes, in bytes."""
    num_computed, num_tokens = np.array(num_computed), np.array(num_tokens)
    rows = np.zeros_like(num_computed)
    evictions = SimpleNamespace(num_evicted_tokens=rows, num_blocks=rows)
    plan = SimpleNamespace(
        slots=np.arange(len(rows)),
        num_computed_tokens=num_computed,
        num_tokens=num_tokens,
        evictions=evictions,
    )
    first = evictor.first_scoring_token(plan)
    scores = KeyScores.build(
        num_tokens, num_computed + num_tokens, first, evictor.is_in_prompt(plan), num_layers=NUM_LAYERS
    )
    scores.layer_rows.zero_(), scores.layer_sums.zero_()
    evictor.begin(scores)
    for layer in range(NUM_LAYERS):
        evictor.after_attention(layer)
    evictor.end(plan)
    of_torch = scores.layer_rows.nbytes + scores.layer_sums.nbytes
    return tracemalloc.get_traced_memory()[1] + of_torch


@pytest.mark.parametrize("aggregation_mode", ["sum", "norm_sum", "adaptive_rkv"])
@pytest.mark.parametrize("snapkv_window_size", [0, 8])
def test_the_scores_of_sequences_stay_within_their_bound(
    model: ModelConfig, aggregation_mode: str, snapkv_window_size: int
):
    shape = shaped(model, NUM_LAYERS)
    eviction = CacheEvictionConfig(
        aggregation_mode=aggregation_mode, snapkv_window_size=snapkv_window_size, max_cache_size=1024
    )
    config = scheduler(cache_eviction_config=eviction, max_num_batched_tokens=512, max_num_seqs=4)
    batch = SimpleNamespace()
    cache = SimpleNamespace(tensor=torch.empty(0))
    evictor = CacheEvictor(eviction, shape, cache, batch, 16)
    tracemalloc.start()
    try:
        for slot in range(4):
            evictor.open(slot, 896)
        in_prompt = scored(evictor, batch, [0] * 4, [896] * 4)
        rows = scored(evictor, batch, [896] * 4, [128] * 4)
    finally:
        tracemalloc.stop()
    tokens = 4 * 1024
    bound = eviction_bytes(config, shape, 1024) - bytes_without_layers(config, shape, 1024)
    bound += score_bytes_per_token(config, shape) * tokens
    assert 0.45 * bound < max(in_prompt, rows) < bound  # places out of order would take as much again


def test_comparing_keys_stays_within_its_bound(model: ModelConfig):
    shape = shaped(model, 1, num_kv_heads=4, head_dim=64)
    sizes = {"max_cache_size": 1024}
    compared, not_compared = (
        scheduler(cache_eviction_config=CacheEvictionConfig(aggregation_mode=mode, **sizes), max_num_seqs=1)
        for mode in ("adaptive_rkv", "sum")
    )
    bound = eviction_bytes(compared, shape, 4096) - eviction_bytes(not_compared, shape, 4096)
    keys = np.random.default_rng(0).normal(size=(4, 4096, 64)).astype(np.float32)
    tracemalloc.start()
    try:
        diversity(keys, 16, np.arange(4096 // 16))
        measured = tracemalloc.get_traced_memory()[1] + 2 * keys.nbytes  # as stored, and in float32
    finally:
        tracemalloc.stop()
    assert 0.8 * bound < measured < bound


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_step_of_a_family_stays_within_its_bound(family: str, tmp_path: Path):
    """With the logits of a whole prompt; what native kernels take for themselves is counted apart."""
    from quire.models.checkpoints.config_reading import read_model_config
    from quire.models.checkpoints.loading import load_decoder

    tokens = 512
    make_checkpoint(family, tmp_path, dtype="bfloat16")
    shape = dataclasses.replace(read_model_config(tmp_path), max_model_len=tokens)
    decoder = load_decoder(tmp_path, shape)
    config = SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=1, block_size=16)
    bound = activation_bytes(config, shape, "bfloat16", max_model_len=tokens)
    harness = PagedHarness(decoder, [tokens])
    (prompt,) = random_prompts([tokens], vocab_size=shape.vocab_size)
    logit_rows = min(bounds.prompt_logit_rows(shape.vocab_size, 1), tokens)

    def compute() -> None:
        decoder.logits(harness.step([0], [0], [prompt])[:logit_rows])

    apart = max([native_bytes(part, tokens) for part in attention_of(shape)], default=0)
    found = peak_of(compute) + apart
    assert 0.4 * bound < found < 1.05 * bound  # half of it where no expert gets every token


def native_bytes(attention: AttentionConfig, length: int) -> int:
    fits = not attention.head_dim % bounds.HEAD_DIM_MULTIPLE
    return native_attention_bytes(attention, length, num_threads=1) if fits else 0


def peak_of(compute: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that there are at once while something is computed."""
    with CountedMemory(10**9) as memory:
        compute()
    return memory.peak


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("sums", [False, True])
def test_the_scores_of_a_step_stay_within_their_bound_on_a_gpu(model: ModelConfig, sums: bool):
    """In Triton's interpreter; of what attention takes, only what it takes for scores counts."""
    shape = shaped(model, 6, num_heads=2, num_kv_heads=1, head_dim=16)
    sizes = CacheEvictionConfig(max_cache_size=240, start_size=16, recent_size=16)
    config = scheduler(cache_eviction_config=sizes, max_num_batched_tokens=192, max_num_seqs=2, block_size=16)
    cache = make_cache(64, 1, 1, 16, 16, torch.float32)
    cache.tensor.fill_(1.0)
    query = torch.ones(192, 2, 16)
    computed, counts = np.array([160, 160]), np.array([96, 96])
    tables = np.arange(32).reshape(2, 16)

    def attend(**options: Any) -> None:
        batch = AttentionBatch.build(computed, counts, tables, 16, **options)
        paged_attention(query, cache.views[0], batch, scale=0.25)

    scored = {"first_scoring_token": [0, 0], "sums_scores": np.array([sums] * 2), "num_scored_layers": 6}
    peak = peak_of(lambda: attend(**scored)) - peak_of(attend)
    bound = eviction_bytes(config, shape, 1000, on_gpu=True)
    if sums:  # of tokens in the cache
        bound = score_bytes_per_token(config, shape, on_gpu=True) * 512
    assert 0.8 * bound < peak < bound + sums * eviction_bytes(config, shape, 1000, on_gpu=True)


@pytest.mark.parametrize("aggregation_mode", ["sum", "adaptive_rkv"])
@pytest.mark.parametrize("apply_rotation", [False, True])
def test_evictions_stay_within_their_bound_on_a_gpu(
    model: ModelConfig, aggregation_mode: str, apply_rotation: bool, monkeypatch: pytest.MonkeyPatch
):
    rope = RopeConfig(theta=10_000.0, rotary_dim=64)
    shape = shaped(model, 1, num_kv_heads=16, head_dim=64, rope=rope)
    shape = dataclasses.replace(shape, max_model_len=4096)
    eviction = CacheEvictionConfig(
        max_cache_size=2032, aggregation_mode=aggregation_mode, apply_rotation=apply_rotation
    )
    config = scheduler(cache_eviction_config=eviction, max_num_batched_tokens=1, max_num_seqs=1)
    bound = eviction_bytes(config, shape, 4096, on_gpu=True)
    monkeypatch.setattr(evicted_keys, "vectors_in", lambda pages, *_: pages)  # which the host does
    sources, targets, back = torch.arange(127), torch.arange(127, 254), torch.full((127,), 4000)
    with CountedMemory(10**9) as memory:
        layer = make_cache(256, 1, 16, 16, 64, torch.float32).views[0]
        layer.key_pages.add_(0.0), layer.value_pages.add_(0.0)
        before = memory.num_taken
        copy_blocks(layer, sources, targets)
        if apply_rotation:
            KeyRotation(shape, torch.device("cpu")).turn_back(layer, sources, back, farthest=4000)
        if aggregation_mode == "adaptive_rkv":
            cached_keys(layer, np.arange(256))
    assert 0.75 * bound < memory.peak - before < bound


def test_the_plan_leaves_room_for_scores(model: ModelConfig):
    def plan(**options):
        config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=100_000, **options))
        return plan_memory(config, model, available_bytes=4 * GB)

    with_scores, without = plan(use_cache_eviction=True), plan()
    assert without.score_bytes == 0
    per_token = score_bytes_per_token(SchedulerConfig(use_cache_eviction=True), model)
    assert with_scores.score_bytes == with_scores.num_kv_tokens * per_token > 0
    assert with_scores.total_bytes <= 4 * GB
    assert with_scores.num_blocks < without.num_blocks


def test_on_a_gpu_only_the_scores_of_a_step_are_planned_for(model: ModelConfig):
    def plan(device: str, **measured):
        scheduler = SchedulerConfig(max_num_seqs=100_000, use_cache_eviction=True)
        config = EngineConfig(scheduler=scheduler, device=device, kernels="triton")
        return plan_memory(config, model, available_bytes=4 * GB, **measured)

    on_gpu = plan("cuda")
    assert on_gpu.score_bytes == on_gpu.num_kv_tokens * model.num_layers * 8
    assert 0 < on_gpu.score_bytes < plan("cpu").score_bytes / 2
    assert on_gpu.total_bytes <= 4 * GB
    assert plan("cuda", measured_bytes=on_gpu.activation_bytes).num_blocks == on_gpu.num_blocks
