from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from quire.config import (
    AdaptiveRKVConfig,
    AggregationMode,
    BatchConfig,
    CacheEvictionConfig,
    ChatTemplateConfig,
    ConnectionConfig,
    EdgeConfig,
    EngineConfig,
    KVCrushAnchorPointMode,
    KVCrushConfig,
    KVEventsConfig,
    KVTierConfig,
    KVTransferConfig,
    SchedulerConfig,
    ServerConfig,
    SparseAttentionConfig,
    SparseAttentionMode,
    SpeculationConfig,
    SupervisionConfig,
)
from quire.errors import ConfigError, InvalidRequestError
from quire.front.openvino.generation_config import GenerationConfig, StructuredOutputConfig
from quire.sampling_params import SamplingParams

CONFIGS = [
    EngineConfig, SchedulerConfig, SpeculationConfig, SupervisionConfig, ServerConfig, SamplingParams,
    CacheEvictionConfig, KVCrushConfig, AdaptiveRKVConfig, EdgeConfig, ConnectionConfig, ChatTemplateConfig,
    BatchConfig, KVTierConfig, KVTransferConfig, KVEventsConfig,
]  # fmt: skip
EVICTING = SchedulerConfig(use_cache_eviction=True)
ROTATING = SchedulerConfig(
    use_cache_eviction=True, cache_eviction_config=CacheEvictionConfig(apply_rotation=True)
)


@pytest.mark.parametrize("cls", CONFIGS)
def test_an_unknown_name_is_refused_with_the_nearest(cls):
    name = dataclasses.fields(cls)[1].name
    with pytest.raises(ConfigError, match=f"no field '{name}s'; did you mean '{name}'"):
        cls(**{name + "s": 1})


@pytest.mark.parametrize("cls", CONFIGS)
def test_fields_are_slotted_and_but_for_those_of_openvino_genai_keyword_only(cls):
    if cls not in (CacheEvictionConfig, KVCrushConfig, AdaptiveRKVConfig):
        with pytest.raises(TypeError):
            cls(1)
    assert not hasattr(cls(), "__dict__")


def test_configurations_of_the_cache_take_values_in_openvino_genais_order():
    crush = KVCrushConfig(3, KVCrushAnchorPointMode.MEAN, 5)
    given = CacheEvictionConfig(32, 64, 128, AggregationMode.SUM, True, 4, crush)
    assert given == CacheEvictionConfig(
        start_size=32,
        recent_size=64,
        max_cache_size=128,
        aggregation_mode="sum",
        apply_rotation=True,
        snapkv_window_size=4,
        kvcrush_config=KVCrushConfig(budget=3, anchor_point_mode="mean", rng_seed=5),
    )
    given.kvcrush_config = None
    assert given.kvcrush_config == CacheEvictionConfig(kvcrush_config=None).kvcrush_config == KVCrushConfig()
    assert AdaptiveRKVConfig(0.5, 3) == AdaptiveRKVConfig(attention_mass=0.5, window_size=3)
    assert SparseAttentionConfig(SparseAttentionMode.XATTENTION, 1, 32, 64, 0.5, 128, 16) == (
        SparseAttentionConfig(
            mode="xattention",
            num_last_dense_tokens_in_prefill=1,
            num_retained_start_tokens_in_cache=32,
            num_retained_recent_tokens_in_cache=64,
            xattention_threshold=0.5,
            xattention_block_size=128,
            xattention_stride=16,
        )
    )
    with pytest.raises(TypeError, match="positional"):
        AdaptiveRKVConfig(0.5, 3, 1)
    with pytest.raises(TypeError, match="attention_mass"):
        AdaptiveRKVConfig(0.5, attention_mass=0.4)


