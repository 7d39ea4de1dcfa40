"""Encoders of every family against `transformers` on random checkpoints, alone and in company."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from encoders import DECODERS, ENCODERS, LENGTHS, hidden_states, make_encoder, random_prompts, save_encoder
from engine_checks import check_after_every_step, core_of
from quire import LLM, PoolingParams
from quire.errors import InvalidRequestError, ModelError
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.models.layers.two_sided_attention import bucket_of
from quire.models.weights import count_parameters, weight_bytes

SMALL = {"num_threads": 2, "max_num_batched_tokens": 1100}


def rows_of(llm: LLM, prompts: Any, **params: Any) -> list[np.ndarray]:
    outputs = llm.encode(prompts, PoolingParams(**params))
    assert [output.outputs.error for output in outputs] == [None] * len(outputs)
    return [output.outputs.data for output in outputs]


@pytest.mark.formats
@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("name", ENCODERS)
def test_rows_are_those_of_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    model = make_encoder(name)
    prompts = random_prompts()
    with LLM(str(save_encoder(model, tmp_path)), kernels=kernels, **SMALL) as llm:
        check_after_every_step(core_of(llm))
        assert llm.info.kv_cache_bytes == 0
        assert llm.info.max_model_len == 512
        together = rows_of(llm, prompts)
        alone = [rows_of(llm, [prompt])[0] for prompt in prompts]
    assert [len(prompt) for prompt in prompts] == LENGTHS
    for prompt, row, by_itself in zip(prompts, together, alone, strict=True):
        expected = hidden_states(model, prompt).double().mean(0)
        np.testing.assert_allclose(row, expected, atol=1e-5, rtol=0)
        assert row.tobytes() == by_itself.tobytes()


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_recorded_steps_have_the_bits_of_others(name: str, tmp_path: Path) -> None:
    with LLM(str(save_encoder(make_encoder(name), tmp_path)), enable_prefix_caching=False, **SMALL) as llm:
        graphs = core_of(llm).runner._graphs
        assert graphs is not None
        for seed in range(3):
            generator = np.random.default_rng(seed)
            prompts = [generator.integers(10, 90, length).tolist() for length in (5, 1, 64, 5, 65, 17)]
            together = rows_of(llm, prompts)
            for _ in range(2):
                for prompt, row in zip(prompts, together, strict=True):
                    assert rows_of(llm, [prompt])[0].tobytes() == row.tobytes(), len(prompt)
        assert graphs.stats.num_graphs == 4
        assert graphs.stats.num_replayed >= 3 * 2 * 5 - 4 * 3


@pytest.mark.parametrize("name", ENCODERS)
def test_all_weights_are_counted(name: str, tmp_path: Path) -> None:
    model = make_encoder(name)
    config = read_model_config(save_encoder(model, tmp_path))
    counted = [values.numel() for part, values in model.named_parameters() if not part.startswith("pooler.")]
    assert count_parameters(config) == sum(counted)
    positions = load_decoder(tmp_path, config, "bfloat16")._learned_positions
    without = dataclasses.replace(config, learned_positions=0, token_types=0)
    planned, others = (weight_bytes(each, "bfloat16", "none", 128) for each in (config, without))
    # Vectors of positions that no token has are planned, but with types of tokens they are not copied.
    unused = config.token_types * config.unused_positions * config.hidden_size * 2
    held = 0 if positions is None else positions.untyped_storage().nbytes()
    assert planned - unused - others == held


@pytest.mark.parametrize("name", ["bert", "mpnet"])
@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "int8"}], ids=str
)
def test_fewer_bits(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    model = make_encoder(name)
    prompts = random_prompts([70, 129, 1])
    with LLM(str(save_encoder(model, tmp_path)), **options, **SMALL) as llm:
        together = rows_of(llm, prompts)
        assert [row.tobytes() for row in together] == [rows_of(llm, [one])[0].tobytes() for one in prompts]
    for prompt, row in zip(prompts, together, strict=True):
        expected = hidden_states(model, prompt).mean(0)
        assert torch.nn.functional.cosine_similarity(torch.tensor(row), expected, dim=0) > 0.9995


def test_steps_have_room_for_the_longest_text(tmp_path: Path) -> None:
    model = make_encoder("distilbert", max_position_embeddings=1_100)
    [prompt] = random_prompts([1_100])
    with LLM(str(save_encoder(model, tmp_path)), num_threads=2) as llm:
        [row] = rows_of(llm, [prompt])
    np.testing.assert_allclose(row, hidden_states(model, prompt).mean(0), atol=1e-5, rtol=0)


def test_texts_become_word_pieces(tmp_path: Path) -> None:
    model = make_encoder("bert")
    with LLM(str(save_encoder(model, tmp_path)), **SMALL) as llm:
        [output] = llm.encode("Hello, worlding")
    assert output.prompt_token_ids == [2, 57, 61, 58, 59, 3]
    expected = hidden_states(model, output.prompt_token_ids).mean(0)
    np.testing.assert_allclose(output.outputs.data, expected, atol=1e-5, rtol=0)


@pytest.mark.formats
@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "distilbert"])
def test_files_of_a_model_with_a_head_hold_an_encoder(name: str, tmp_path: Path) -> None:
    model = make_encoder(name, kind="ForMaskedLM")
    [prompt] = random_prompts([20])
    with LLM(str(save_encoder(model, tmp_path)), **SMALL) as llm:
        [row] = rows_of(llm, [prompt])
    np.testing.assert_allclose(row, hidden_states(model, prompt).mean(0), atol=1e-5, rtol=0)


def test_norms_may_have_their_first_names(tmp_path: Path) -> None:
    model = make_encoder("bert")
    file = save_encoder(model, tmp_path) / "model.safetensors"
    renamed = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, {"format": "pt"})
    [prompt] = random_prompts([20])
    with LLM(str(tmp_path), **SMALL) as llm:
        [row] = rows_of(llm, [prompt])
    np.testing.assert_allclose(row, hidden_states(model, prompt).mean(0), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder True; it must be False"),
        ("bert", {"type_vocab_size": -1}, "type_vocab_size -1; it must be"),
        ("roberta", {"pad_token_id": 600}, "pad_token_id 600, behind which positions begin, and only 514"),
        ("mpnet", {"pad_token_id": 0}, "pad_token_id 0; it must be 1"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "num_buckets 64; it must be 32"),
        ("distilbert", {"activation": "mish"}, "activation 'mish'"),
    ],
)
def test_what_is_not_computed_is_refused(
    name: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = save_encoder(make_encoder(name), tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_distances_have_the_buckets_of_transformers() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distances = torch.arange(-700, 701)
    expected = MPNetEncoder.relative_position_bucket(distances)
    assert [bucket_of(distance) for distance in distances.tolist()] == expected.tolist()


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_bias_by_distance(kernels: str, tmp_path: Path) -> None:
    """As all-mpnet-base-v2 is published, around the distance from which on all have one bias."""
    model = make_encoder("mpnet")
    prompts = random_prompts([1, 2, 127, 128, 129, 130, 512])
    modules = {"Pooling": pooling("mean_tokens"), "Normalize": {}}
    file = save_encoder(model, tmp_path, modules) / "model.safetensors"
    with LLM(str(tmp_path), kernels=kernels, **SMALL) as llm:
        together = rows_of(llm, prompts)
        assert [row.tobytes() for row in together] == [rows_of(llm, [one])[0].tobytes() for one in prompts]
    for prompt, row in zip(prompts, together, strict=True):
        expected = pooled(hidden_states(model, prompt), "mean_tokens")
        np.testing.assert_allclose(row, expected / expected.norm(), atol=1e-5, rtol=0)
    weights = load_file(file)
    weights["encoder.relative_attention_bias.weight"][31] += 1  # of the keys furthest behind a token
    save_file(weights, file, {"format": "pt"})
    with LLM(str(tmp_path), kernels=kernels, **SMALL) as llm:
        changed = rows_of(llm, prompts)
    differ = [float(np.abs(row - other).max()) > 1e-3 for row, other in zip(together, changed, strict=True)]
    assert differ == [False, False, True, True, True, True, True]


def test_damaged_weights_end_the_requests_that_meet_them(tmp_path: Path) -> None:
    file = save_encoder(make_encoder("bert"), tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights["embeddings.word_embeddings.weight"][7] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with LLM(str(tmp_path), **SMALL) as llm:
        damaged, sound = llm.encode([[5, 7, 9], [5, 6, 9]])
    assert "NaN or infinite" in damaged.outputs.error
    assert np.isfinite(sound.outputs.data).all()


@pytest.mark.formats
@pytest.mark.parametrize("kind", ["Model", "ForCausalLM"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_pooled_if_that_is_published(name: str, kind: str, tmp_path: Path) -> None:
    """Qwen3-Embedding and its like, whose files hold a body alone, and those of models that generate."""
    model = make_encoder(name, kind=kind)
    prompts = random_prompts([1, 2, 77, 200])
    save_encoder(model, tmp_path, {"Pooling": pooling("lasttoken"), "Normalize": {}})
    with LLM(str(tmp_path), num_kv_blocks=64, num_threads=2, max_num_batched_tokens=100) as llm:
        together = rows_of(llm, prompts)
        assert [row.tobytes() for row in together] == [rows_of(llm, [one])[0].tobytes() for one in prompts]
        with pytest.raises(InvalidRequestError, match=r"cannot generate; use LLM\.embed"):
            llm.generate("a")
    for prompt, row in zip(prompts, together, strict=True):
        expected = hidden_states(model, prompt)[-1]
        np.testing.assert_allclose(row, expected / expected.norm(), atol=1e-5, rtol=0)


def test_a_body_alone_is_pooled_by_the_mean(tmp_path: Path) -> None:
    model = make_encoder("qwen3")
    [prompt] = random_prompts([30])
    with LLM(str(save_encoder(model, tmp_path)), num_kv_blocks=64, num_threads=2) as llm:
        [row] = rows_of(llm, [prompt])
    np.testing.assert_allclose(row, hidden_states(model, prompt).mean(0), atol=1e-5, rtol=0)


# -- what sentence-transformers publishes ------------------------------------------------------------------

DENSE = {
    "in_features": 64,
    "out_features": 24,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


def pooling(mode: str, **others: Any) -> dict[str, Any]:
    """Return a Pooling module's config as it is published."""
    modes = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "lasttoken",
        "weightedmean_tokens",
        "mean_sqrt_len_tokens",
    )
    flags = {f"pooling_mode_{one}": one == mode for one in modes}
    return {"word_embedding_dimension": 64, **flags, "include_prompt": True, **others}


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    hidden = hidden.double()
    weights = torch.arange(1, len(hidden) + 1, dtype=torch.float64)[:, None]
    return {
        "cls_token": hidden[0],
        "mean_tokens": hidden.mean(0),
        "max_tokens": hidden.amax(0),
        "lasttoken": hidden[-1],
        "weightedmean_tokens": (hidden * weights).sum(0) / weights.sum(),
    }[mode]


