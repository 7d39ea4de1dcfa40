"""Latent attention: the latents that are kept, and the same tokens however they are scheduled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, make_model, save_checkpoint
from insides import always_load, connector_of, wait_until_written
from paged_harness import generate, random_prompts
from quire.config import (
    CacheEvictionConfig,
    EngineConfig,
    KVTierConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from quire.engine.core import EngineCore
from quire.engine.memory.eviction import refuse_model_beside_eviction
from quire.engine.memory.plan import plan_memory
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError, ModelError
from quire.execution.drafts import adaptive_proposer
from quire.kernels.triton.attention import items, layer
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.checkpoints.weight_cache import WeightCache
from quire.models.reading import model_config
from quire.models.shard import check_kv_divisible
from quire.sampling_params import SamplingParams

FAMILY = "deepseek_v3"
ODD = {
    "q_lora_rank": None,
    "kv_lora_rank": 19,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 9,
    "v_head_dim": 17,
    "hidden_size": 70,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}
MAX_TOKENS = 10
LENGTHS = 61, 5, 38


@pytest.mark.parametrize(
    ("family", "shape"),
    [("deepseek_v3", {}), ("deepseek_v2", {"v_head_dim": 33}), ("glm4_moe_lite", {}), ("minicpm3", ODD)],
    ids=["v3", "v2", "glm", "odd"],
)
def test_bits_are_the_same_in_chunks_of_every_size(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(family, **shape)
    path = save_checkpoint(model, tmp_path)
    decoder = load_decoder(path, read_model_config(path))
    prompts = random_prompts([23, 9], vocab_size=decoder.config.vocab_size)
    whole = generate(decoder, prompts, num_new=4)
    for prompt, one in zip(prompts, whole, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + one.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        assert one.token_ids == logits.argmax(-1).tolist()
    for chunk in range(1, 23):
        chunked = generate(decoder, prompts, num_new=4, chunk=chunk, seed=chunk)
        for one, other in zip(chunked, whole, strict=True):
            assert torch.equal(one.logits, other.logits), chunk


@pytest.mark.interpreter
@pytest.mark.parametrize(("family", "shape"), [("deepseek_v2", {}), ("minicpm3", ODD)], ids=["v2", "odd"])
def test_logits_on_the_kernels_of_a_gpu(
    family: str, shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With latents of two tiles, which have room for two heads."""
    monkeypatch.setattr(items, "WHOLE_FEATURES", 16)
    monkeypatch.setattr(layer, "LATENT_HEADS", 2)
    model = make_model(family, **shape)
    path = save_checkpoint(model, tmp_path)
    decoder = load_decoder(path, read_model_config(path), options=WeightOptions(kernels="triton"))
    prompts = random_prompts([13, 3], vocab_size=decoder.config.vocab_size)
    whole = generate(decoder, prompts, num_new=2)
    for prompt, one in zip(prompts, whole, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + one.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(one.logits, logits, atol=1e-4, rtol=0)
    for chunk in (1, 5):
        chunked = generate(decoder, prompts, num_new=2, chunk=chunk, seed=chunk)
        for one, other in zip(chunked, whole, strict=True):
            torch.testing.assert_close(one.logits, other.logits, atol=1e-5, rtol=0)


# -- the cache ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(FAMILY, tmp_path_factory.mktemp("latent"))


def config_of(path: Path, **options: Any) -> EngineConfig:
    """Return a configuration; options are its own and its scheduler's."""
    scheduler = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "block_size": 8, "num_kv_blocks": 64}
    fields = SchedulerConfig.__dataclass_fields__.keys()
    scheduler |= {name: value for name, value in options.items() if name in fields}
    own = {name: value for name, value in options.items() if name not in fields}
    return EngineConfig(model=str(path), scheduler=SchedulerConfig(**scheduler), **own)


@pytest.mark.parametrize(("dtype", "of_layer"), [("auto", 4 * 32), ("int8", 32 + 4)], ids=["float32", "int8"])
def test_a_token_keeps_its_latent_and_the_rotated_part_of_its_key(
    dtype: str, of_layer: int, path: Path
) -> None:
    config = config_of(path, kv_cache_dtype=dtype)
    assert plan_memory(config, read_model_config(path)).kv_bytes_per_token == 2 * of_layer
    core = EngineCore(config, path)
    [cache] = core.runner.kv_caches
    assert cache.nbytes == 2 * of_layer * 8 * cache.num_blocks
    assert all(view.value_pages is view.key_pages for view in cache.views)


@pytest.mark.parametrize(
    ("architecture", "entries", "num_layers", "num_bytes"),
    [
        ("DeepseekV2ForCausalLM", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 27, 31_104),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 61, 70_272),
        ("MiniCPM3ForCausalLM", {"kv_lora_rank": 256, "qk_rope_head_dim": 32}, 62, 35_712),
    ],
    ids=["DeepSeek-V2-Lite", "DeepSeek-V3", "MiniCPM3-4B"],
)
def test_published_models_keep_as_many_bytes_as_their_papers_say(
    architecture: str, entries: dict[str, int], num_layers: int, num_bytes: int
) -> None:
    """In bfloat16: 2 bytes of each feature of the latent and the rotated part, in each layer."""
    config = {
        "architectures": [architecture],
        "dtype": "bfloat16",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 4096,
        **entries,
    }
    plan = plan_memory(config_of(Path("model")), model_config(config), available_bytes=1 << 36)
    assert plan.kv_bytes_per_token == num_bytes


# -- engines -----------------------------------------------------------------------------------------------