def test_nested_configurations_can_be_set_and_are_checked_when_they_are_used():
    config = SchedulerConfig(use_cache_eviction=True, use_sparse_attention=True)
    config.cache_eviction_config.apply_rotation = True
    config.cache_eviction_config.kvcrush_config.budget = 2
    config.cache_eviction_config.adaptive_rkv_config.window_size = 3
    config.sparse_attention_config.mode = SparseAttentionMode.XATTENTION
    kept = EngineConfig(scheduler=config).scheduler
    assert kept == config
    for holder, name, value in (
        (config.cache_eviction_config, "recent_size", 0),
        (config.cache_eviction_config, "max_cache_size", 160),
        (config.cache_eviction_config, "kvcrush_config", 2),
        (config.cache_eviction_config.kvcrush_config, "budget", -1),
        (config.cache_eviction_config.adaptive_rkv_config, "attention_mass", 2.0),
        (config.sparse_attention_config, "xattention_block_size", 7),
    ):
        before = getattr(holder, name)
        setattr(holder, name, value)
        with pytest.raises(ConfigError, match=name):
            EngineConfig(scheduler=config)
        with pytest.raises(ConfigError, match=name):
            config.validate()
        setattr(holder, name, before)
    assert EngineConfig(scheduler=config).scheduler == kept


def test_an_engine_keeps_its_own_copies_of_nested_configurations():
    config = SchedulerConfig()
    kept = EngineConfig(scheduler=config).scheduler
    config.cache_eviction_config.kvcrush_config.budget = 2
    config.sparse_attention_config.xattention_stride = 16
    assert kept == SchedulerConfig() != config


SETTABLE = [
    SchedulerConfig, CacheEvictionConfig, KVCrushConfig, AdaptiveRKVConfig, SparseAttentionConfig,
    GenerationConfig, StructuredOutputConfig,
]  # fmt: skip


@pytest.mark.parametrize("cls", SETTABLE)
def test_settable_configurations_can_be_hashed_copied_and_pickled(cls):
    one, other = cls(), cls()
    name = dataclasses.fields(cls)[0].name
    named = {one: "one"}
    assert (one == other, hash(one) == hash(other), len({one, other})) == (True, True, 1)
    setattr(one, name, 77)
    assert named[one] == "one", "its hash has not changed"
    assert one != other
    by_pickle = [pickle.loads(pickle.dumps(one, protocol)) for protocol in range(6)]
    function, arguments, state = one.__reduce__()
    assert function(*arguments).__class__ is cls
    assert state[1][name] == 77
    for made in (copy.copy(one), copy.deepcopy(one), *by_pickle):
        assert made == one
        assert made is not one
        assert made != other
    config = SchedulerConfig()
    copy.deepcopy(config).cache_eviction_config.apply_rotation = True
    assert config == SchedulerConfig()


@pytest.mark.parametrize("cls", SETTABLE)
def test_settable_configurations_name_all_fields_as_text(cls):
    text = cls().to_string()
    assert text.startswith(cls.__name__ + " {")
    for field in dataclasses.fields(cls):
        assert f"\n  {field.name}: " in text


def test_text_of_a_configuration_shows_choices_by_name_and_nested_ones_further_in():
    text = SchedulerConfig(cache_eviction_config=CacheEvictionConfig(max_cache_size=512)).to_string()
    assert "\n  use_cache_eviction: false\n" in text
    assert "\n  cache_eviction_config: CacheEvictionConfig {\n    start_size: 32\n" in text
    assert "\n    aggregation_mode: NORM_SUM\n" in text
    assert "\n    kvcrush_config: KVCrushConfig {\n      budget: 0\n" in text


def test_what_is_no_field_cannot_be_read():
    with pytest.raises(AttributeError, match="no attribute 'cache_interval'"):
        SchedulerConfig().cache_interval  # noqa: B018


@pytest.mark.parametrize("cls", [EngineConfig, SpeculationConfig, ServerConfig, SamplingParams])
def test_configurations_are_frozen(cls):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(cls(), dataclasses.fields(cls)[0].name, 1)


def test_the_scheduler_config_is_settable_by_attribute_but_only_known_ones():
    config = SchedulerConfig()
    config.max_num_seqs = 7
    assert config == SchedulerConfig(max_num_seqs=7)
    assert "max_num_seqs=7" in repr(config)
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        config.max_num_seq = 7


def test_cache_eviction_has_the_sizes_of_openvino_genai():
    config = CacheEvictionConfig(max_cache_size=512)
    sizes = (config.get_start_size(), config.get_recent_size(), config.get_max_cache_size())
    assert (*sizes, config.get_evictable_size()) == (32, 128, 512, 352)
    assert config.aggregation_mode is AggregationMode.NORM_SUM


