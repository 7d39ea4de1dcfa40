"""Loading: sharded, tied, converted; and what is said about checkpoints that do not fit."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from quire.config import EngineConfig
from quire.engine.memory.model_sizes import output_bits
from quire.errors import ConfigError, ModelError
from quire.kernels.layers.linear import GroupedLinear, Linear
from quire.models import weights
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.weights import WeightSpec, count_parameters, weight_bytes, weight_specs


def _load(path: Path, dtype: str = "auto", **kwargs: Any) -> Decoder:
    return load_decoder(path, read_model_config(path), dtype, **kwargs)


def _change(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove weights; names with a double underscore for each dot."""
    weights = load_file(path / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del weights[name.replace("__", ".")]
        else:
            weights[name.replace("__", ".")] = value
    save_file(weights, path / "model.safetensors")


def _matrix(linear: Linear, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weights that a layer multiplies with."""
    return linear(torch.eye(linear.in_features, dtype=dtype)).T


def _vectors(decoder: Decoder) -> torch.Tensor:
    """Return the embeddings of all token ids."""
    return decoder.embedding(torch.arange(len(decoder.embedding)))


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return make_checkpoint("qwen3", tmp_path)


def test_shards_give_the_same_weights(qwen3: Path, tmp_path: Path) -> None:
    sharded = make_checkpoint("qwen3", tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    one, other = _load(qwen3), _load(sharded)
    assert torch.equal(_vectors(one), _vectors(other))
    assert torch.equal(_matrix(one.output), _matrix(other.output))
    for (attention, mlp), (same, same_mlp) in zip(one.layers, other.layers, strict=True):
        assert torch.equal(_matrix(attention.qkv), _matrix(same.qkv))
        assert torch.equal(_matrix(mlp.gate_up.gate_up), _matrix(same_mlp.gate_up.gate_up))


def test_projections_are_fused_in_order(qwen3: Path) -> None:
    weights = load_file(qwen3 / "model.safetensors")
    attention, mlp = _load(qwen3).layers[1]
    parts = [weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(_matrix(attention.qkv), torch.cat(parts))
    gate, up = (weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(_matrix(mlp.gate_up.gate_up), torch.cat([gate, up]))


def test_a_tied_output_layer_is_the_embedding(tmp_path: Path) -> None:
    decoder = _load(make_checkpoint("qwen2", tmp_path))
    assert torch.equal(_matrix(decoder.output), _vectors(decoder))


def test_a_stored_copy_of_a_tied_output_layer_is_ignored(tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path)
    copy = load_file(path / "model.safetensors")["model.embed_tokens.weight"].clone()
    _change(path, lm_head__weight=copy)
    decoder = _load(path)
    assert decoder.config.tie_word_embeddings
    assert torch.equal(_matrix(decoder.output), copy)


@pytest.mark.parametrize("sharded", [{}, {"max_shard_size": "60KB"}])
@pytest.mark.parametrize("has_own", [True, False])
def test_whether_an_output_layer_that_is_stored_is_the_embedding_transformers_decides(
    has_own: bool, sharded: dict[str, Any], tmp_path: Path
) -> None:
    """One number in it differs."""
    import transformers  # takes seconds

    path = make_checkpoint("qwen2", tmp_path, tie_word_embeddings=False, **sharded)
    for file in path.glob("*.safetensors"):
        stored = load_file(file)
        if "lm_head.weight" in stored:
            output, output_file = stored, file
        if "model.embed_tokens.weight" in stored:
            embedding = stored["model.embed_tokens.weight"]
    output["lm_head.weight"] = embedding.clone()
    output["lm_head.weight"][-1, -1] += has_own
    save_file(output, output_file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied != has_own
    decoder = _load(path)
    assert decoder.config.tie_word_embeddings == is_tied
    assert torch.equal(_matrix(decoder.output), model.lm_head.weight)
    assert torch.equal(_vectors(decoder), model.model.embed_tokens.weight)


def _bare(name: str) -> str:
    """Return the name that a tensor has where the body of a model was saved by itself."""
    return name.removeprefix("model.")


def _doubled(name: str) -> str:
    return f"model.{name}" if name.startswith("lm_head") else name


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("rename", "shards"), [(str, 1), (_bare, 3), (_doubled, 2)], ids=["whole", "bare", "doubled"]
)
@pytest.mark.parametrize("stored", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
@pytest.mark.parametrize("is_tied", [True, False])
def test_what_files_may_leave_out_is_what_transformers_makes_up_for(
    is_tied: bool, stored: tuple[str, ...], shards: int, rename: Callable[[str], str], tmp_path: Path
) -> None:
    import transformers  # takes seconds

    path = make_checkpoint("qwen2", tmp_path, tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
    weights = load_file(path / "model.safetensors")
    kept = {
        rename(name): weight
        for name, weight in weights.items()
        if not any(part in name and part not in stored for part in ("embed_tokens", "lm_head"))
    }
    (path / "model.safetensors").unlink()
    _save_sharded(path, kept, shards)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["unexpected_keys"]
    if report["missing_keys"]:
        (missing,) = report["missing_keys"]
        with pytest.raises(ModelError, match=f"lacks {missing}"):
            _load(path)
        return
    decoder = _load(path)
    assert torch.equal(_matrix(decoder.output), model.lm_head.weight)
    assert torch.equal(_vectors(decoder), model.model.embed_tokens.weight)
    assert torch.equal(decoder.norm.weight, model.model.norm.weight)
    assert decoder.config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)


def _save_sharded(path: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    places = {name: f"part-{number % shards}.safetensors" for number, name in enumerate(sorted(weights))}
    for file in set(places.values()):
        part = {name: weights[name] for name in weights if places[name] == file}
        save_file(part, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_a_tensor_by_two_names_is_refused(qwen3: Path) -> None:
    _change(qwen3, norm__weight=torch.zeros(64))
    with pytest.raises(ModelError, match=r"holds (model\.)?norm\.weight, which another file .* another name"):
        _load(qwen3)


def test_a_quantized_output_layer_is_not_passed_over_for_the_embedding(tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path)
    _change(path, lm_head__qweight=torch.zeros(8, 384, dtype=torch.int32))
    assert not read_model_config(path).tie_word_embeddings


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_files_of_a_tied_model_that_are_wrong_are_left_to_loading(file: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path)
    wanted = read_model_config(path)
    (path / "model.safetensors").unlink()
    assert read_model_config(path) == wanted
    (path / file).write_text('{"weight_map": {"lm_head.weight": "config.json", "x": 3}}')
    assert read_model_config(path) == wanted


def test_a_header_of_a_tied_model_in_a_form_of_its_own_is_left_to_loading(tmp_path: Path) -> None:
    """safetensors reads an array of type, shape and place, which its description does not have."""
    path = make_checkpoint("qwen2", tmp_path)
    file = path / "model.safetensors"
    _change(path, lm_head__weight=load_file(file)["model.embed_tokens.weight"].clone())
    stored = file.read_bytes()
    (size,) = struct.unpack("<Q", stored[:8])
    described = {
        name: list(tensor.values()) if isinstance(tensor.get("shape"), list) else tensor
        for name, tensor in json.loads(stored[8 : 8 + size]).items()
    }
    header = json.dumps(described).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + stored[8 + size :])
    assert read_model_config(path).tie_word_embeddings


def test_buffers_of_old_checkpoints_are_ignored(qwen3: Path) -> None:
    expected, _ = _load(qwen3).layers[0]
    _change(qwen3, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16))
    assert torch.equal(_matrix(_load(qwen3).layers[0][0].qkv), _matrix(expected.qkv))


def test_gpt2_is_read_as_published(tmp_path: Path) -> None:
    """The body by itself, with masks; its matrices are [inputs, outputs], square ones, too."""
    decoder = _load(make_checkpoint("gpt2", tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 512, 512) for layer in (0, 1)}
    save_file(bare, tmp_path / "model.safetensors")
    published = _load(tmp_path)
    for (attention, mlp), (same, same_mlp) in zip(decoder.layers, published.layers, strict=True):
        assert torch.equal(_matrix(attention.output), _matrix(same.output))
        assert torch.equal(_matrix(mlp.down), _matrix(same_mlp.down))
    unbiased = _matrix(published.layers[0][0].output) - bare["h.0.attn.c_proj.bias"][:, None]
    torch.testing.assert_close(unbiased, bare["h.0.attn.c_proj.weight"].T)


def test_a_model_is_not_made_longer_than_it_has_learned_positions(tmp_path: Path) -> None:
    path = make_checkpoint("gpt2", tmp_path)
    longer = dataclasses.replace(read_model_config(path), max_model_len=513)
    with pytest.raises(ConfigError, match=r"max_model_len is 513, .* vectors of only 512 positions"):
        load_decoder(path, longer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_converted(qwen3: Path, dtype: str) -> None:
    decoder = _load(qwen3, dtype)
    wanted = getattr(torch, dtype)
    assert decoder.dtype == wanted
    weights = load_file(qwen3 / "model.safetensors")
    assert torch.equal(_vectors(decoder), weights["model.embed_tokens.weight"].to(wanted))
    output = weights["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(_matrix(decoder.layers[0][0].output, wanted), output.to(wanted))


def test_stored_dtype_is_the_default(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, dtype="bfloat16")
    assert _load(path).dtype == torch.bfloat16
    assert read_model_config(path).dtype == "bfloat16"


def test_progress_ends_at_the_whole(qwen3: Path) -> None:
    calls: list[tuple[int, int]] = []
    _load(qwen3, "bfloat16", on_progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (2 * count_parameters(read_model_config(qwen3)),) * 2


def test_progress_does_not_count_the_weights_again_for_each_matrix(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, walks = read_model_config(qwen3), []

    def counted(config: ModelConfig) -> Iterator[WeightSpec]:
        walks.append(config)
        return weight_specs(config)

    monkeypatch.setattr(weights, "weight_specs", counted)
    load_decoder(qwen3, config, on_progress=lambda done, total: None)
    assert len(walks) <= 1


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("quantization", "activations"),
    [("none", "int8"), ("int8", "int8"), ("int4", "int8"), ("int4", "bfloat16")],
)
def test_the_memory_that_the_weights_take_is_what_is_planned(
    stored: str,
    is_tied: bool,
    quantization: str,
    activations: Literal["int8", "bfloat16"],
    tmp_path: Path,
    packed_bytes: list[int],
) -> None:
    # Of the feed-forward layer's inputs, groups of 32 divide those of gate and up only.
    sizes = {"hidden_size": 256, "intermediate_size": 528, "tie_word_embeddings": is_tied}
    path = make_checkpoint("qwen3", tmp_path, dtype=stored, **sizes)
    config = read_model_config(path)
    options = WeightOptions(
        "bfloat16", quantization=quantization, group_size=32, int4_activations=activations, kernels="native"
    )
    decoder = load_decoder(path, config, options=options)
    embedding = 0 if is_tied and stored == "bfloat16" else _vectors(decoder).nbytes  # mapped, and seldom read
    bits = output_bits(EngineConfig(kernels="native", int4_activations=activations))
    planned = weight_bytes(config, "bfloat16", quantization, 32, output_bits=bits)
    assert planned == pytest.approx(sum(packed_bytes) + embedding, rel=0.01)


def test_what_layers_share_is_held_once(tmp_path: Path, packed_bytes: list[int]) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "n_mamba_heads": 8}
    path = make_checkpoint("zamba2", tmp_path, dtype="bfloat16", **sizes)
    config = read_model_config(path)
    decoder = load_decoder(path, config, options=WeightOptions(kernels="native"))
    first, _, third = (layer[0] for layer in decoder.layers)
    assert first.feed_forward.down is third.feed_forward.down
    assert first.block_output is not third.block_output
    planned = weight_bytes(config, "bfloat16", "none", 128)
    assert planned == pytest.approx(sum(packed_bytes), rel=0.05)


def test_the_reference_holds_int4_as_what_it_stands_for(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, dtype="bfloat16", hidden_size=256, intermediate_size=528)
    config = read_model_config(path)
    options = WeightOptions(quantization="int4", group_size=32, kernels="reference")
    decoder = load_decoder(path, config, options=options)
    matrices = [
        matrix
        for attention, mlp in decoder.layers
        for matrix in (attention.qkv, attention.output, mlp.gate_up.gate_up, mlp.down)
    ]
    held = _vectors(decoder).nbytes
    for linear in (*matrices, decoder.output):
        weight = linear._float._weight if isinstance(linear, GroupedLinear) else linear._values
        held += weight.nbytes
    planned = weight_bytes(config, "bfloat16", "int4", 32, is_native=False)
    assert planned == pytest.approx(held, rel=0.02)


def test_missing_weight_is_named(qwen3: Path) -> None:
    _change(qwen3, model__layers__1__self_attn__k_proj__weight=None)
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        _load(qwen3)


def test_unexpected_weight_is_named(qwen3: Path) -> None:
    _change(qwen3, model__layers__0__self_attn__q_proj__bias=torch.zeros(128))
    with pytest.raises(ModelError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.bias"):
        _load(qwen3)


def test_many_names_are_cut_short(qwen3: Path) -> None:
    values = json.loads((qwen3 / "config.json").read_text())
    (qwen3 / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 5, "layer_types": None}))
    with pytest.raises(ModelError, match="and 30 more"):
        _load(qwen3)


def test_misshapen_weight_is_named(qwen3: Path) -> None:
    _change(qwen3, model__norm__weight=torch.zeros(65))
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight .* shape \[65\]; config\.json asks for \[64\]"
    ):
        _load(qwen3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_weights_of_other_types_are_refused(qwen3: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    _change(qwen3, model__layers__0__self_attn__o_proj__weight=torch.zeros(64, 128, dtype=dtype))
    with pytest.raises(ModelError, match=rf"{re.escape(name)} .* stored as {dtype}; only bfloat16"):
        _load(qwen3)


def test_directory_without_weights(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        _load(qwen3)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, max_shard_size="60KB")
    next(path.glob("model-00002-*")).unlink()
    with pytest.raises(ModelError, match=r"model-00002-.*does not exist"):
        _load(path)


def test_damaged_file_is_named(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        _load(qwen3)