def answers(core: EngineCore, prompts: list[list[int]], prefix: str) -> list[list[int]]:
    """Return the greedy answers to prompts that run together."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    found: dict[str, list[int]] = {f"{prefix}{number}": [] for number in range(len(prompts))}
    for name, prompt in zip(found, prompts, strict=True):
        core.add(EngineCoreRequest([name], [1], prompt, params))
    while core.has_unfinished_requests():
        for output in core.step()[0]:
            found[output.request_id] += output.new_token_ids
        core.scheduler.check_invariants()
    return list(found.values())


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    decoder = load_decoder(path, read_model_config(path))
    return [one.token_ids for one in generate(decoder, prompts(), num_new=MAX_TOKENS)]


def prompts() -> list[list[int]]:
    first, second, third = random_prompts(list(LENGTHS), vocab_size=90)
    return [first * 2, second, third]  # the first repeats itself, as drafts need it


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernels": "reference"},
        {"overlap_steps": True},
        {"num_kv_blocks": 18, "watermark": 0.0, "reserve_full_prompt": False},
        {"speculation": SpeculationConfig(speculative_method="ngram", ngram_min=1)},
        {"kv_tiering": KVTierConfig(kv_tier="memory", kv_tier_size=0.1, kv_tier_min_uses=1)},
    ],
    ids=["plain", "reference", "overlapped", "preempted", "drafts", "tier"],
)
def test_answers_are_the_same_twice_in_a_row(
    options: dict[str, Any], path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drafts whatever steps take: how many are worth their time is asked elsewhere.
    monkeypatch.setattr(adaptive_proposer, "AdaptiveProposer", lambda proposer, *_, **__: proposer)
    core = EngineCore(config_of(path, **options), path)
    if "kv_tiering" in options:
        always_load(connector_of(core))
    assert answers(core, prompts(), "a") == expected
    if "kv_tiering" in options:
        wait_until_written(core)
        assert core.scheduler.reset_prefix_cache()
    assert answers(core, prompts(), "b") == expected
    stats = core.scheduler.make_stats()
    assert (stats.num_loaded_tokens if "kv_tiering" in options else stats.prefix_hit_tokens) > 40
    assert bool(stats.num_preemptions) == ("num_kv_blocks" in options)
    assert bool(stats.num_draft_tokens) == ("speculation" in options)


def test_answers_do_not_depend_on_company_with_a_quantized_cache(path: Path) -> None:
    alone = EngineCore(config_of(path, enable_prefix_caching=False, kv_cache_dtype="int8"), path)
    expected = [answers(alone, [prompt], str(number))[0] for number, prompt in enumerate(prompts())]
    core = EngineCore(config_of(path, max_num_batched_tokens=13, kv_cache_dtype="int8"), path)
    assert answers(core, prompts(), "a") == expected
    assert answers(core, prompts(), "b") == expected


def test_cache_eviction_keeps_to_its_size(path: Path) -> None:
    sizes = CacheEvictionConfig(start_size=8, recent_size=16, max_cache_size=40)
    core = EngineCore(config_of(path, use_cache_eviction=True, cache_eviction_config=sizes), path)
    first = answers(core, prompts(), "a")
    assert core.scheduler.make_stats().num_evicted_blocks
    other = config_of(path, use_cache_eviction=True, cache_eviction_config=sizes, max_num_batched_tokens=11)
    assert answers(EngineCore(other, path), prompts(), "a") == first


# -- what is refused ---------------------------------------------------------------------------------------


def test_rotating_keys_back_after_evictions_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("minicpm3", tmp_path)
    sizes = CacheEvictionConfig(start_size=8, recent_size=16, max_cache_size=40, apply_rotation=True)
    with pytest.raises(ConfigError, match="rotates only 8 of the 32 features of a head"):
        refuse_model_beside_eviction(
            SchedulerConfig(use_cache_eviction=True, cache_eviction_config=sizes), read_model_config(path)
        )


def test_ranks_that_share_kv_with_other_engines_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="does not divide the 1 KV heads"):
        check_kv_divisible(read_model_config(path), 2)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads 2; it must be 4"),
        (
            {"num_hidden_layers": 4096, "num_attention_heads": 128, "num_key_value_heads": 128},
            "exceed the limit",
        ),
        ({"attention_bias": True}, "attention_bias True; it must be False"),
    ],
)
def test_configs_that_latent_attention_has_not_are_refused(
    entries: dict[str, Any], message: str, path: Path, tmp_path: Path
) -> None:
    make_checkpoint(FAMILY, tmp_path)
    changed = tmp_path / "config.json"
    values = json.loads(changed.read_text())
    changed.write_text(json.dumps(values | entries))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_weights_come_out_of_the_cache_of_packed_weights(path: Path, tmp_path: Path) -> None:
    config = read_model_config(path)
    options = WeightOptions(quantization="int8", kernels="native", cache=WeightCache(tmp_path, 10**9))
    packed, cached = (
        generate(load_decoder(path, config, options=options), prompts()[1:], num_new=2) for _ in range(2)
    )
    for one, other in zip(packed, cached, strict=True):
        assert torch.equal(one.logits, other.logits)


def test_layers_that_predict_further_tokens_are_passed_over(path: Path, tmp_path: Path) -> None:
    make_checkpoint(FAMILY, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for extra in ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight"):
        save_file({**weights, extra: torch.zeros(3, 5)}, tmp_path / "model.safetensors")
        load_decoder(tmp_path, read_model_config(tmp_path))
    save_file({**weights, "model.layers.3.mlp.gate.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds model.layers.3.mlp.gate.weight"):
        load_decoder(tmp_path, read_model_config(tmp_path))
