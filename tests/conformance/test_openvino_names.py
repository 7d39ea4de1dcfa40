"""Names, defaults and orders of arguments that openvino_genai 2026.4.1 has, by its stubs and by trying it."""

from __future__ import annotations

import inspect

import pytest

import quire
from quire.errors import ConfigError
from quire.front.openvino.results import RawPerfMetrics

UNSET = 18446744073709551615

DEFAULTS = {
    "SchedulerConfig": {
        "cache_interval_multiplier": None, "cache_size": 0, "dynamic_split_fuse": True, "max_num_seqs": 256,
        "num_kv_blocks": 0, "num_linear_attention_blocks": 0, "use_cache_eviction": False,
        "use_sparse_attention": False,
    },
    "CacheEvictionConfig": {"apply_rotation": False, "snapkv_window_size": 8},
    "KVCrushConfig": {"budget": 0, "rng_seed": 0},
    "AdaptiveRKVConfig": {"attention_mass": 0.9, "window_size": 8},
    "SparseAttentionConfig": {
        "num_last_dense_tokens_in_prefill": 100, "num_retained_recent_tokens_in_cache": 1920,
        "num_retained_start_tokens_in_cache": 128, "xattention_block_size": 64, "xattention_stride": 8,
        "xattention_threshold": 0.8,
    },
    "GenerationConfig": {
        "adapters": None, "apply_chat_template": True, "assistant_confidence_threshold": 0.0,
        "branching_factor": 1, "diversity_penalty": 0.0, "do_sample": False, "echo": False,
        "eos_token_id": -1, "frequency_penalty": 0.0, "ignore_eos": False,
        "include_stop_str_in_output": False, "length_penalty": 1.0, "logprobs": 0, "max_length": UNSET,
        "max_new_tokens": UNSET, "max_ngram_size": 0, "min_new_tokens": 0, "min_p": 0.0,
        "no_repeat_ngram_size": UNSET, "num_assistant_tokens": None, "num_beam_groups": 1, "num_beams": 1,
        "num_return_sequences": 1, "parsers": [], "presence_penalty": 0.0, "pruning_ratio": 0,
        "relevance_weight": 0.5, "repetition_penalty": 1.0, "return_omni_outputs": False, "rng_seed": 0,
        "stop_strings": set(), "stop_token_ids": set(), "structured_output_config": None, "temperature": 1.0,
        "top_k": UNSET, "top_p": 1.0, "tree_depth": 0,
    },
    "StructuredOutputConfig": {
        "compound_grammar": None, "grammar": None, "json_schema": None, "regex": None,
        "structural_tags_config": None,
    },
    "GenerationResult": {"m_generation_ids": [], "m_request_id": 0, "m_scores": []},
    "EncodedGenerationResult": {
        "finish_reasons": [], "m_generation_ids": [], "m_request_id": 0, "m_scores": [],
    },
    "PipelineMetrics": {
        "avg_cache_usage": 0, "cache_size_in_bytes": 0, "cache_usage": 0, "kv_cache_size_in_bytes": 0,
        "la_peak_pool_blocks": 0, "max_cache_usage": 0, "requests": 0, "scheduled_requests": 0,
    },
}  # fmt: skip
DEFAULTS_BY_NAME = {  # members of enumerations
    ("SchedulerConfig", "cache_eviction_config.aggregation_mode"): "NORM_SUM",
    ("CacheEvictionConfig", "aggregation_mode"): "NORM_SUM",
    ("KVCrushConfig", "anchor_point_mode"): "RANDOM",
    ("SparseAttentionConfig", "mode"): "TRISHAPE",
    ("GenerationConfig", "stop_criteria"): "HEURISTIC",
    ("GenerationResult", "m_status"): "RUNNING",
}
METHODS = {
    "SchedulerConfig": "to_string",
    "CacheEvictionConfig": "get_evictable_size get_max_cache_size get_recent_size get_start_size to_string",
    "KVCrushConfig": "to_string",
    "SparseAttentionConfig": "to_string",
    "GenerationConfig": "is_assisting_generation is_beam_search is_greedy_decoding is_multinomial "
    "is_prompt_lookup is_tree_search set_eos_token_id update_generation_config validate",
    "ChatHistory": "append clear get_extra_context get_messages get_tools pop set_extra_context set_messages "
    "set_tools",
    "ContinuousBatchingPipeline": "add_request finish_chat generate get_config get_metrics get_tokenizer "
    "has_non_finished_requests start_chat step",
    "GenerationHandle": "can_read cancel get_perf_metrics get_status get_vlm_perf_metrics read read_all stop",
    "GenerationResult": "get_generation_ids",
    "PerfMetrics": "get_chat_template_duration get_detokenization_duration get_generate_duration "
    "get_grammar_compile_time get_grammar_compiler_init_times get_inference_duration get_ipot get_load_time "
    "get_num_generated_tokens get_num_input_tokens get_sampling_duration get_throughput "
    "get_tokenization_duration get_tpot get_ttft __add__",
    "StreamerBase": "end write",
    "TextStreamer": "end write",
}
OBJECTS = {  # attributes that hold objects
    "CacheEvictionConfig": {"adaptive_rkv_config": "AdaptiveRKVConfig", "kvcrush_config": "KVCrushConfig"},
    "SchedulerConfig": {
        "cache_eviction_config": "CacheEvictionConfig", "sparse_attention_config": "SparseAttentionConfig",
    },
    "GenerationResult": {"perf_metrics": "PerfMetrics"},
    "EncodedGenerationResult": {"perf_metrics": "PerfMetrics"},
}  # fmt: skip
ENUMERATIONS = {
    "AggregationMode": "SUM NORM_SUM ADAPTIVE_RKV",
    "SparseAttentionMode": "TRISHAPE XATTENTION",
    "KVCrushAnchorPointMode": "RANDOM ZEROS ONES MEAN ALTERNATING",
    "StopCriteria": "EARLY HEURISTIC NEVER",
    "GenerationStatus": "RUNNING FINISHED IGNORED CANCEL STOP",
    "GenerationFinishReason": "NONE STOP LENGTH TOOL_CALL",
    "StreamingStatus": "RUNNING STOP CANCEL TOOL_CALL_STOP",
}
ARGUMENTS = {  # in their order
    "CacheEvictionConfig": "start_size recent_size max_cache_size aggregation_mode apply_rotation "
    "snapkv_window_size kvcrush_config",
    "KVCrushConfig": "budget anchor_point_mode rng_seed",
    "AdaptiveRKVConfig": "attention_mass window_size",
    "SparseAttentionConfig": "mode num_last_dense_tokens_in_prefill num_retained_start_tokens_in_cache "
    "num_retained_recent_tokens_in_cache xattention_threshold xattention_block_size xattention_stride",
    "ContinuousBatchingPipeline": "models_path scheduler_config device properties",
    "ContinuousBatchingPipeline.add_request": "request_id prompt generation_config",
    "ContinuousBatchingPipeline.generate": "prompts generation_config streamer",
    "ContinuousBatchingPipeline.start_chat": "system_message",
    "GenerationHandle.stop": "finish_reason",
    "TextStreamer": "tokenizer callback",
    "ChatHistory": "messages",
}
COMPOUND = (
    "AnyText Concat ConstString EBNF JSONSchema QwenXMLParametersFormat Regex Tag TagsWithSeparator "
    "TriggeredTags Union"
)
RAW = (
    "chat_template_durations detokenization_durations generate_durations grammar_compile_times "
    "inference_durations m_batch_sizes m_durations m_new_token_times m_times_to_first_token "
    "sampling_durations token_infer_durations tokenization_durations"
)


