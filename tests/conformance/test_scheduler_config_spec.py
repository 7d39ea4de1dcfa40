"""The scheduler's specification, section 2: SchedulerConfig as a whole, and each of its fields."""

from __future__ import annotations

import dataclasses
import json

import pytest
from conformance import row
from scene import Scene

from faulty_connector import FaultyConnector
from quire.config import CacheEvictionConfig, EngineConfig, SchedulerConfig, SparseAttentionConfig
from quire.engine.memory.byte_sizes import GB
from quire.engine.memory.plan import plan_memory
from quire.engine.memory.state_sizes import StateSizes
from quire.errors import ConfigError, InvalidRequestError, QueueFullError
from quire.kv.cache.state_layout import StateLayout
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.config import ModelConfig
from quire.status import FinishReason

DEFAULTS = {
    "max_num_batched_tokens": 0,  # by the device; 256 in OpenVINO GenAI
    "max_num_seqs": 256,
    "block_size": 16,
    "num_kv_blocks": 0,
    "cache_size": 0.0,
    "enable_prefix_caching": True,
    "dynamic_split_fuse": True,
    "policy": "fcfs",
    "priority_ageing": 60.0,
    "admission": "reserve",
    "victim": "last",
    "prefix_retention": "lru",
    "long_prefill_token_threshold": 0,
    "max_num_queued_reqs": 4096,
    "max_num_queued_tokens": 4_194_304,
    "watermark": 0.01,
    "reserve_full_prompt": True,
    "request_timeout": 0.0,
    "queue_timeout": 0.0,
    "overlap_steps": False,
    "kv_load_failure": "recompute",
    "kv_transfer_timeout": 30.0,
    "max_pin_time": 3600.0,
    "max_pinned_share": 0.5,
    "max_pinned_share_per_tenant": 0.5,
    "closed_json_objects": True,
    "max_grammar_time_per_token": 0.002,
    "max_grammar_cache_bytes": 67_108_864,
    "num_linear_attention_blocks": 0,
    "cache_interval_multiplier": None,
    "use_cache_eviction": False,
    "cache_eviction_config": CacheEvictionConfig(),
    "use_sparse_attention": False,
    "sparse_attention_config": SparseAttentionConfig(),
}
OTHERS = {
    "max_num_batched_tokens": 7, "max_num_seqs": 7, "block_size": 8, "num_kv_blocks": 7, "cache_size": 0.5,
    "enable_prefix_caching": False, "dynamic_split_fuse": False, "policy": "priority", "priority_ageing": 7.0,
    "admission": "past-future", "victim": "fewest-computed", "prefix_retention": "lfu",
    "long_prefill_token_threshold": 7, "max_num_queued_reqs": 7, "max_num_queued_tokens": 7, "watermark": 0.5,
    "reserve_full_prompt": False, "request_timeout": 7.0, "queue_timeout": 7.0, "overlap_steps": True,
    "kv_load_failure": "fail", "kv_transfer_timeout": 7.0, "use_cache_eviction": True,
    "cache_eviction_config": CacheEvictionConfig(start_size=64), "use_sparse_attention": True,
    "sparse_attention_config": SparseAttentionConfig(mode="xattention"), "max_pin_time": 7.0,
    "max_pinned_share": 0.7, "max_pinned_share_per_tenant": 0.3, "max_grammar_time_per_token": 7.0,
    "max_grammar_cache_bytes": 7, "closed_json_objects": False,
    "num_linear_attention_blocks": 7, "cache_interval_multiplier": 7,
}  # fmt: skip


# -- as a whole --------------------------------------------------------------------------------------------


@row("every field has its default")
def test_every_field_has_its_default():
    config = SchedulerConfig()
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == DEFAULTS


@row("settable as attributes after a no-argument constructor", "settable as keyword arguments")
@pytest.mark.parametrize("name", DEFAULTS)
def test_every_field_can_be_set_in_both_ways(name):
    config = SchedulerConfig()
    setattr(config, name, OTHERS[name])
    assert getattr(config, name) == OTHERS[name]
    assert config.validate() == SchedulerConfig(**{name: OTHERS[name]})


