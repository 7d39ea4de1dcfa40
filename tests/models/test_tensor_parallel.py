"""Ranks that each hold a shard compute what one does that holds the whole model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import FAMILIES, make_checkpoint
from lockstep_ranks import LockstepRanks
from paged_harness import Generated, generate, random_prompts
from quire.errors import ConfigError
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.checkpoints.weight_cache import WeightCache
from quire.models.config import ModelConfig
from quire.models.layer import LayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.delta_net import DeltaNetConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.mamba import MambaConfig
from quire.models.layers.shared_block import SharedBlockConfig
from quire.models.parallel import row_sums
from quire.models.shard import Shard, check_divisible
from quire.models.weights import count_parameters, weight_bytes, weight_specs

NUM_NEW = 16
PROMPT_LENGTHS = [1, 5, 40]
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}

# (name, family, ranks, overrides of the config): each family, and what its usual shape does not show.
VARIANTS: list[tuple[str, str, int, dict[str, Any]]] = [
    *((name, name, 2, {}) for name in FAMILIES if name != "smollm2"),
    ("smollm2-3", "smollm2", 3, {"vocab_size": 385}),
    ("llama-4", "llama", 4, {}),
    ("llama-3.1-biases-3", "llama-3.1", 3, {"num_attention_heads": 6, "hidden_size": 96}),
    ("qwen2-uneven", "qwen2", 2, {"intermediate_size": 113, "vocab_size": 383}),
    ("llama-groups-cut", "llama", 2, SIX_HEADS),
    ("olmo2-shared-kv-heads", "olmo2", 4, {}),
    ("olmo2-groups-cut", "olmo2", 2, SIX_HEADS),
    ("mixtral-4", "mixtral", 4, {"num_key_value_heads": 4}),
    ("phi3-shared-kv-heads", "phi3", 4, {}),
    ("bamba-group-cut", "bamba", 4, {}),
    ("nemotron-groups-cut", "nemotron_h", 3, {"num_attention_heads": 6, "num_key_value_heads": 3}),
    ("qwen3_next-groups-cut", "qwen3_next", 3, {"num_attention_heads": 6, "num_key_value_heads": 3}),
]


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("family", "size", "overrides"), [v[1:] for v in VARIANTS], ids=[v[0] for v in VARIANTS]
)
def test_every_rank_count_gives_the_same_greedy_tokens(
    family: str, size: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, **overrides)
    config = read_model_config(path)
    prompts = random_prompts(PROMPT_LENGTHS, vocab_size=config.vocab_size)
    expected = generate(load_decoder(path, config), prompts, num_new=NUM_NEW)
    ranks = LockstepRanks(size)
    decoders = ranks.load(path, config)
    by_rank = ranks.run(lambda parallel: generate(decoders[parallel.shard.rank], prompts, num_new=NUM_NEW))
    atol = 3e-3 if family == "zamba2" else 1e-4  # see tests/models/test_families.py
    for one, whole in zip(by_rank[0], expected, strict=True):
        assert one.token_ids == whole.token_ids
        torch.testing.assert_close(one.logits, whole.logits, atol=atol, rtol=0)
    assert all(_equal(other, by_rank[0]) for other in by_rank[1:])


def test_ranks_share_a_tied_matrix_that_is_stored_as_the_output_layer(tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path)
    prompts = random_prompts(PROMPT_LENGTHS, vocab_size=read_model_config(path).vocab_size)
    expected = generate(load_decoder(path, read_model_config(path)), prompts, num_new=NUM_NEW)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, path / "model.safetensors")
    ranks = LockstepRanks(2)
    decoders = ranks.load(path, read_model_config(path))
    for found in ranks.run(
        lambda parallel: generate(decoders[parallel.shard.rank], prompts, num_new=NUM_NEW)
    ):
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize("width", [0, 1, 2, 3, 7, 64, 100, 4096])
def test_every_number_of_a_row_is_added_once(width: int) -> None:
    values = torch.randint(-1000, 1000, (5, width)).float()  # whose sums are exact
    assert row_sums(values).equal(values.sum(1))


def _equal(some: list[Generated], others: list[Generated]) -> bool:
    return all(torch.equal(one.logits, other.logits) for one, other in zip(some, others, strict=True))


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("family", "size", "dtype"),
    [
        ("llama", 4, "bfloat16"),
        ("olmo2", 2, "bfloat16"),
        ("olmo2", 2, "float32"),
        ("qwen3_moe", 4, "float32"),
        ("bamba", 4, "bfloat16"),
        ("kimi_linear", 2, "float32"),
    ],
)
def test_bits_do_not_depend_on_company_or_chunks(family: str, size: int, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, dtype=dtype)
    config = read_model_config(path)
    ranks = LockstepRanks(size)
    decoders = ranks.load(path, config)
    prompts = random_prompts([3, 37, 20, 9], vocab_size=config.vocab_size)

    def run(some: list[list[int]], **how: int) -> list[Generated]:
        return ranks.run(lambda each: generate(decoders[each.shard.rank], some, num_new=8, **how))[0]

    together = run(prompts)
    assert _equal(run(prompts, chunk=7, seed=1), together)
    for prompt, expected in zip(prompts, together, strict=True):
        assert _equal(run([prompt]), [expected])


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_while_loading(kernels: str, quantization: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)
    config = read_model_config(path)
    options = WeightOptions(quantization=quantization, group_size=32, kernels=kernels)
    prompts = random_prompts([30], vocab_size=config.vocab_size)
    [expected] = generate(load_decoder(path, config, options=options), prompts, num_new=1)
    ranks = LockstepRanks(2)
    decoders = ranks.load(path, config, options)
    [one], _ = ranks.run(lambda each: generate(decoders[each.shard.rank], prompts, num_new=1))
    # A token's activations, and in int8 a row's weights, have the scale of what a rank has of them.
    error = (one.logits - expected.logits).square().mean().sqrt() / expected.logits.square().mean().sqrt()
    assert error < 0.05


def test_packed_weights_of_each_rank_are_cached_apart(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    config = read_model_config(path)
    cache = WeightCache(tmp_path / "cache", 10**9)
    options = WeightOptions(quantization="int8", kernels="native", cache=cache)
    rows = torch.randn(5, config.hidden_size)
    [[packed, *_], [cached, *others]] = (
        [decoder.layers[0][0].qkv(rows) for decoder in LockstepRanks(2).load(path, config, options)]
        for _ in range(2)
    )
    assert torch.equal(packed, cached)
    assert not torch.equal(cached, others[0])
    load_decoder(path, config, options=options)
    assert len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(12, 12), (12, 6), (12, 4), (12, 3), (12, 2), (12, 1)]
)
def test_every_query_head_meets_its_kv_head(num_heads: int, num_kv_heads: int, size: int) -> None:
    attention = AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads)
    shards = [Shard(rank, size) for rank in range(size)]
    pairs = []
    for shard in shards:
        local = attention.on_rank(shard)
        held = shard.kv_heads(num_heads, num_kv_heads)
        assert local.num_kv_heads == len(held) <= num_kv_heads
        group = local.num_heads // local.num_kv_heads
        pairs += [(head, held[i // group]) for i, head in enumerate(shard.query_heads(num_heads))]
    assert pairs == [(head, head * num_kv_heads // num_heads) for head in range(num_heads)]
    counts = num_heads, num_kv_heads
    counted = [shard.kv_heads(*counts)[i] for shard in shards for i in shard.counted_kv_heads(*counts)]
    assert sorted(counted) == list(range(num_kv_heads))
    if num_kv_heads % size == 0:
        assert sum(len(shard.kv_heads(*counts)) for shard in shards) == num_kv_heads


@pytest.mark.parametrize("count", [1, 5, 113, 128, 256, 384, 4864, 11008, 151936])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_runs_that_together_are_all(count: int, size: int) -> None:
    shares = [Shard(rank, size).share(count) for rank in range(size)]
    assert [number for share in shares for number in share] == list(range(count))
    if count % 128 == 0 and count >= 128 * size:
        assert all(share.start % 128 == 0 for share in shares)
        assert max(map(len, shares)) - min(map(len, shares)) <= 128


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_rank_holds_its_share_of_the_weights(family: str, tmp_path: Path) -> None:
    config = read_model_config(
        make_checkpoint(family, tmp_path, num_attention_heads=4, max_position_embeddings=64)
    )
    whole = weight_bytes(config, "float32", "none", 128)
    parts = [weight_bytes(config, "float32", "none", 128, shard=Shard(rank, 2)) for rank in range(2)]
    held_by_all = sum(
        math.prod(source.shape) * 4
        for spec in weight_specs(config, Shard(1, 2))
        for source in spec.sources
        if source.ranges is None
    )
    vectors_of_layers = config.per_layer_vocab_size * config.per_layer_size * config.num_layers
    assert whole == 4 * (count_parameters(config) - vectors_of_layers)  # which stay in the file
    assert whole <= sum(parts) <= whole + held_by_all + 4 * _num_shared(config)
    made = 3 * config.per_layer_size * config.hidden_size * config.num_layers  # by matrices to and from them
    made += sum(
        config.hidden_size**2 + part.adapter_rank * (3 * part.attention.input_size + config.hidden_size)
        for part in config.parts
        if isinstance(part, SharedBlockConfig)
    )
    assert held_by_all < whole / 20 + 4 * (vectors_of_layers + made)


def _num_shared(config: ModelConfig) -> int:
    """Return the weights that the second rank has, too: of keys and values, and of latents."""

    def rows(num_heads: int, num_kv_heads: int, size: int) -> int:
        held = sum(len(Shard(rank, 2).kv_heads(num_heads, num_kv_heads)) for rank in range(2))
        return 2 * (held - num_kv_heads) * size

    total = 0
    for part in config.parts:
        if isinstance(part, MambaConfig):
            shared = rows(part.num_heads, part.num_groups, part.state_size)
            total += shared * (config.hidden_size + 1 + part.num_taps + 1)
        elif isinstance(part, DeltaNetConfig):
            total += 2 * part.gate_rank * config.hidden_size
        elif isinstance(part, AttentionConfig) and part.kv is not None:
            total += rows(part.num_heads, part.num_kv_heads, part.head_dim) * (config.hidden_size + 1)
    return total


def test_a_rank_reads_only_its_rows_and_columns(tmp_path: Path) -> None:
    """What other ranks hold may be anything: here not a number."""
    path = make_checkpoint("llama-3.1", tmp_path)
    config = read_model_config(path)
    ranks = LockstepRanks(2)
    expected = ranks.load(path, config)
    for rank in range(2):
        poisoned = _poison_all_but(path, config, Shard(rank, 2), tmp_path / f"rank{rank}")
        decoder = load_decoder(poisoned, config, parallel=ranks.parallel[rank])
        rows = torch.randn(5, config.hidden_size)
        for one, other in zip(decoder.layers, expected[rank].layers, strict=True):
            assert torch.equal(one[0].qkv(rows), other[0].qkv(rows))
        ids = torch.arange(len(decoder.embedding))
        assert torch.equal(decoder.embedding(ids), expected[rank].embedding(ids))
        assert decoder.embedding(ids).isfinite().all()


def _poison_all_but(path: Path, config: ModelConfig, shard: Shard, target: Path) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for spec in weight_specs(config, shard):
        for source in spec.sources:
            if source.ranges is not None:
                rows = tensors[source.name].movedim(source.axis, 0)
                held = torch.tensor([number for part in source.ranges for number in part])
                kept = rows[held].clone()
                rows.fill_(float("nan"))
                rows[held] = kept
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((path / "config.json").read_text())
    return target


def test_heads_that_cannot_be_divided_are_refused() -> None:
    parts = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=8), FeedForwardConfig(inner_size=64)
    config = ModelConfig(hidden_size=64, layers=(LayerConfig(parts),), vocab_size=64)
    check_divisible(config, 3)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size is 4.* 6 query heads.* set it to 1, 2, 3, 6"
    ):
        check_divisible(config, 4)