def test_an_engine_keeps_its_own_copy_of_the_scheduler_config():
    mine = SchedulerConfig(max_num_seqs=7)
    config = EngineConfig(scheduler=mine)
    mine.max_num_seqs = 8
    assert config.scheduler.max_num_seqs == 7


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (EngineConfig, {"dtype": "bfloat"}, "dtype is 'bfloat'; did you mean 'bfloat16'"),
        (EngineConfig, {"num_threads": 2000}, "num_threads is 2000; it must be from 0 to 1024"),
        (EngineConfig, {"memory_fraction": 1.0}, "memory_fraction is 1.0; it must be above 0 and below 1"),
        (EngineConfig, {"max_model_len": -1}, "max_model_len is -1; it must be at least 0"),
        (EngineConfig, {"scheduler": SchedulerConfig(block_size=0)}, "block_size is 0; it must be at least"),
        (EngineConfig, {"scheduler": SchedulerConfig(policy="fifo")}, "policy is 'fifo'"),
        (EngineConfig, {"scheduler": SchedulerConfig(watermark=1.0)}, "watermark is 1.0"),
        (EngineConfig, {"scheduler": SchedulerConfig(watermark=float("nan"))}, "watermark is nan"),
        (EngineConfig, {"scheduler": SchedulerConfig(num_kv_blocks=64.0)}, "64.0; it must be a whole number"),
        (EngineConfig, {"scheduler": SchedulerConfig(max_num_seqs="8")}, "max_num_seqs is '8'"),
        (EngineConfig, {"scheduler": SchedulerConfig(block_size=True)}, "block_size is True"),
        (EngineConfig, {"scheduler": SchedulerConfig(enable_prefix_caching=1)}, "must be True or False"),
        (
            EngineConfig,
            {"scheduler": {"block_size": 8}},
            r"scheduler is \{.*\}; it must be SchedulerConfig",
        ),
        (EngineConfig, {"memory_fraction": "half"}, "memory_fraction is 'half'; it must be a number"),
        (EngineConfig, {"model": None}, "model is None; it must be text"),
        (ServerConfig, {"port": "http"}, "port is 'http'"),
        (CacheEvictionConfig, {"start_size": 0}, "start_size is 0; it must be at least 1"),
        (CacheEvictionConfig, {"recent_size": 0}, "recent_size is 0; it must be at least 1"),
        (
            CacheEvictionConfig,
            {"max_cache_size": 160},
            r"max_cache_size is 160; it must be above .*, 32 \+ 128",
        ),
        (CacheEvictionConfig, {"aggregation_mode": "norm"}, "aggregation_mode is 'norm'; did you mean"),
        (CacheEvictionConfig, {"snapkv_window_size": -1}, "snapkv_window_size is -1"),
        (CacheEvictionConfig, {"kvcrush_config": 2}, "kvcrush_config is 2; it must be KVCrushConfig"),
        (KVCrushConfig, {"budget": -1}, "budget is -1; it must be at least 0"),
        (KVCrushConfig, {"anchor_point_mode": "one"}, "anchor_point_mode is 'one'; did you mean 'ones'"),
        (
            AdaptiveRKVConfig,
            {"attention_mass": 0.0},
            "attention_mass is 0.0; it must be above 0 and at most 1",
        ),
        (AdaptiveRKVConfig, {"window_size": 0}, "window_size is 0; it must be at least 1"),
        (
            EngineConfig,
            {"scheduler": SchedulerConfig(use_cache_eviction=True, block_size=64)},
            "start_size is 32; it must be a multiple of the block size, SchedulerConfig.block_size 64",
        ),
        (
            EngineConfig,
            {"scheduler": EVICTING, "speculation": SpeculationConfig(speculative_method="ngram")},
            "speculative_method is 'ngram', but SchedulerConfig.use_cache_eviction is on: blocks evicted",
        ),
        (
            EngineConfig,
            {"scheduler": EVICTING, "kv_connector": "a.connector"},
            "kv_connector is 'a.connector', but SchedulerConfig.use_cache_eviction is on: other stores",
        ),
        (
            EngineConfig,
            {"scheduler": EVICTING, "tensor_parallel_size": 2},
            "tensor_parallel_size is 2, but SchedulerConfig.use_cache_eviction is on: scores sum",
        ),
        (
            EngineConfig,
            {"scheduler": EVICTING, "kv_tiering": KVTierConfig(kv_tier="memory")},
            "KVTierConfig.kv_tier is 'memory', but .* is on",
        ),
        (
            EngineConfig,
            {"scheduler": ROTATING, "kv_cache_dtype": "int4"},
            "kv_cache_dtype is 'int4', but CacheEvictionConfig.apply_rotation is on: each rotation",
        ),
        (
            EngineConfig,
            {"scheduler": SchedulerConfig(cache_size=float("inf"))},
            "cache_size is inf; .* finite",
        ),
        (ServerConfig, {"port": -1}, "port is -1"),
        (ServerConfig, {"port": 65536}, "port is 65536; it must be from 0 to 65535"),
    ],
)
def test_unusable_values_are_refused_with_value_and_limit(cls, values, message):
    with pytest.raises(ConfigError, match=message):
        cls(**values)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"bad_words": ("a", "")}, "bad_words"),
        ({"top_k": 2**63}, "top_k"),
        ({"stop_token_ids": range(129)}, "stop_token_ids"),
        ({"bad_words": [str(number) for number in range(257)]}, "bad_words"),
        ({"bad_words_token_ids": [[number] for number in range(1025)]}, "bad_words_token_ids"),
    ],
)
def test_sampling_params_out_of_range_name_the_field(values, param):
    with pytest.raises(InvalidRequestError, match=param) as caught:
        SamplingParams(**values)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", None),
        ("stop", [["a"]]),
        ("stop_token_ids", None),
        ("bad_words", 5),
        ("bad_words_token_ids", [5]),
        ("logit_bias", None),
        ("logit_bias", {1: "much"}),
        ("temperature", "hot"),
        ("temperature", None),
        ("max_tokens", "3"),
    ],
)
def test_sampling_params_of_a_wrong_type_name_the_field(name, value):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_lists_hold_each_entry_once():
    params = SamplingParams(
        stop=["b", "a", "b"], stop_token_ids=[7, 3, 7] * 100, bad_words_token_ids=[[1, 2], (1, 2)]
    )
    assert params.stop == ("b", "a")
    assert params.stop_token_ids == (7, 3)
    assert params.bad_words_token_ids == ((1, 2),)