@row("equality covers every field", "repr covers every field")
@pytest.mark.parametrize("name", DEFAULTS)
def test_equality_and_repr_cover_every_field(name):
    other = SchedulerConfig(**{name: OTHERS[name]})
    assert other != SchedulerConfig()
    assert f"{name}={OTHERS[name]!r}" in repr(other)
    assert f"{name}={DEFAULTS[name]!r}" in repr(SchedulerConfig())


@row("unknown names are errors")
def test_unknown_names_are_errors_that_name_the_nearest():
    with pytest.raises(ConfigError, match="no field 'max_num_seq'; did you mean 'max_num_seqs'"):
        SchedulerConfig(max_num_seq=1)
    config = SchedulerConfig()
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        config.blocksize = 16


@row("use_sparse_attention", "sparse_attention_config")
def test_sparse_attention_has_the_fields_of_the_specification():
    assert dataclasses.asdict(SparseAttentionConfig()) == {
        "mode": "trishape",
        "num_last_dense_tokens_in_prefill": 100,
        "num_retained_start_tokens_in_cache": 128,
        "num_retained_recent_tokens_in_cache": 1920,
        "xattention_threshold": 0.8,
        "xattention_block_size": 64,
        "xattention_stride": 8,
    }
    config = SchedulerConfig(block_size=48)
    config.validate()
    config.use_sparse_attention = True
    with pytest.raises(ConfigError, match="num_retained_start_tokens_in_cache is 128; it must be a multiple"):
        config.validate()


# -- sizes -------------------------------------------------------------------------------------------------


@row("max_num_batched_tokens")
def test_max_num_batched_tokens_bounds_a_step():
    scene = Scene(max_num_batched_tokens=5)
    for name in "abc":
        scene.add(name, range(7))
    assert [sum(scene.step().values()) for _ in range(3)] == [5, 5, 5]
    scene.finish()
    scene.check_naive()


@row("max_num_seqs")
def test_max_num_seqs_bounds_the_sequences_of_a_step():
    scene = Scene(max_num_seqs=2)
    for name in "abc":
        scene.add(name, range(2))
    assert set(scene.step()) == {"a", "b"}
    scene.finish()
    scene.check_naive()


@row("block_size")
def test_block_size_is_the_tokens_of_a_block():
    scene = Scene(block_size=2, num_blocks=32)
    scene.add("a", range(7))
    plan = scene.plan()
    assert plan.scheduled_new_reqs[0].block_ids.shape == (1, 4)
    scene.apply(plan)
    scene.finish()
    scene.check_naive()


@pytest.fixture
def model(tmp_path) -> ModelConfig:
    """16 KiB of KV per token in bfloat16: 2 x 8 layers x 8 heads x 64 x 2 bytes."""
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 512,
        "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return read_model_config(tmp_path)


def planned_blocks(model: ModelConfig, **settings) -> int:
    config = EngineConfig(scheduler=SchedulerConfig(**settings))
    return plan_memory(config, model, available_bytes=64 * GB).num_blocks


@row("num_kv_blocks", "cache_size")
def test_num_kv_blocks_wins_over_cache_size(model):
    assert planned_blocks(model, num_kv_blocks=300) == 300
    assert planned_blocks(model, cache_size=0.5) == 500_000_000 // (16 * 16_384)
    assert planned_blocks(model, cache_size=0.5, num_kv_blocks=300) == 300


@row("num_kv_blocks", "cache_size")
def test_both_0_the_cache_grows_on_demand_and_never_below_what_is_in_use():
    granted = []

    def commit(count: int) -> int:
        granted.append(count)
        return count

    scene = Scene(num_blocks=64, commit_blocks=commit, max_num_batched_tokens=8, max_num_seqs=1)
    assert granted == []
    scene.add("a", range(40), max_tokens=8)
    held = []
    while scene.scheduler.has_requests():
        scene.step()
        held.append((sum(granted), scene.scheduler.get_kv_cache_usage() * 64))
    assert all(committed >= used for committed, used in held)
    assert held[0][0] < held[-1][0] < 64
    scene.check_naive()


