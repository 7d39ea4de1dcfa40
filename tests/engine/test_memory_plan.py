"""The memory plan, against numbers published for a model and against torch's own count."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig, SchedulerConfig, SpeculationConfig
from quire.engine.memory.byte_sizes import GB, format_bytes
from quire.engine.memory.plan import MemoryPlan, activation_bytes, plan_memory, plan_memory_again
from quire.errors import ConfigError
from quire.kv import PagedAttentionCache
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.config import ModelConfig
from quire.models.layer import LayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.experts import ExpertsConfig
from quire.models.reading import model_config
from quire.models.weights import count_parameters
from quire.pooling_params import PoolingParams
from subprocesses import python_output

# https://huggingface.co/Qwen/Qwen3-0.6B: 0.6B parameters, 0.44B without embeddings, 28 layers, 16 / 8 heads.
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_06B_PARAMETERS = 596_049_920
# Of the output layer: weights, and a row's scale, sum and two norms.
QWEN3_06B_INT8_COPY = 151_936 * (1024 + 4 * 4)
QWEN3_06B_WEIGHT_BYTES = QWEN3_06B_PARAMETERS * 2 + QWEN3_06B_INT8_COPY
QWEN3_06B_KV_BYTES_PER_TOKEN = 114_688  # 2 x 28 layers x 8 heads x 128 x 2 bytes


@pytest.fixture(scope="module")
def qwen_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3-0.6b")
    (directory / "config.json").write_text(json.dumps(QWEN3_06B))
    return directory


@pytest.fixture(scope="module")
def qwen(qwen_directory: Path) -> ModelConfig:
    return read_model_config(qwen_directory)


def plan(model: ModelConfig, *, gigabytes: float = 16, engine: dict | None = None, **scheduler) -> MemoryPlan:
    config = EngineConfig(**(engine or {}), scheduler=SchedulerConfig(**scheduler))
    return plan_memory(config, model, available_bytes=int(gigabytes * GB))


def test_parameters_are_those_published(qwen: ModelConfig):
    assert count_parameters(qwen) == QWEN3_06B_PARAMETERS


def test_parameters_are_those_torch_counts(qwen_directory: Path, qwen: ModelConfig):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(qwen_directory))
    assert count_parameters(qwen) == model.num_parameters()


def test_vectors_of_positions_are_counted(tmp_path: Path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, dtype="float32"))
    model.save_pretrained(tmp_path)
    gpt2 = read_model_config(tmp_path)
    assert count_parameters(gpt2) == model.num_parameters()
    assert plan(gpt2, num_kv_blocks=10).weight_bytes == model.num_parameters() * 4


def test_sizes_of_a_known_model(qwen: ModelConfig):
    result = plan(qwen, num_kv_blocks=1000)
    assert result.weight_bytes == QWEN3_06B_WEIGHT_BYTES
    assert result.kv_bytes_per_token == QWEN3_06B_KV_BYTES_PER_TOKEN
    assert result.kv_bytes_per_block == QWEN3_06B_KV_BYTES_PER_TOKEN * 16
    assert result.kv_bytes == QWEN3_06B_KV_BYTES_PER_TOKEN * 16_000
    assert result.total_bytes == result.weight_bytes + result.activation_bytes + result.kv_bytes


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({"logits_softcap": 30.0}, {}),
        ({"output_bias": True}, {}),
        ({}, {"kernels": "reference"}),
        ({}, {"quantization": "int8"}),
        ({"vocab_size": 16_000}, {}),
    ],
    ids=str,
)
def test_an_output_layer_that_has_no_copy(qwen: ModelConfig, changes: dict, engine: dict):
    model = dataclasses.replace(qwen, **changes)
    without = plan(model, engine=engine, num_kv_blocks=1000).weight_bytes
    assert without < 2 * count_parameters(model) + 1_000_000


def test_the_data_type_decides_the_sizes(qwen: ModelConfig):
    narrow = plan(qwen, num_kv_blocks=1000)
    wide = plan(qwen, engine={"dtype": "float32"}, num_kv_blocks=1000)
    assert narrow.dtype == "bfloat16"
    # The embedding, which is tied, is looked up in the file unless that has it in another type.
    second_embedding = 151_936 * 1024 * 4
    plain = [result.weight_bytes - QWEN3_06B_INT8_COPY for result in (narrow, wide)]
    assert plain[1] == plain[0] * 2 + second_embedding
    assert wide.kv_bytes == narrow.kv_bytes * 2


@pytest.mark.parametrize(("dtype", "head_bytes"), [("int8", 128 + 4), ("int4", 64 + 4)])
def test_the_cache_may_have_another_type_than_the_model(qwen: ModelConfig, dtype: str, head_bytes: int):
    result = plan(qwen, engine={"kv_cache_dtype": dtype}, num_kv_blocks=1000)
    assert (result.dtype, result.kv_dtype) == ("bfloat16", dtype)
    # Per layer and token, keys and values of 8 heads: numbers and a scale.
    assert result.kv_bytes_per_token == 2 * 28 * 8 * head_bytes
    wide = plan(qwen, engine={"kv_cache_dtype": "float32"}, num_kv_blocks=1000)
    assert wide.kv_bytes_per_token == 2 * QWEN3_06B_KV_BYTES_PER_TOKEN
    assert wide.weight_bytes == result.weight_bytes


@pytest.mark.parametrize(("dtype", "multiple", "head_dim"), [("int8", 4, 6), ("int4", 8, 12)])
def test_heads_that_a_type_cannot_hold_are_refused(
    qwen: ModelConfig, dtype: str, multiple: int, head_dim: int
):
    odd = qwen.changed(AttentionConfig, head_dim=head_dim)
    refusal = rf"EngineConfig\.kv_cache_dtype is '{dtype}'.*multiple of {multiple}.*model's is {head_dim}"
    with pytest.raises(ConfigError, match=refusal):
        plan(odd, engine={"kv_cache_dtype": dtype}, num_kv_blocks=1000)


def test_num_kv_blocks_wins_over_cache_size(qwen: ModelConfig):
    assert plan(qwen, num_kv_blocks=77, cache_size=4.0).num_blocks == 77


def test_cache_size_is_never_exceeded(qwen: ModelConfig):
    result = plan(qwen, cache_size=4.0)
    assert result.kv_bytes <= 4 * GB < result.kv_bytes + result.kv_bytes_per_block


def test_memory_fraction_shares_what_weights_and_activations_leave(qwen: ModelConfig):
    result = plan(qwen, engine={"memory_fraction": 0.25})
    left = 16 * GB - result.weight_bytes - result.activation_bytes
    assert result.kv_bytes <= left * 0.25 < result.kv_bytes + result.kv_bytes_per_block


def test_no_more_blocks_than_can_be_used(qwen: ModelConfig):
    result = plan(qwen, gigabytes=1000, engine={"max_model_len": 1000}, max_num_seqs=3)
    assert result.num_blocks == 3 * 63  # ceil(1000 / 16) = 63
    assert result.max_sequences_at(1000) == 3


def test_sequences_at_a_length_take_whole_blocks(qwen: ModelConfig):
    result = plan(qwen, num_kv_blocks=100, max_num_seqs=60)
    assert [result.max_sequences_at(length) for length in (1, 16, 17, 1600, 1601)] == [60, 60, 50, 1, 0]


def test_the_default_length_is_lowered_to_what_the_cache_holds(qwen: ModelConfig):
    assert plan(qwen, num_kv_blocks=100).max_model_len == 1600
    assert plan(qwen, num_kv_blocks=100).model_max_len == 40960
    assert plan(qwen, num_kv_blocks=4000).max_model_len == 40960


def test_with_cache_eviction_only_what_a_sequence_keeps_has_to_fit(qwen: ModelConfig):
    def length(num_kv_blocks: int) -> int:
        scheduler = SchedulerConfig(num_kv_blocks=num_kv_blocks, use_cache_eviction=True)
        return plan_memory(EngineConfig(scheduler=scheduler), qwen, available_bytes=8 * GB).max_model_len

    assert length(672 // 16 + 1) == qwen.max_model_len
    assert length(672 // 16) == 672


def test_the_default_length_is_lowered_until_its_activations_fit_too(qwen: ModelConfig):
    small = {"gigabytes": 2, "max_num_seqs": 8}
    result = plan(qwen, **small)
    longest = result.max_model_len
    assert longest > 1024
    assert result.max_sequences_at(longest) >= 1
    assert result.total_bytes <= 2 * GB
    assert result.activation_bytes < plan(qwen, max_num_seqs=8).activation_bytes
    assert plan(qwen, **small, engine={"max_model_len": longest}).max_model_len == longest
    with pytest.raises(ConfigError, match=rf"no sequence of more than {longest} .*memory_fraction"):
        plan(qwen, **small, engine={"max_model_len": longest + 1})


def test_activations_grow_with_the_step(qwen: ModelConfig):
    def activations(tokens: int, seqs: int) -> int:
        scheduler = SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs)
        return activation_bytes(scheduler, qwen, "bfloat16", max_model_len=4096)

    # 7,680 more tokens: residual stream, normed, added; queries twice, keys, values; gate, up, their product;
    # and the angles of their positions.
    kept = (3 * 1024 + 48 * 128 + 3 * 3072) * 2 + 128 * 4
    inside = 3072 * 4  # a row as a product takes it
    assert 7680 * kept <= activations(8192, 1) - activations(512, 1) <= 7680 * (kept + inside)
    assert activations(512, 512) > 512 * 151_936 * 4  # float32 logits, at the least


def test_native_attention_needs_little_beside_the_reference(qwen: ModelConfig):
    def activations(model: ModelConfig, **kernels: bool) -> int:
        scheduler = SchedulerConfig(max_num_seqs=8)
        return activation_bytes(scheduler, model, "bfloat16", max_model_len=40_960, **kernels)

    assert activations(qwen) < 200_000_000
    assert activations(qwen, is_native=False) > 1_000_000_000
    odd = qwen.changed(AttentionConfig, head_dim=120)  # left to the reference
    assert activations(odd) > 1_000_000_000


def test_experts_need_room_for_the_results_of_every_choice(qwen: ModelConfig):
    attention, dense = qwen.layers[0].parts
    experts = ExpertsConfig(num_experts=64, experts_per_token=8, inner_size=768)
    mixture = dataclasses.replace(qwen, layers=(LayerConfig((attention, dense, experts)),))
    sizes = [
        activation_bytes(
            SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=1), model, "bfloat16", max_model_len=512
        )
        for model in (qwen, mixture)
    ]
    assert sizes[1] - sizes[0] >= 8192 * 8 * 1024 * 4  # float32, for each token and chosen expert


def test_a_pooled_model_has_sums_in_place_of_logits_and_their_matrix(qwen: ModelConfig):
    untied = dataclasses.replace(qwen, tie_word_embeddings=False)
    pooled = dataclasses.replace(untied, pooling=PoolingParams(pooling_type="mean", normalize=True))
    generating, pooling = plan(untied), plan(pooled)
    matrix = qwen.vocab_size * qwen.hidden_size
    assert generating.num_parameters - pooling.num_parameters == matrix
    assert generating.weight_bytes - pooling.weight_bytes == 2 * matrix + QWEN3_06B_INT8_COPY
    small = dataclasses.replace(pooled, vocab_size=100)
    assert plan(small).activation_bytes == pooling.activation_bytes < generating.activation_bytes
    more = plan(pooled, max_num_seqs=plan(pooled).max_num_seqs + 1000)
    assert more.activation_bytes - pooling.activation_bytes >= 1000 * qwen.hidden_size * 8


def test_the_plan_names_what_the_weights_are_held_as(qwen: ModelConfig):
    plain, int8 = plan(qwen), plan(qwen, engine={"quantization": "int8"})
    assert (plain.quantization, plain.weight_type) == ("none", "bfloat16")
    assert (int8.quantization, int8.weight_type) == ("int8", "int8")
    assert int8.weight_bytes < 0.51 * plain.weight_bytes
    stored = dataclasses.replace(qwen, stored_quantization="int4", stored_group_size=32)
    assert plan(stored, engine={"quantization": "int8"}).weight_type == "int4"


def test_a_configured_length_that_does_not_fit_is_refused(qwen: ModelConfig):
    with pytest.raises(
        ConfigError, match=r"max_model_len is 2000.*no sequence of more than 1600 .*num_kv_blocks"
    ):
        plan(qwen, engine={"max_model_len": 2000}, num_kv_blocks=100)


def test_a_length_beyond_the_model_is_refused(qwen: ModelConfig):
    with pytest.raises(ConfigError, match=r"max_model_len is 50000; .* maximum of this model is 40960"):
        plan(qwen, engine={"max_model_len": 50_000})


def test_weights_that_do_not_fit_are_refused(qwen: ModelConfig):
    with pytest.raises(ConfigError, match=r"weights take 1\.35 GB as bfloat16, but only 1 GB"):
        plan(qwen, gigabytes=1)


def test_a_cache_that_does_not_fit_is_refused_with_the_largest_that_does(qwen: ModelConfig):
    largest = (2 * GB - QWEN3_06B_WEIGHT_BYTES) // (QWEN3_06B_KV_BYTES_PER_TOKEN * 16)
    with pytest.raises(ConfigError, match=rf"num_kv_blocks asks for .* {largest} blocks"):
        plan(qwen, gigabytes=2, num_kv_blocks=1000)
    assert plan(qwen, gigabytes=2, num_kv_blocks=largest).num_blocks == largest


def test_no_room_for_a_block_is_refused_with_the_knobs(qwen: ModelConfig):
    with pytest.raises(
        ConfigError, match=r"no KV block of 1\.84 MB fits.*raise EngineConfig\.memory_fraction"
    ):
        plan(qwen, gigabytes=1.36)
    with pytest.raises(ConfigError, match=r"raise SchedulerConfig\.cache_size"):
        plan(qwen, cache_size=0.001)


def test_the_engine_after_one_has_as_many_blocks_if_they_fit(qwen: ModelConfig, caplog):
    before = plan(qwen, gigabytes=16)
    with_less = {"available_bytes": int(15.5 * GB)}
    assert plan(qwen, gigabytes=15.5).num_blocks < before.num_blocks
    after = plan_memory_again(EngineConfig(), qwen, before.num_blocks, **with_less)
    assert (after.num_blocks, after.max_model_len) == (before.num_blocks, before.max_model_len)
    assert not caplog.text
    fewer = plan_memory_again(EngineConfig(), qwen, before.num_blocks, available_bytes=3 * GB)
    assert fewer == plan(qwen, gigabytes=3)
    assert "smaller than the previous engine's" in caplog.text


def test_a_given_size_is_that_of_each_engine(qwen: ModelConfig):
    config = EngineConfig(scheduler=SchedulerConfig(cache_size=1.0))
    assert plan_memory_again(config, qwen, 7, available_bytes=16 * GB) == plan(qwen, cache_size=1.0)
    assert plan_memory_again(EngineConfig(), qwen, 0, available_bytes=16 * GB) == plan(qwen)


def test_a_draft_model_takes_its_share(qwen: ModelConfig):
    small = dataclasses.replace(qwen, layers=qwen.layers[:7])
    config = EngineConfig(
        scheduler=SchedulerConfig(num_kv_blocks=1000, max_num_seqs=4),
        speculation=SpeculationConfig(speculative_method="draft-model", draft_model="small"),
    )
    alone = plan(qwen, num_kv_blocks=1000, max_num_seqs=4)
    both = plan_memory(config, qwen, draft_model=small, available_bytes=16 * GB)
    assert both.num_parameters == QWEN3_06B_PARAMETERS + count_parameters(small)
    assert both.weight_bytes == 2 * (both.num_parameters + QWEN3_06B_INT8_COPY)
    assert both.kv_bytes_per_token == QWEN3_06B_KV_BYTES_PER_TOKEN * 5 // 4  # 28 and 7 layers
    assert both.kv_bytes == both.kv_bytes_per_token * 16_000
    assert both.num_blocks == 1000
    assert both.activation_bytes >= alone.activation_bytes
    shared = dataclasses.replace(config, scheduler=SchedulerConfig(cache_size=4.0))
    num_blocks = plan_memory(shared, qwen, draft_model=small, available_bytes=16 * GB).num_blocks
    assert num_blocks == 4 * GB // both.kv_bytes_per_block


def test_the_places_of_drafts_need_logits_too(qwen: ModelConfig):
    scheduler = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=32)
    sizes = [
        activation_bytes(scheduler, qwen, "bfloat16", max_model_len=512, num_drafts=num_drafts)
        for num_drafts in (0, 64, 480, 1000)
    ]
    assert sizes[1] - sizes[0] > 0
    assert sizes[2] - sizes[1] >= (480 - 64) * 151_936 * 4 * 2  # logits, and those before penalties
    assert sizes[3] == sizes[2]  # a step has no more places than tokens


def test_planning_does_not_import_torch():
    code = (
        "import sys; from quire.engine.memory.plan import plan_memory; from quire.config import EngineConfig;"
        "from quire.models.checkpoints.hub import resolve_model;"
        "from quire.models.checkpoints.config_reading import read_model_config;"
        "plan_memory(EngineConfig(), read_model_config(resolve_model('mini')));"
        "print('torch' in sys.modules)"
    )
    assert python_output(code) == "False\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (999_600, "1 MB"), (16e9, "16 GB")],
)
def test_sizes_for_people(size: float, text: str):
    assert format_bytes(size) == text


def test_ranks_share_weights_and_cache(qwen: ModelConfig):
    alone = plan(qwen, cache_size=4)
    one_of_two = plan(qwen, cache_size=4, engine={"tensor_parallel_size": 2})
    assert one_of_two.num_ranks == 2
    assert one_of_two.available_bytes == alone.available_bytes // 2
    assert one_of_two.num_parameters == alone.num_parameters
    half = QWEN3_06B_PARAMETERS  # ranks have no copy of the output layer
    assert half <= one_of_two.weight_bytes < half * 1.01  # and norms
    assert one_of_two.kv_bytes_per_token == QWEN3_06B_KV_BYTES_PER_TOKEN / 2
    assert one_of_two.num_blocks == alone.num_blocks
    sized_by_memory = plan(qwen, engine={"tensor_parallel_size": 2}, gigabytes=4)
    assert sized_by_memory.total_bytes <= 2 * GB


def test_ranks_share_kv_heads_that_cannot_be_divided(qwen: ModelConfig):
    of_32 = plan(
        qwen.changed(AttentionConfig, num_kv_heads=2), engine={"tensor_parallel_size": 4}, num_kv_blocks=64
    )
    assert of_32.kv_bytes_per_token == QWEN3_06B_KV_BYTES_PER_TOKEN / 8  # one head of eight


def test_a_cache_too_large_for_the_ranks_is_refused_with_what_fits(qwen: ModelConfig):
    with pytest.raises(ConfigError, match=r"for each of the 2 ranks; the largest that fits is .*GB") as error:
        plan(qwen, engine={"tensor_parallel_size": 2}, cache_size=20)
    largest = float(str(error.value).rpartition("(")[2].split()[0])
    plan(qwen, engine={"tensor_parallel_size": 2}, cache_size=largest * 0.99)


def _gemma4(num_layers: int, period: int, **entries: Any) -> dict[str, Any]:
    types = ["sliding_attention"] * num_layers
    types[period - 1 :: period] = ["full_attention"] * (num_layers // period)
    values = {"vocab_size": 262144, "hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8}
    values |= {"max_position_embeddings": 131072, "num_hidden_layers": num_layers, "dtype": "bfloat16"}
    values |= {"sliding_window": 32}  # so that a small cache has several
    return {"architectures": ["Gemma4ForCausalLM"], "layer_types": types, **values, **entries}


# Shape; bytes of a token that stay, and those that windows give back, each of keys and values in 16 bits.
GEMMA4_KV = {
    "E2B": (
        _gemma4(35, 5, num_key_value_heads=1, num_kv_shared_layers=20),
        2 * 2 * 3 * 512,
        2 * 2 * 12 * 256,
    ),
    "E4B": (
        _gemma4(42, 6, num_key_value_heads=2, num_kv_shared_layers=18),
        2 * 2 * 4 * 2 * 512,
        2 * 2 * 20 * 2 * 256,
    ),
    "12B": (
        _gemma4(48, 6, num_key_value_heads=8, num_global_key_value_heads=1, attention_k_eq_v=True),
        2 * 2 * 8 * 512,
        2 * 2 * 40 * 8 * 256,
    ),
}


@pytest.mark.parametrize("name", list(GEMMA4_KV))
def test_layers_that_share_kv_keep_none(name: str) -> None:
    shape, kept, in_windows = GEMMA4_KV[name]
    scheduler = SchedulerConfig(num_kv_blocks=8, block_size=16, max_num_seqs=1, max_num_batched_tokens=64)
    config = EngineConfig(dtype="bfloat16", scheduler=scheduler)
    result = plan_memory(config, model_config(shape), available_bytes=1 << 40)
    assert [cache.bytes_per_block for cache in result.kv_caches] == [16 * kept, 16 * in_windows]
    assert result.kv_bytes_per_token == kept + in_windows
    caches = [PagedAttentionCache.init_cache(None, metadata) for metadata in result.kv_caches]
    assert sum(cache.tensor.nbytes for cache in caches) == result.kv_bytes