def test_one_stop_string_may_be_given_bare():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculative_method": "ngrams"}, "speculative_method is 'ngrams'; did you mean 'ngram'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be at least 1"),
        ({"max_num_draft_tokens": 0}, "max_num_draft_tokens is 0; it must be at least 1"),
        ({"ngram_min": 0}, "ngram_min is 0; it must be at least 1"),
        ({"ngram_min": 5}, "ngram_max is 4; it must be at least ngram_min, 5"),
        ({"ngram_min": 3, "suffix_max": 2}, "suffix_max is 2; it must be at least ngram_min, 3"),
        ({"speculative_method": "draft-model"}, "draft_model is empty; speculative_method draft-model needs"),
        ({"draft_model": "x"}, "draft_model is 'x', but speculative_method is 'none'"),
    ],
)
def test_unusable_speculation_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig(**values)


def test_an_engine_takes_a_speculation_config_only():
    with pytest.raises(ConfigError, match=r"speculation is \{.*\}; it must be SpeculationConfig"):
        EngineConfig(speculation={"speculative_method": "ngram"})


def test_drafts_grow_shorter_as_more_requests_run():
    config = SpeculationConfig(speculative_method="ngram", num_speculative_tokens=5, max_num_draft_tokens=20)
    lengths = {num_running: config.draft_length(num_running) for num_running in (0, 1, 4, 5, 6, 10, 20, 21)}
    assert lengths == {0: 5, 1: 5, 4: 5, 5: 4, 6: 3, 10: 2, 20: 1, 21: 0}
    for num_running in range(1, 30):
        assert num_running * config.draft_length(num_running) <= config.max_drafts(num_running) <= 20
    assert config.max_drafts(2) == 10
    assert SpeculationConfig().draft_length(1) == SpeculationConfig().max_drafts(8) == 0
