"""GGUF files: every kind of tensor, every architecture, and what is said about files that do not fit."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_checkpoints import WITH_MINIMA, places_of_halves, write_gguf
from safetensors.torch import load_file, save_file

from checkpoints import FAMILIES as SHAPES
from checkpoints import make_checkpoint
from paged_harness import generate, random_prompts
from quire.errors import ModelError, ModelNotFoundError
from quire.kernels.cpu.linear import BLOCK_KINDS, PackedMatrix
from quire.kernels.layers.weights import BlockWeight, dequantize, in_features, num_rows, part_of
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.gguf.blocks import KINDS, Kind
from quire.models.checkpoints.gguf.config import read_gguf_config
from quire.models.checkpoints.gguf.file import GGUFFile
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.gguf.weights import GGUFWeights
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.layers.attention import attention_of
from quire.models.shard import Shard
from quire.models.weights import count_parameters, weight_bytes, weight_specs
from subprocesses import python_output

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
# Files have one factor for what a config.json has two for.
ONE_MSCALE = {"rope_parameters": SHAPES["deepseek_v3"][1]["rope_parameters"] | {"mscale": 1.2}}
VECTORS = {"hidden_size_per_layer_input": 64, "num_key_value_heads": 4}
QWEN3_NEXT = {
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in (*["linear"] * 3, "full", "linear")],
    "mlp_only_layers": [],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": 16},
    "llama-3.1": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {
        "query_pre_attn_scalar": 24,
        "num_hidden_layers": 7,
        "layer_types": [f"{kind}_attention" for kind in (*["sliding"] * 5, "full", "sliding")],
    },
    "phi3": {},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "granitemoehybrid": {},
    "granitemoehybrid-dense": {
        "num_local_experts": 0,
        "shared_intermediate_size": 112,
        "position_embedding_type": "rope",
        "mamba_n_groups": 1,
    },
    "mixtral": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen2_moe": {"mlp_only_layers": []},
    "glm4": {},
    "ernie4_5": {},
    "ministral3": {  # a beta that float32 holds exactly
        "rope_parameters": SHAPES["ministral3"][1]["rope_parameters"] | {"llama_4_scaling_beta": 0.125}
    },
    "lfm2": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0},  # not said by a file
    "gpt_oss": {},
    "deepseek_v2": ONE_MSCALE,
    "deepseek_v3": ONE_MSCALE,
    "glm4_moe_lite": {},
    "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "gemma4": {},
    "gemma4_unified": {},
    "gemma4-experts": {},
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    "falcon_h1": {},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        "n_group": 1,
        "topk_group": 1,
        "moe_latent_size": 20,
    },
    "nemotron_h-dense": {
        "layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp", "linear_attention"],
        "use_bias": True,
        "use_conv_bias": False,
        "mlp_bias": True,
    },
    "kimi_linear": {"linear_num_heads": 4},
    "llama4": {  # what a file does not say
        "interleave_moe_layer_step": 2,
        "no_rope_layers": None,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "mimo_v2_flash": {"attention_value_scale": 0.75},
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next-fused": QWEN3_NEXT,  # as files of 2025 are
    "qwen3_5": {
        "num_hidden_layers": 5,
        "layer_types": [f"{kind}_attention" for kind in (*["linear"] * 3, "full", "linear")],
        "linear_num_value_heads": 6,
    },
    "qwen3_5_moe": {
        "num_hidden_layers": 5,
        "layer_types": [f"{kind}_attention" for kind in (*["linear"] * 3, "full", "linear")],
    },
}


def _generate(path: Path, **options: Any) -> tuple[list[int], torch.Tensor]:
    config = read_model_config(path)
    decoder = load_decoder(
        path, config, options=WeightOptions(**{"dtype": "float32", "kernels": "reference"} | options)
    )
    (generated,) = generate(decoder, random_prompts([40], vocab_size=config.vocab_size), num_new=8)
    return generated.token_ids, generated.logits


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_computes_what_its_checkpoint_does(family: str, tmp_path: Path) -> None:
    shape = family.removesuffix("-dense").removesuffix("-fused")
    path = make_checkpoint(shape, tmp_path / "model", **FAMILIES[family])
    file, twin = write_gguf(path, family, "F32")
    wanted = read_model_config(twin)
    found = read_model_config(file)
    assert count_parameters(found) == count_parameters(wanted)
    assert found.norm_eps == pytest.approx(wanted.norm_eps)
    if family != "llama-3.1":  # a file holds the factors themselves, not what they follow from
        assert found.ropes == wanted.ropes
    (tokens, logits), (same_tokens, same_logits) = _generate(file), _generate(twin)
    assert tokens == same_tokens
    torch.testing.assert_close(logits, same_logits, atol=1e-4, rtol=0)


LATENT = {
    "hidden_size": 64, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "moe_intermediate_size": 64, "intermediate_size": 128, **ONE_MSCALE,
}  # fmt: skip


@pytest.mark.parametrize("has_halves", [True, False], ids=["halves", "whole"])
def test_what_makes_keys_and_values_of_latents_in_any_form(has_halves: bool, tmp_path: Path) -> None:
    """Since April 2025, files have it apart and by heads, and sizes of heads under other keys."""
    path = make_checkpoint("deepseek_v3", tmp_path / "model", **LATENT)
    file, twin = write_gguf(path, "deepseek_v3", "Q8_0", has_halves=has_halves)
    wanted = load_file(twin / "model.safetensors")
    config = read_model_config(file)
    assert config.kv_specs == read_model_config(twin).kv_specs
    sources = [source for spec in weight_specs(config) if spec.field == "kv_b" for source in spec.sources]
    assert len(sources) == config.num_layers
    with Checkpoint(file) as checkpoint:
        for source in sources:
            assert torch.equal(dequantize(checkpoint.weight(source)), wanted[source.name])
    load_decoder(file, config)  # the shapes of all others are as the metadata say


def test_sizes_of_heads_that_do_not_fit_their_tensors_are_named(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path / "model", **LATENT, num_hidden_layers=1)
    file, _ = write_gguf(path, "deepseek_v3", "F32")
    key = b"deepseek2.attention.value_length_mla" + struct.pack("<I", 4)
    octets = file.read_bytes()
    assert octets.count(key) == 1
    place = octets.index(key) + len(key)
    file.write_bytes(octets[:place] + struct.pack("<I", 48) + octets[place + 4 :])
    with pytest.raises(
        ModelError, match=r"attn_k_b\.weight and .*attn_v_b\.weight in .* have shapes \[4, 32,"
    ):
        load_decoder(file, read_model_config(file))


def test_a_file_may_say_which_layers_are_recurrent(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    path = make_checkpoint("qwen3_5", tmp_path / "model", num_hidden_layers=3, layer_types=kinds)
    file, twin = write_gguf(path, "qwen3_5", "F32", attention__recurrent_layers=[False, True, True])
    assert read_model_config(file).layers == read_model_config(twin).layers
    wrong, _ = write_gguf(twin, "qwen3_5", "F32", attention__recurrent_layers=[False, True])
    with pytest.raises(ModelError, match=r"recurrent_layers is \[False, True\]; .* each of 3 layers"):
        read_model_config(wrong)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_every_weight_is_what_the_gguf_package_makes_of_it(kind: str, tmp_path: Path) -> None:
    file, twin = write_gguf(make_checkpoint("llama", tmp_path / "model", **WIDE), "llama", kind)
    wanted = load_file(twin / "model.safetensors")
    config = read_model_config(file)
    with Checkpoint(file) as checkpoint:
        for spec in weight_specs(config):
            for source in spec.sources:
                weight = checkpoint.weight(source)
                assert isinstance(weight, BlockWeight) == (kind[-2:] != "16" and len(source.shape) == 2)
                # Where 0 stands for the least number, it is kept as the place of zero.
                rounding = 1e-6 if kind.endswith("_1") else 0.0
                torch.testing.assert_close(dequantize(weight), wanted[source.name], rtol=0, atol=rounding)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_embeddings_are_what_the_gguf_package_makes_of_them(
    kind: str, num_ranks: int, tmp_path: Path
) -> None:
    file, twin = write_gguf(make_checkpoint("llama", tmp_path / "model", **WIDE), "llama", kind)
    wanted = load_file(twin / "model.safetensors")["model.embed_tokens.weight"]
    config = read_model_config(file)
    token_ids = torch.randint(config.vocab_size, (700,))
    with Checkpoint(file) as checkpoint:
        for rank in range(num_ranks):
            spec = next(weight_specs(config, Shard(rank, num_ranks)))
            assert spec.field == "embedding"
            held = Shard(rank, num_ranks).share(config.vocab_size)
            embedding = checkpoint.embedding(spec.sources[0], torch.float32)
            assert len(embedding) == len(held)
            vectors = embedding(token_ids % len(held))
            assert torch.equal(vectors, wanted[held.start + token_ids % len(held)])


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    "other_kinds",
    [
        {},
        {"v_proj": "Q8_0", "layers.1.mlp.down": "Q8_0"},
        {"q_proj": "Q5_0", "mlp.down": "Q5_1"},
        {"embed": "F16", "o_proj": "F16"},
        {"q_proj": "MXFP4", "k_proj": "MXFP4", "v_proj": "MXFP4", "mlp.down": "MXFP4"},
    ],
)
def test_the_memory_that_a_file_will_take_is_known_from_its_header(
    other_kinds: dict[str, str], is_tied: bool, quantization: str, tmp_path: Path, packed_bytes: list[int]
) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", **WIDE, tie_word_embeddings=is_tied)
    file, _ = write_gguf(path, "qwen3", "Q4_0", other_kinds=other_kinds)
    config = read_model_config(file)
    options = WeightOptions(quantization=quantization, kernels="native")
    decoder = load_decoder(file, config, options=options)
    embedding = 0  # a quantized one stays in the file
    if "embed" in other_kinds:
        embedding = len(decoder.embedding) * config.hidden_size * 2
    planned = weight_bytes(config, config.dtype, quantization, 128)
    assert planned == pytest.approx(sum(packed_bytes) + embedding, rel=0.01)


def test_the_memory_of_experts_is_known_from_the_header(tmp_path: Path, packed_bytes: list[int]) -> None:
    path = make_checkpoint(
        "qwen3_moe", tmp_path / "model", **WIDE, moe_intermediate_size=64, mlp_only_layers=[]
    )
    file, _ = write_gguf(path, "qwen3_moe", "Q4_0", other_kinds={"down_proj": "Q8_0"})
    config = read_model_config(file)
    load_decoder(file, config, options=WeightOptions(kernels="native"))
    planned = weight_bytes(config, config.dtype, "none", 128)
    assert planned == pytest.approx(sum(packed_bytes), rel=0.05)  # kernels fill up the router's few rows


def test_layers_that_draft_are_passed_over(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=3)
    file, _ = write_gguf(path, "qwen3", "F32", nextn_predict_layers=1)
    config = read_model_config(file)
    assert config.num_layers == 2
    _generate(file)
    for wrong in (3, 2**30):
        path = make_checkpoint("qwen3", tmp_path / str(wrong), num_hidden_layers=3)
        file, _ = write_gguf(path, "qwen3", "F32", nextn_predict_layers=wrong)
        with pytest.raises(ModelError, match="num_hidden_layers"):
            read_model_config(file)


def test_lists_of_layers_may_go_on_behind_the_last(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    shape = {"num_hidden_layers": 4, "layer_types": kinds, "attention_value_scale": None}
    path = make_checkpoint("mimo_v2_flash", tmp_path / "model", **shape)
    file, _ = write_gguf(path, "mimo_v2_flash", "F32", nextn_predict_layers=1)
    layers = attention_of(read_model_config(file))
    assert [(layer.window, layer.num_kv_heads) for layer in layers] == [(0, 1), (11, 2), (0, 1)]
    assert {layer.output_scale for layer in layers} == {1.0}  # where a file says no other


def test_keys_and_values_of_layers_that_share_them_are_passed_over(tmp_path: Path) -> None:
    path = make_checkpoint("gemma4", tmp_path / "model")
    expected = _generate(path)
    weights = load_file(path / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        name = f"model.layers.{{}}.self_attn.{part}.weight"
        weights[name.format(3)] = 2 * weights[name.format(1)]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    file, _ = write_gguf(path, "gemma4", "F32")
    for each in (path, file):
        tokens, logits = _generate(each)
        assert tokens == expected[0]
        torch.testing.assert_close(logits, expected[1], atol=1e-4, rtol=0)


def test_the_vectors_of_layers_stay_in_the_file(tmp_path: Path, packed_bytes: list[int]) -> None:
    path = make_checkpoint("gemma4", tmp_path / "model", **WIDE, global_head_dim=64, **VECTORS)
    file, _ = write_gguf(path, "gemma4", "Q8_0", other_kinds={"embed_tokens.": "BF16"})
    config = read_model_config(file)
    assert (config.embedding_dtype, config.per_layer_dtype) == ("bfloat16", "")
    load_decoder(file, config, options=WeightOptions(kernels="native"))
    assert weight_bytes(config, "bfloat16", "none", 128) == pytest.approx(sum(packed_bytes), rel=0.03)
    held = weight_bytes(dataclasses.replace(config, per_layer_dtype="float32"), "bfloat16", "none", 128)
    vectors = config.vocab_size * config.num_layers * config.per_layer_size
    assert held == weight_bytes(config, "bfloat16", "none", 128) + 2 * vectors


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window_pattern", [True] * 5, "must say which of 6 layers have one"),
        ("attention.value_length_swa", 32, "value_length_swa must be 16"),
        ("attention.key_length_swa", "x", "key_length_swa is 'x'; it must be an integer"),
        ("attention.head_count_kv", [2, 2, 0, 2, 2, 2], "head_count_kv has 0; it must be an integer"),
        ("attention.head_count_kv", [2, 1], r"head_count_kv is \[2, 1\]; it must be an integer"),
        ("attention.shared_kv_layers", 7, "feed_forward_length is"),
        ("feed_forward_length", [112] * 5 + [336], r"feed_forward_length is \[112, .* twice that"),
        ("rope.dimension_count_swa", 8, "rope.dimension_count_swa is 8; Quire computes 16"),
        ("rope.freq_base_swa", -1.0, "rope.freq_base_swa is -1.0; it must be a number"),
    ],
)
def test_metadata_that_gemma4_does_not_have_are_refused(
    key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write_gguf(make_checkpoint("gemma4", tmp_path / "model"), "gemma4", "F32")
    read = GGUFFile(file)
    monkeypatch.setattr(read, "metadata", read.metadata | {f"gemma4.{key}": value})
    monkeypatch.setattr("quire.models.checkpoints.gguf.config.read_gguf", lambda path: read)
    with pytest.raises(ModelError, match=message):
        read_model_config(file)


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        (
            "nemotron_h",
            "feed_forward_length",
            [0, 40],
            r"is \[0, 40\]; it must be a number from 0 on for each of 5",
        ),
        (
            "nemotron_h",
            "attention.head_count_kv",
            [0, 0, -2, 0, 0],
            "must be a number from 0 on for each of 5",
        ),
        ("nemotron_h", "feed_forward_length", 40, "feed_forward_length is 40; it must be"),
        ("nemotron_h", "ssm.inner_size", "x", "'x'; it must be a multiple of ssm.time_step_rank, 6"),
        ("falcon_h1", "ssm.inner_size", 97, "97; it must be a multiple of ssm.time_step_rank, 6"),
        ("glm4_moe", "expert_gating_func", 1, "expert_gating_func is 1; Quire computes 2 in this"),
        ("kimi_linear", "attention.head_count_kv", 4, "head_count_kv is 4; it must be a list, with 0"),
        ("llama4", "attention.sliding_window", 0, "sliding_window is 0; Quire computes 8192 in"),
        ("mimo_v2_flash", "attention.head_count_kv", [1, 2, 2], r"is \[1, 2, 2\]; .* the same for all with"),
        ("mimo_v2_flash", "attention.head_count_kv", [1, 1, 1], "swa_num_key_value_heads 1; it must be 2"),
        (
            "mimo_v2_flash",
            "attention.sliding_window_pattern",
            [0, 2, 0],
            "computes true and false, or 1 and 0",
        ),
        ("mimo_v2_flash", "rope.dimension_count_swa", 8, "dimension_count_swa is 8; Quire computes 10"),
    ],
)
def test_metadata_that_make_no_layers_are_refused(
    family: str, key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write_gguf(make_checkpoint(family, tmp_path / "model", **FAMILIES[family]), family, "F32")
    read = GGUFFile(file)
    name = read.metadata["general.architecture"]
    monkeypatch.setattr(read, "metadata", read.metadata | {f"{name}.{key}": value})
    monkeypatch.setattr("quire.models.checkpoints.gguf.config.read_gguf", lambda path: read)
    with pytest.raises(ModelError, match=message):
        read_model_config(file)


def test_gates_of_experts_in_one_tensor_with_what_they_multiply(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 128}
    path = make_checkpoint("gemma4-experts", tmp_path / "model", **sizes)
    file, _ = write_gguf(path, "gemma4-experts", "Q8_0")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    config = read_model_config(file)
    assert config.stored_quantization == "grouped_int8"
    sources = [source for spec in weight_specs(config) for source in spec.sources]
    experts = [source for source in sources if re.search(r"experts\.\d+\.(gate|up)_proj", source.name)]
    assert len(experts) == 2 * 5 * config.num_layers
    with Checkpoint(file) as checkpoint:
        for source in experts:
            _, _, layer, _, expert, part, _ = source.name.split(".")
            tensor = stored[f"blk.{layer}.ffn_gate_up_exps.weight"]
            both = gguf.quants.dequantize(tensor.data, tensor.tensor_type)[int(expert)]
            wanted = both[:64] if part == "gate_proj" else both[64:]
            assert torch.equal(dequantize(checkpoint.weight(source)), torch.from_numpy(wanted))


def test_fewer_experts_than_the_metadata_say_are_named(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path / "model", num_hidden_layers=1, mlp_only_layers=[])
    file, _ = write_gguf(path, "qwen3_moe", "F32", expert_count=7)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_(exps|inp)\.weight in .* has shape \[6"):
        load_decoder(file, read_model_config(file))


@pytest.fixture
def split(tmp_path: Path) -> tuple[list[Path], Path]:
    """The parts of a model in several files, and its twin."""
    path = make_checkpoint("qwen3", tmp_path / "model", **WIDE)
    (tmp_path / "parts").mkdir()
    file, twin = write_gguf(path, "qwen3", "F32", max_tensors=9)
    parts = sorted(file.parent.glob("model-*-of-*.gguf"))
    return [part.rename(tmp_path / "parts" / part.name) for part in parts], twin


def test_a_model_in_several_files_is_found_by_any_of_them(split: tuple[list[Path], Path]) -> None:
    parts, twin = split
    assert len(parts) > 2
    wanted, logits = _generate(twin)
    for path in (parts[0], parts[-1], parts[0].parent):
        found = find_gguf(path)
        assert found == parts[0]
        tokens, same_logits = _generate(found)
        assert tokens == wanted
        torch.testing.assert_close(logits, same_logits, atol=1e-4, rtol=0)


def test_parts_that_are_not_those_of_one_model_are_named(split: tuple[list[Path], Path]) -> None:
    parts, _ = split
    second = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"-00002-of-0000\d\.gguf is missing: the model is in several files"):
        read_model_config(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelError, match=r"-00002-of-0000\d\.gguf says split\.no 2, not 1"):
        read_model_config(parts[0])
    parts[1].write_bytes(second[: len(second) // 2])
    with pytest.raises(ModelError, match=r"-00002-of-0000\d\.gguf cannot be read"):
        read_model_config(parts[0])
    parts[1].unlink()
    parts[1].symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="outside of the model's directory"):
        read_model_config(parts[0])


def _any_octets(kind: Kind, num_blocks: int = 4) -> np.ndarray[Any, Any]:
    """Return [67, blocks, block_bytes]: any bytes, scales of any size and, from row 34 on, the usual."""
    chosen = np.random.default_rng(kind.block_bytes)
    octets = chosen.integers(0, 256, (67, num_blocks, kind.block_bytes)).astype(np.uint8)
    octets[1], octets[2] = 0, 255
    for place in places_of_halves(kind.name):
        scales = chosen.normal(size=(67, num_blocks, 1))
        scales[:34] *= 10.0 ** chosen.integers(-7, 5, (34, num_blocks, 1))
        scales[3] = 0.0
        octets[..., place : place + 2] = scales.astype(np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        octets[..., 0] = np.arange(67 * num_blocks).reshape(67, -1) % 253  # all that are accepted
    return octets


@pytest.mark.parametrize("number", KINDS)
def test_random_blocks(number: int) -> None:
    """Any bytes, for kinds that the package cannot write too, are what it makes of them, bit for bit."""
    kind = KINDS[number]
    octets = _any_octets(kind)
    wanted = gguf.quants.dequantize(octets.reshape(67, -1), gguf.GGMLQuantizationType(number))
    assert kind.name == gguf.GGMLQuantizationType(number).name
    assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    np.testing.assert_array_equal(kind.floats(torch.from_numpy(octets)).numpy(), np.asarray(wanted))
    found = dequantize(kind.decode(torch.from_numpy(octets))).numpy()
    if kind.name in WITH_MINIMA:  # 0 stands for the least number, kept as the place of zero
        usual = slice(34, None)
        rounding = 1e-6 * np.abs(wanted[usual]).max()
        np.testing.assert_allclose(found[usual], wanted[usual], rtol=0, atol=rounding)
    else:
        np.testing.assert_array_equal(found, np.asarray(wanted))


def _in_blocks(name: str) -> BlockWeight:
    kind = next(kind for kind in KINDS.values() if kind.name == name)
    assert kind.groups is not None
    bits, group_size = kind.groups
    octets = torch.from_numpy(_any_octets(kind, 1024 // kind.block_size))
    return BlockWeight(octets, name, kind.block_size, bits, group_size, name == "MXFP4", kind.decode)


@pytest.mark.parametrize(
    "names",
    [
        *([name] for name in sorted(BLOCK_KINDS)),
        ["Q4_0", "Q8_0"],
        ["Q4_K", "Q6_K", "Q2_K"],
        ["MXFP4", "Q8_0"],
        ["Q5_0", "Q6_K"],
    ],
    ids="-".join,
)
def test_blocks_are_packed_as_what_they_decode_to(names: list[str]) -> None:
    parts = [_in_blocks(name) for name in names]
    for part in parts:
        held = part.decoded()
        assert (part.bits, part.group_size, part.is_mxfp4) == (held.bits, held.group_size, held.is_mxfp4)
        assert (num_rows(part), in_features(part)) == held.values.shape
    in_blocks, decoded = (
        PackedMatrix(weights, dtype=torch.float32) for weights in (parts, [part.decoded() for part in parts])
    )
    assert in_blocks.layout == decoded.layout
    assert torch.equal(in_blocks._panels, decoded._panels)


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_a_matrix_in_blocks(axis: int) -> None:
    weight = _in_blocks("Q4_K")
    ranges = [range(32, 64), range(0, 32, 2) if axis == 0 else range(0, 32)]
    part, wanted = (dequantize(part_of(whole, axis, ranges)) for whole in (weight, weight.decoded()))
    assert torch.equal(part, wanted)


def _use(file: Path, shape: tuple[int, ...], is_packed: bool) -> None:
    weight = GGUFWeights(file).read("model.layers.0.mlp.down_proj.weight", shape)
    if is_packed:
        PackedMatrix([weight], dtype=torch.float32)
    else:
        dequantize(weight)


@pytest.mark.parametrize("number", [number for number, kind in KINDS.items() if kind.block_size > 1])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_scales_of_blocks_are_finite_numbers(
    number: int, is_packed: bool, wrong: float, tmp_path: Path
) -> None:
    kind = KINDS[number]
    for place in places_of_halves(kind.name):
        octets = np.zeros((5, 2, kind.block_bytes), dtype=np.uint8)
        octets[3, 1, place : place + 2] = np.array([wrong], dtype=np.float16).view(np.uint8)
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
        quantization = gguf.GGMLQuantizationType(number)
        writer.add_tensor("blk.0.ffn_down.weight", octets.reshape(5, -1), raw_dtype=quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with np.errstate(invalid="ignore"):
            meant = gguf.quants.dequantize(octets.reshape(5, -1), quantization)
        assert not np.isfinite(meant[3]).all()
        message = rf"blk\.0\.ffn_down\.weight in .*m\.gguf .*{kind.name} have invalid scales"
        with pytest.raises(ModelError, match=message):
            _use(tmp_path / "m.gguf", meant.shape, is_packed)


@pytest.mark.parametrize("name", [kind.name for kind in KINDS.values() if kind.block_size > 1])
def test_the_memory_that_a_type_will_take(name: str, tmp_path: Path, packed_bytes: list[int]) -> None:
    """Of random blocks, since the package does not write all types."""
    number = gguf.GGMLQuantizationType[name]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    path = make_checkpoint("qwen3", tmp_path / "model", **sizes, num_hidden_layers=1)
    file, _ = write_gguf(path, "qwen3", "F32", random_kind=name)
    config = read_model_config(file)
    load_decoder(file, config, options=WeightOptions(kernels="native"))
    assert weight_bytes(config, config.dtype, "none", 128) == pytest.approx(sum(packed_bytes), rel=0.02)
    with Checkpoint(file) as checkpoint:
        spec = next(spec for spec in weight_specs(config) if spec.field == "down")
        weight = checkpoint.weight(spec.sources[0])
    stored = next(
        tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.0.ffn_down.weight"
    )
    wanted = gguf.quants.dequantize(stored.data, number)
    np.testing.assert_allclose(dequantize(weight).numpy(), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q5_1"])
def test_a_block_by_hand(kind: str) -> None:
    """Numbers 0 to 15 of a block have low nibbles, 16 to 31 high ones; a fifth bit is that of its number."""
    number = next(number for number, known in KINDS.items() if known.name == kind)
    steps = [(7 * place + 3) % (16 if kind == "Q4_1" else 32) for place in range(32)]
    nibbles = bytes(steps[place] & 15 | (steps[place + 16] & 15) << 4 for place in range(16))
    fifth = sum((step >> 4) << place for place, step in enumerate(steps))
    head = struct.pack("<e", 0.5) if kind == "Q5_0" else struct.pack("<2e", 0.5, -3.0)
    block = head + (b"" if kind == "Q4_1" else struct.pack("<I", fifth)) + nibbles
    octets = torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, 1, -1)
    wanted = [step * 0.5 - 3.0 if kind != "Q5_0" else (step - 16) * 0.5 for step in steps]
    assert dequantize(KINDS[number].decode(octets)).tolist() == [wanted]


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("activations", "error"), [("bfloat16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "Q8_0"])
def test_the_model_computes_with_few_bits(kind: str, activations: str, error: float, tmp_path: Path) -> None:
    file, twin = write_gguf(make_checkpoint("qwen3", tmp_path / "model", **WIDE), "qwen3", kind)
    (_, logits), (_, wanted) = _generate(file, int4_activations=activations), _generate(twin)
    assert (logits[0] - wanted[0]).norm() / wanted[0].norm() < error


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q4_0", "bfloat16")])
def test_stored_dtype(kind: str, dtype: str, tmp_path: Path) -> None:
    file, _ = write_gguf(make_checkpoint("qwen3", tmp_path / "model", **WIDE), "qwen3", kind)
    assert read_model_config(file).dtype == dtype


def test_scaled_rope_of_metadata(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model")
    file, _ = write_gguf(
        path,
        "qwen3",
        "F32",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=128,
    )
    (rope,) = read_model_config(file).ropes
    assert (rope.kind, rope.factor, rope.original_max_len) == ("yarn", 4.0, 128)


def test_yarn_of_metadata_is_that_of_a_config(tmp_path: Path) -> None:
    """llama.cpp multiplies the paper's factor by those that the metadata have."""
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "finetuned": True}
    keys |= {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "yarn_attn_factor": 0.5, "attn_factor": 3.0}
    metadata = {f"rope__scaling__{key}": value for key, value in keys.items()}
    path = make_checkpoint("qwen3", tmp_path / "model")
    file, _ = write_gguf(path, "qwen3", "F32", **metadata, rope__scaling__yarn_ext_factor=1.0)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    scaling |= {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5 * (0.1 * math.log(4) + 1)}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_parameters": scaling}))
    assert read_model_config(file).ropes == read_model_config(path).ropes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.attn_factor", 0.5),
        ("rope.scaling.yarn_beta_fast", 8.0),
        ("rope.scaling.yarn_ext_factor", 0.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.alpha", 50.0),
        ("rope.dimension_sections", [1, 2, 3]),
        ("rope.freq_base_swa", 500.0),
        ("attention.causal", False),
        ("attention.value_length", 48),
        ("attention.scale", 0.3),
        ("attention.temperature_scale", 0.3),
        ("logit_scale", 3.0),
        ("residual_scale", 3.0),
        ("embedding_scale", 3.0),
        ("final_logit_softcapping", 30.0),
        ("expert_count", 8),
    ],
)
def test_metadata_that_change_numbers_and_are_not_read_are_refused(
    key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write_gguf(make_checkpoint("qwen3", tmp_path / "model"), "qwen3", "F32")
    read = GGUFFile(file)
    monkeypatch.setattr(read, "metadata", read.metadata | {f"qwen3.{key}": value})
    monkeypatch.setattr("quire.models.checkpoints.gguf.config.read_gguf", lambda path: read)
    with pytest.raises(
        ModelError, match=rf"qwen3\.{re.escape(key)} is {re.escape(repr(value))}; Quire computes"
    ):
        read_model_config(file)


def test_as_many_features_are_rotated_as_the_metadata_say(tmp_path: Path) -> None:
    """Also where dimension_count / head_dim * head_dim is less than dimension_count, as 30 / 88 * 88 is."""
    for head_dim, rotated in ((88, 30), (88, 60), (176, 98), (128, 96), (88, 88)):
        path = tmp_path / f"{head_dim}-{rotated}"
        config = {"num_hidden_layers": 1, "head_dim": head_dim}
        file, _ = write_gguf(
            make_checkpoint("qwen3", path, **config), "qwen3", "F32", rotated_features=rotated
        )
        (rope,) = read_model_config(file).ropes
        assert rope.rotary_dim == rotated


@pytest.mark.parametrize("key", ["rope__scaling__factor", "rope__scale_linear"])
def test_a_scaled_rope_without_a_type_is_linear(key: str, tmp_path: Path) -> None:
    file, _ = write_gguf(make_checkpoint("qwen3", tmp_path / "model"), "qwen3", "F32", **{key: 4.0})
    (rope,) = read_model_config(file).ropes
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "uint8": 200,
        "int8": -3,
        "uint16": 60000,
        "int16": -300,
        "uint32": 4_000_000_000,
        "int32": -5,
        "float32": 0.5,
        "uint64": 2**63,
        "int64": -(2**40),
        "float64": 1e-9,
        "bool": True,
        "string": "größer",
    }
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in values.items():
        getattr(writer, f"add_{name}")(f"x.{name}", value)
    writer.add_array("x.texts", ["a", "", "漢"])
    writer.add_array("x.numbers", [1.5, 2.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    assert {name: metadata[f"x.{name}"] for name in values} == values
    assert list(metadata["x.texts"]) == ["a", "", "漢"]
    assert metadata["x.numbers"] == [1.5, 2.5]


@pytest.fixture(scope="module")
def q4_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("gguf") / "model", **WIDE)
    return write_gguf(path, "llama", "Q4_0")[0]


def test_directory_with_one_file(q4_file: Path, tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(q4_file.read_bytes())
    assert read_model_config(tmp_path).architecture == "LlamaForCausalLM"
    with Checkpoint(tmp_path):
        pass
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ModelError, match=r"holds 2 GGUF files, one\.gguf among them"):
        read_model_config(tmp_path)


def test_a_file_is_a_model_and_other_files_are_not(q4_file: Path, tmp_path: Path) -> None:
    assert resolve_model(str(q4_file)) == q4_file
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelNotFoundError, match="is a file; give a directory or a GGUF file"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("length", [3, 8, 20, 100, 400])
def test_a_file_cut_within_its_header_is_named(q4_file: Path, tmp_path: Path, length: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(q4_file.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"cut\.gguf cannot be read as a GGUF file"):
        GGUFFile(cut)


def test_a_file_cut_within_a_tensor_is_named(q4_file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(q4_file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"cut\.gguf .* ends within"):
        load_decoder(cut, read_model_config(cut))


def test_other_versions_are_refused(q4_file: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.gguf"
    octets = bytearray(q4_file.read_bytes())
    octets[4:8] = struct.pack("<I", 1)
    old.write_bytes(octets)
    with pytest.raises(ModelError, match="its version is 1; 2 and 3"):
        GGUFFile(old)


@pytest.mark.parametrize(
    ("architecture", "number", "message"),
    [
        ("bert", 19, "the architecture bert; Quire reads llama, qwen2, qwen2moe, qwen3, qwen3moe, gemma"),
        ("qwen3", 19, r"output\.weight in .* is of the ggml type IQ1_S; Quire reads F32, F16, Q4_0"),
        ("qwen3", 33, "is of the ggml type number 33, which has no name; Quire reads"),
        ("qwen3", 2, "has rows of 100 numbers; Q4_0 has blocks of 32"),
    ],
)
def test_what_is_not_read_is_named(architecture: str, number: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor_info("output.weight", (2, 100), np.dtype(np.float32), 800)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = path.read_bytes()
    kind = header.rindex(struct.pack("<IQ", 0, 0))  # of its only tensor: type and place
    path.write_bytes(header[:kind] + struct.pack("<IQ", number, 0) + bytes(900))
    for read in (read_gguf_config, Checkpoint):
        with pytest.raises(ModelError, match=message):
            read(path)


def test_nothing_in_the_config_needs_torch(q4_file: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from quire.models.checkpoints.config_reading import read_model_config\n"
        f"read_model_config(Path({str(q4_file)!r}))\n"
        "assert 'torch' not in sys.modules\n"
    )
    python_output(code)


def test_damaged_headers_are_refused_or_read(q4_file: Path, tmp_path: Path) -> None:
    """Whatever is wrong with a header, the file is named."""
    whole = np.frombuffer(q4_file.read_bytes(), dtype=np.uint8)
    header = min(info.start for info in GGUFFile(q4_file).tensors.values())
    damaged = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(100):
        octets = whole.copy()
        octets[rng.integers(4, header, rng.integers(1, 4))] = rng.choice([0, 1, 9, 255])
        damaged.write_bytes(octets.tobytes())
        try:
            config = read_model_config(damaged)
            with Checkpoint(damaged) as checkpoint:
                checkpoint.check_names(list(weight_specs(config)), config)
        except ModelError:
            num_refused += 1
    assert num_refused > 30
