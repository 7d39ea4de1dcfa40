"""Layers that differ in heads, sizes, window, rotation and KV, in one model, against plain torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from random_weights import PlainModel, write_weights

from lockstep_ranks import LockstepRanks
from paged_harness import PagedHarness, generate, random_prompts
from quire.config import EngineConfig, SchedulerConfig
from quire.engine.memory.eviction import refuse_model_beside_eviction
from quire.engine.memory.plan import plan_memory
from quire.errors import ConfigError, ModelError
from quire.kernels.reference import ReferenceKernels
from quire.kernels.triton.device import is_interpreted
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.config import ModelConfig, RopeConfig
from quire.models.layer import LayerConfig, SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig

FAST, SLOW = RopeConfig(rotary_dim=16), RopeConfig(theta=1e6, rotary_dim=12)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25}
ATTENTION = [
    AttentionConfig(**HEADS, rope=FAST),
    AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=32, rope=SLOW, window=9, scale=0.2),
    AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=48, qk_norm="head", scale=0.15),
    AttentionConfig(**HEADS, rope=FAST, window=7, kv_source=0, qk_norm="head"),
    AttentionConfig(**HEADS, rope=SLOW, kv_source=0),
    AttentionConfig(**HEADS, rope=FAST, qk_norm="head", value_norm="value"),
    AttentionConfig(num_heads=4, num_kv_heads=1, head_dim=32, rope=SLOW, qk_norm="head", value_norm="key"),
]
CHUNKED = AttentionConfig(**HEADS, rope=FAST, window=13, is_chunked=True)
LONGER_VALUES = AttentionConfig(**HEADS, value_dim=24, rope=SLOW)  # of a size that native kernels leave
SHORTER_VALUES = AttentionConfig(
    num_heads=4, num_kv_heads=2, head_dim=48, value_dim=32, rope=SLOW, window=9, scale=0.15
)


def model_of(*parts: SubLayerConfig) -> ModelConfig:
    layers = (
        LayerConfig((part, FeedForwardConfig(inner_size=64 + 32 * number)))
        for number, part in enumerate(parts)
    )
    return ModelConfig(
        architecture="LlamaForCausalLM",
        family="llama",
        vocab_size=96,
        hidden_size=64,
        layers=tuple(layers),
        max_model_len=256,
    )


@pytest.mark.parametrize(
    ("kernels", "attention"),
    [(kernels, [*ATTENTION, CHUNKED, LONGER_VALUES, SHORTER_VALUES]) for kernels in ("native", "reference")],
)
def test_the_tokens_and_logits_are_those_of_plain_torch(
    kernels: str, attention: list[AttentionConfig], tmp_path: Path
) -> None:
    config = model_of(*attention)
    plain = PlainModel(config, write_weights(config, tmp_path))
    decoder = load_decoder(tmp_path, config, options=WeightOptions(kernels=kernels))
    prompts = random_prompts([1, 45], vocab_size=config.vocab_size)
    whole = generate(decoder, prompts, num_new=6)
    chunked = generate(decoder, prompts, num_new=6, chunk=11, seed=1)
    for prompt, one, other in zip(prompts, whole, chunked, strict=True):
        expected = plain.logits(prompt + one.token_ids[:-1])[len(prompt) - 1 :]
        assert one.token_ids == expected.argmax(-1).tolist()
        torch.testing.assert_close(one.logits, expected, atol=2e-4, rtol=0)
        assert torch.equal(one.logits, other.logits)  # whatever the chunks


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_ranks_compute_the_same(kernels: str, tmp_path: Path) -> None:
    config = model_of(*ATTENTION)
    write_weights(config, tmp_path)
    options = WeightOptions(kernels=kernels)
    prompts = random_prompts([5, 40], vocab_size=config.vocab_size)
    expected = generate(load_decoder(tmp_path, config, options=options), prompts, num_new=4)
    ranks = LockstepRanks(2)
    decoders = ranks.load(tmp_path, config, options)
    for found in ranks.run(lambda each: generate(decoders[each.shard.rank], prompts, num_new=4)):
        for one, whole in zip(found, expected, strict=True):
            assert one.token_ids == whole.token_ids
            torch.testing.assert_close(one.logits, whole.logits, atol=2e-4, rtol=0)


def test_the_cache_has_what_each_layer_keeps() -> None:
    config = model_of(*ATTENTION)
    plan = plan_memory(
        EngineConfig(scheduler=SchedulerConfig(num_kv_blocks=8, max_num_seqs=1, block_size=16)),
        config,
        available_bytes=1 << 33,
    )
    assert plan.kv_bytes_per_token == 2 * 4 * (
        2 * 16 + 2 * 32 + 2 * 48 + 2 * 16 + 32
    )  # none of the layers that share


@pytest.mark.parametrize(
    ("lacking", "part", "message"),
    [
        ("takes_any_value_size", LONGER_VALUES, "layer 0 has keys of 16 and values of 24 features"),
        ("takes_chunks", CHUNKED, "layer 0 has attention in chunks of 13 tokens"),
    ],
)
def test_what_kernels_do_not_compute_is_refused_by_name(
    lacking: str, part: AttentionConfig, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceKernels, lacking, False)
    config = model_of(part)
    write_weights(config, tmp_path)
    with pytest.raises(ModelError, match=rf"{message}.*reference kernels.*'native' and"):
        load_decoder(tmp_path, config, options=WeightOptions(kernels="reference"))


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (1, {}, "reads the KV of layer 1; it must be of an earlier one"),
        (
            0,
            {"num_kv_heads": 1},
            r"reads the KV of layer 0, which has .*num_kv_heads=2.* needs .*num_kv_heads=1",
        ),
    ],
)
def test_kv_that_a_layer_cannot_read_is_refused(
    source: int, changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    config = model_of(ATTENTION[0], dataclasses.replace(ATTENTION[4], kv_source=source, **changes))
    write_weights(config, tmp_path)
    with pytest.raises(ModelError, match=message):
        load_decoder(tmp_path, config)


@pytest.mark.parametrize("window", [0, 10])
def test_kv_of_a_shorter_window_is_refused(window: int, tmp_path: Path) -> None:
    layers = [dataclasses.replace(ATTENTION[4], kv_source=None, window=9)]
    layers += [dataclasses.replace(ATTENTION[4], window=each) for each in (9, window)]
    config = model_of(*layers)
    write_weights(config, tmp_path)
    with pytest.raises(ModelError, match=r"layer 2 sees .* which is kept for the last 9 tokens only"):
        load_decoder(tmp_path, config)


def test_layers_without_kv_are_refused_beside_eviction() -> None:
    with pytest.raises(ConfigError, match="2 layers of LlamaForCausalLM keep no KV of their own"):
        refuse_model_beside_eviction(SchedulerConfig(use_cache_eviction=True), model_of(*ATTENTION))


@pytest.mark.interpreter
@pytest.mark.skipif(not is_interpreted, reason="the harness has its cache in the host's memory")
def test_kernels_in_triton_compute_the_same(tmp_path: Path) -> None:
    config = model_of(ATTENTION[0], ATTENTION[1], ATTENTION[3], *ATTENTION[5:])
    plain = PlainModel(config, write_weights(config, tmp_path))
    decoder = load_decoder(tmp_path, config, options=WeightOptions(kernels="triton"))
    [prompt] = random_prompts([10], vocab_size=config.vocab_size)
    logits = decoder.logits(PagedHarness(decoder, [10]).step([0], [0], [prompt]))
    torch.testing.assert_close(logits, plain.logits(prompt), atol=2e-4, rtol=0)