@row("enable_prefix_caching")
@pytest.mark.parametrize(("enabled", "tokens"), [(True, 1), (False, 9)])
def test_prefix_caching_keeps_computed_blocks_or_releases_them_at_once(enabled, tokens):
    scene = Scene(enable_prefix_caching=enabled)
    scene.add("first", range(9))
    scene.finish()
    scene.add("second", range(9))
    assert scene.step() == {"second": tokens}
    scene.finish()
    scene.check_naive()


@row("enable_prefix_caching")
def test_cached_blocks_are_rewritten_when_the_limit_is_reached():
    scene = Scene(num_blocks=4)
    scene.add("first", range(12), max_tokens=1)
    scene.finish()
    scene.add("other", range(20, 34), max_tokens=1)
    scene.finish()
    scene.add("again", range(12), max_tokens=1)
    assert scene.step() == {"again": 12}


# -- how prompts are computed ------------------------------------------------------------------------------


@row("dynamic_split_fuse")
def test_with_split_fuse_prompts_are_split_and_mixed_with_decoding():
    scene = Scene(max_num_batched_tokens=6)
    scene.add("decodes", range(3))
    scene.step()
    scene.add("long", range(20))
    assert scene.step() == {"decodes": 1, "long": 5}


@row("dynamic_split_fuse")
def test_without_split_fuse_long_prompts_are_errors_and_steps_are_of_one_kind():
    scene = Scene(dynamic_split_fuse=False, max_num_batched_tokens=6)
    with pytest.raises(InvalidRequestError, match="max_num_batched_tokens 6"):
        scene.add("too long", range(7))
    scene.add("a", range(3))
    assert scene.step() == {"a": 3}
    scene.add("b", range(6))
    assert scene.step() == {"a": 1}
    assert scene.step() == {"b": 6}
    assert scene.step() == {"a": 1, "b": 1}
    scene.finish()
    scene.check_naive()


@row("num_linear_attention_blocks")
def test_states_beyond_those_of_running_sequences_are_kept_for_the_prefix_cache():
    layout = StateLayout((), bytes_per_state=64)
    scheduler = SchedulerConfig(max_num_seqs=4, num_linear_attention_blocks=9)
    assert StateSizes.of(scheduler, layout, free_bytes=0).num_checkpoints == 5
    with pytest.raises(ConfigError, match="num_linear_attention_blocks is 9"):
        StateSizes.of(dataclasses.replace(scheduler, max_num_seqs=10), layout, free_bytes=10**9)


@row("cache_interval_multiplier")
@pytest.mark.parametrize(
    ("multiplier", "bytes_of_a_state", "blocks"),
    [(3, 64, 3), (None, 64, 8), (None, 1999, 20), (None, 10**6, 256)],
)
def test_states_are_kept_an_interval_apart(multiplier, bytes_of_a_state, blocks):
    states = StateSizes(StateLayout((), bytes_of_a_state), num_slots=4, num_checkpoints=4)
    scheduler = SchedulerConfig(block_size=16, cache_interval_multiplier=multiplier)
    assert states.for_scheduler(scheduler, kv_bytes_per_block=100).interval == 16 * blocks


@row("use_cache_eviction", "cache_eviction_config")
def test_a_sequence_keeps_no_more_than_configured_once_its_prompt_is_computed():
    sizes = CacheEvictionConfig(start_size=4, recent_size=4, max_cache_size=16)
    scene = Scene(use_cache_eviction=True, cache_eviction_config=sizes, block_size=4)
    scene.add("r", range(36), max_tokens=12)
    scene.step()
    while scene.scheduler.has_unfinished_requests():
        scene.step()
        assert scene.scheduler.get_kv_cache_usage() * scene.num_blocks <= 16 // 4 + 1
    scene.finish()
    scene.check_naive()