@pytest.mark.formats
@pytest.mark.parametrize(
    "mode", ["cls_token", "mean_tokens", "max_tokens", "lasttoken", "weightedmean_tokens"]
)
@pytest.mark.parametrize("normalizes", [True, False])
def test_pooling_is_as_published(mode: str, normalizes: bool, tmp_path: Path) -> None:
    model = make_encoder("bert")
    modules = {"Pooling": pooling(mode)} | ({"Normalize": {}} if normalizes else {})
    prompts = random_prompts([1, 40, 70])
    with LLM(str(save_encoder(model, tmp_path, modules)), **SMALL) as llm:
        together = rows_of(llm, prompts)
        assert [row.tobytes() for row in together] == [rows_of(llm, [one])[0].tobytes() for one in prompts]
    for prompt, row in zip(prompts, together, strict=True):
        expected = pooled(hidden_states(model, prompt), mode)
        expected = expected / expected.norm() if normalizes else expected
        np.testing.assert_allclose(row, expected, atol=1e-5, rtol=0)


def test_dense_layers_come_behind_pooling(tmp_path: Path) -> None:
    model = make_encoder("bert")
    torch.manual_seed(3)
    dense = torch.nn.Linear(64, 24)
    modules = {"Pooling": pooling("cls_token"), "Dense": DENSE, "Normalize": {}}
    save_encoder(model, tmp_path, modules)
    tensors = {f"linear.{name}": tensor.contiguous() for name, tensor in dense.state_dict().items()}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    [prompt] = random_prompts([30])
    with LLM(str(tmp_path), **SMALL) as llm:
        [row] = rows_of(llm, [prompt])
        [longer] = rows_of(llm, [prompt], normalize=False)
    with torch.inference_mode():
        expected = torch.tanh(dense(hidden_states(model, prompt)[0]))
    np.testing.assert_allclose(longer, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(row, expected / expected.norm(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_dense_layers_behind_pooling_are_the_host_s_in_float32(on_gpu: bool, tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path, {"Pooling": pooling("cls_token"), "Dense": DENSE})
    tensors = {"linear.weight": torch.zeros(24, 64), "linear.bias": torch.zeros(24)}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    config = read_model_config(tmp_path)
    planned, others = (
        weight_bytes(each, "bfloat16", "none", 128, on_gpu=on_gpu)
        for each in (config, dataclasses.replace(config, row_layers=()))
    )
    assert planned - others == (0 if on_gpu else (64 * 24 + 24) * 4)


def test_texts_are_as_long_as_published(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path, {"Pooling": pooling("mean_tokens")})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    assert read_model_config(tmp_path).max_model_len == 40


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"Pooling": pooling("none")}, "pools by nothing; it must be one of cls, mean"),
        ({"Pooling": pooling("cls_token", pooling_mode_max_tokens=True)}, "cls_token', 'pooling_mode_max"),
        ({"Pooling": pooling("mean_sqrt_len_tokens")}, "pools by .'pooling_mode_mean_sqrt_len_tokens'"),
        ({"Pooling": pooling("cls_token", include_prompt=False)}, "include_prompt false"),
        ({"Normalize": {}, "Pooling": pooling("cls_token")}, "Normalize, Pooling; the order must be"),
        ({"LSTM": {}, "Pooling": pooling("cls_token")}, "module 'sentence_transformers.models.LSTM'"),
        (
            {"Pooling": pooling("cls_token"), "Dense": DENSE | {"in_features": 63}},
            "63 features; there are 64",
        ),
        ({"Pooling": pooling("cls_token"), "Dense": DENSE | {"in_features": -1}}, "in_features -1; it must"),
        (
            {"Pooling": pooling("cls_token"), "Dense": DENSE | {"activation_function": "torch.nn.Mish"}},
            "activation_function 'Mish'",
        ),
        ({"Pooling": pooling("cls_token"), "Dense": DENSE}, "holds neither model.safetensors"),
    ],
)
def test_other_modules_are_refused(modules: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path, modules)
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), **SMALL)


def test_damaged_descriptions_are_refused(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path, {"Pooling": pooling("cls_token")})
    file = tmp_path / "modules.json"
    good = json.loads(file.read_text())
    for content, message in (
        ("{}", "holds dict, not a list"),
        ("[1]", "holds 1 in its list; there must be objects"),
        (json.dumps([*good, {"type": 3}]), "type is 3; it must be a text"),
        (json.dumps([good[0], good[1] | {"path": "../1_Pooling"}]), "it must be a folder beside"),
        (json.dumps([good[0], good[1] | {"path": "elsewhere"}]), "is missing; modules.json names its folder"),
        (json.dumps([good[0] | {"path": "deep"}, good[1]]), "has the transformer in 'deep'"),
    ):
        file.write_text(content)
        with pytest.raises(ModelError, match=message):
            read_model_config(tmp_path)