@pytest.mark.parametrize(
    ("cls", "name", "default"),
    [(cls, name, default) for cls, names in DEFAULTS.items() for name, default in names.items()],
)
def test_an_attribute_has_its_default_and_can_be_set_to_it(cls, name, default):
    made = getattr(quire, cls)()
    assert getattr(made, name) == default
    if cls.endswith("Config") or name in ("m_generation_ids", "m_scores"):
        setattr(made, name, default)
        assert getattr(made, name) == default


@pytest.mark.parametrize(("cls", "name"), DEFAULTS_BY_NAME)
def test_a_choice_has_its_default(cls, name):
    made = getattr(quire, cls)()
    for part in name.split("."):
        made = getattr(made, part)
    assert made.name == DEFAULTS_BY_NAME[cls, name]


@pytest.mark.parametrize("cls", OBJECTS)
def test_an_attribute_holds_an_object(cls):
    made = getattr(quire, cls)()
    for name, kind in OBJECTS[cls].items():
        assert type(getattr(made, name)) is getattr(quire, kind)


@pytest.mark.parametrize("cls", METHODS)
def test_a_method_is_there(cls):
    for name in METHODS[cls].split():
        assert callable(getattr(getattr(quire, cls), name))


@pytest.mark.parametrize("cls", ENUMERATIONS)
def test_an_enumeration_has_its_members_in_order(cls):
    kind = getattr(quire, cls)
    names = ENUMERATIONS[cls].split()
    assert list(kind.__members__)[: len(names)] == names
    assert [kind[name].name for name in names] == names
    assert [int(kind[name]) for name in names] == list(range(len(names)))
    assert [kind(number).name for number in range(len(names))] == names
    with pytest.raises(ValueError, match=str(99)):
        kind(99)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_their_order(name):
    made = quire
    for part in name.split("."):
        made = getattr(made, part)
    found = [one for one in inspect.signature(made).parameters if one != "self"]
    assert found[: len(ARGUMENTS[name].split())] == ARGUMENTS[name].split()


def test_raw_metrics_have_their_names():
    assert all(getattr(RawPerfMetrics(), name) == [] for name in RAW.split())


REFUSED = {
    "adapters": "a", "assistant_confidence_threshold": 0.4, "branching_factor": 2, "parsers": ["a"],
    "pruning_ratio": 30, "relevance_weight": 0.7, "return_omni_outputs": True, "tree_depth": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name):
    config = quire.GenerationConfig()
    for change in (
        lambda: setattr(config, name, REFUSED[name]),
        lambda: config.update_generation_config(**{name: REFUSED[name]}),
        lambda: quire.GenerationConfig(**{name: REFUSED[name]}),
    ):
        with pytest.raises(ConfigError, match=f"{name} is .* does not support"):
            change()
    assert config == quire.GenerationConfig()


@pytest.mark.parametrize("name", ["structural_tags_config", "compound_grammar"])
def test_structures_of_several_grammars_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"StructuredOutputConfig.{name} is .* does not support"):
        quire.StructuredOutputConfig(**{name: "a"})


@pytest.mark.parametrize("name", COMPOUND.split())
def test_parts_of_compound_grammars_are_refused(name):
    with pytest.raises(ConfigError, match="compound grammars are not supported"):
        getattr(quire.StructuredOutputConfig, name)("a")


def test_no_repeat_ngrams_are_refused_when_used():
    for size in (0, UNSET):
        quire.GenerationConfig(no_repeat_ngram_size=size).validate()
    with pytest.raises(ConfigError, match="no_repeat_ngram_size is 3"):
        quire.GenerationConfig(no_repeat_ngram_size=3).validate()