@row("long_prefill_token_threshold")
def test_long_prefills_are_capped_per_request_and_step():
    scene = Scene(long_prefill_token_threshold=3)
    scene.add("a", range(8))
    scene.add("b", range(2))
    assert [scene.step() for _ in range(3)] == [{"a": 3, "b": 2}, {"a": 3, "b": 1}, {"a": 2, "b": 1}]


# -- bounds ------------------------------------------------------------------------------------------------


@row("max_num_queued_reqs", "max_num_queued_tokens")
@pytest.mark.parametrize("bound", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_beyond_a_bound_requests_are_refused_with_a_retry_hint(bound):
    scene = Scene(**{bound: 2 if bound == "max_num_queued_reqs" else 8})
    scene.add("a", range(4))
    scene.add("b", range(4))
    with pytest.raises(QueueFullError, match=bound) as refused:
        scene.add("c", range(4))
    assert 1 <= refused.value.retry_after <= 60
    scene.step()
    scene.add("c", range(4))


@row("watermark")
@pytest.mark.parametrize(("watermark", "count"), [(0.0, 2), (0.2, 1)])
def test_a_share_of_the_blocks_is_kept_free_at_admission(watermark, count):
    scene = Scene(num_blocks=10, watermark=watermark)
    scene.add("a", range(16))
    scene.add("b", range(20, 40))
    assert len(scene.step()) == count


@row("reserve_full_prompt")
@pytest.mark.parametrize(("reserve", "count"), [(True, 1), (False, 2)])
def test_a_request_is_admitted_if_its_prompt_fits_or_its_first_chunk(reserve, count):
    scene = Scene(
        num_blocks=10, max_num_batched_tokens=10, long_prefill_token_threshold=4, reserve_full_prompt=reserve
    )
    scene.add("a", range(24))
    scene.add("b", range(20, 44))
    assert len(scene.step()) == count
    scene.finish()
    scene.check_naive()


@row("request_timeout", "queue_timeout")
@pytest.mark.parametrize("name", ["request_timeout", "queue_timeout"])
def test_requests_end_when_their_time_is_up(name):
    scene = Scene(max_num_seqs=1, **{name: 5.0})
    scene.add("runs", range(4), max_tokens=50)
    scene.step()
    scene.add("waits", range(4))
    scene.clock.advance(5)
    scene.step()
    assert set(scene.reasons) == ({"runs", "waits"} if name == "request_timeout" else {"waits"})
    assert scene.reasons["waits"] is FinishReason.ERROR
    assert name in scene.errors["waits"]


@row("overlap_steps")
@pytest.mark.parametrize(("overlap", "num_computed"), [(True, 4), (False, 0)])
def test_the_next_step_is_planned_while_one_runs(overlap, num_computed):
    scene = Scene(overlap_steps=overlap, enable_prefix_caching=False)
    scene.add("a", range(4))
    scene.plan()
    assert scene.plan().num_computed_tokens.tolist() == [num_computed], "without, the first is taken for lost"


@row(
    "kv_load_failure",
    "a failed load means recompute",
    "a failed load fails that one request, by configuration",
)
@pytest.mark.parametrize("choice", ["recompute", "fail"])
@pytest.mark.parametrize("load_steps", [0, 1])
def test_what_a_failed_load_means(choice, load_steps):
    connector = FaultyConnector(4, load_steps=load_steps)
    scene = Scene(connector=connector, enable_prefix_caching=False, kv_load_failure=choice)
    scene.add("before", range(9), max_tokens=1)
    scene.finish()
    connector.fail_next_loads(1)
    scene.add("a", range(9))
    scene.add("b", range(20, 29))
    scene.finish()
    if choice == "fail":
        assert "kv_load_failure" in scene.errors["a"]
        scene.check_naive("b")
    else:
        scene.check_naive()


@row("kv_transfer_timeout")
def test_blocks_are_held_for_a_transfer_until_the_timeout():
    scene = Scene(connector=FaultyConnector(4, send_steps=9, is_peer_alive=False), kv_transfer_timeout=7.0)
    scene.add("a", range(9), max_tokens=1)
    scene.step()
    scene.clock.advance(6.9)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 3
    scene.clock.advance(0.2)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 0
