"""A layer type and a family outside of Quire: read, planned, loaded, served and divided among ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_weights import PlainModel, Tensors, write_weights
from toy_layer import BottleneckConfig

from checkpoints import make_tokenizer
from lockstep_ranks import LockstepRanks
from paged_harness import generate, random_prompts
from quire import LLM, SamplingParams
from quire.errors import ModelError
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.models.config import ModelConfig
from quire.models.families import ARCHITECTURES, FAMILIES
from quire.models.families.family import Family
from quire.models.layer import LayerConfig

CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "layer_types": ["bottleneck", "full_attention", "bottleneck", "full_attention"],
    "bottleneck_size": 48,
}


def toy(hf: Any, base: ModelConfig) -> ModelConfig:
    """Put bottlenecks in place of the attention of some layers."""
    bottleneck = BottleneckConfig(inner_size=hf["bottleneck_size"])
    layers = (
        LayerConfig((bottleneck, layer.parts[1])) if layer_type == "bottleneck" else layer
        for layer, layer_type in zip(base.layers, hf["layer_types"], strict=True)
    )
    return dataclasses.replace(base, layers=tuple(layers))


@pytest.fixture
def toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    names = FAMILIES["llama"].weight_names
    family = Family(toy, names, layer_types=("full_attention", "bottleneck"))
    monkeypatch.setitem(FAMILIES, "toy", family)
    monkeypatch.setitem(ARCHITECTURES, "ToyForCausalLM", "toy")


def make_toy(path: Path) -> PlainModel:
    """Write a checkpoint; return what its logits are."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    config = read_model_config(path)
    tensors = write_weights(config, path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer(path)
    plain = PlainModel(config, tensors)
    plain.mixers[BottleneckConfig] = bottleneck
    return plain


def bottleneck(rows: torch.Tensor, own: Tensors) -> torch.Tensor:
    return torch.tanh(rows @ own["mixer.squeeze"].T) @ own["mixer.widen"].T


@pytest.mark.usefixtures("toy_family")
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_an_engine_serves_it(kernels: str, tmp_path: Path) -> None:
    plain = make_toy(tmp_path)
    prompts = random_prompts([3, 40, 40], vocab_size=CONFIG["vocab_size"])
    prompts[2][:32] = prompts[1][:32]  # a cached prefix
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), kernels=kernels, num_kv_blocks=32, max_num_batched_tokens=16) as llm:
        outputs = [llm.generate([{"prompt_token_ids": prompt}], greedy)[0] for prompt in prompts]
    assert outputs[2].num_cached_tokens == 32
    for prompt, output in zip(prompts, outputs, strict=True):
        found = list(output.outputs[0].token_ids)
        expected = plain.logits(prompt + found[:-1])[len(prompt) - 1 :]
        assert found == expected.argmax(-1).tolist()


@pytest.mark.usefixtures("toy_family")
def test_ranks_divide_it(tmp_path: Path) -> None:
    plain = make_toy(tmp_path)
    config = read_model_config(tmp_path)
    prompts = random_prompts([20], vocab_size=config.vocab_size)
    ranks = LockstepRanks(2)
    decoders = ranks.load(tmp_path, config)
    for [found] in ranks.run(lambda each: generate(decoders[each.shard.rank], prompts, num_new=4)):
        expected = plain.logits(prompts[0] + found.token_ids[:-1])[len(prompts[0]) - 1 :]
        torch.testing.assert_close(found.logits, expected, atol=2e-4, rtol=0)


@pytest.mark.usefixtures("toy_family")
def test_a_missing_weight_has_its_name_in_the_checkpoint(tmp_path: Path) -> None:
    make_toy(tmp_path)
    config = read_model_config(tmp_path)
    smaller = dataclasses.replace(config, layers=config.layers[1:2])
    write_weights(smaller, tmp_path)
    with pytest.raises(ModelError, match=r"lacks model\.layers\.0\.mixer\.squeeze\.weight"):
        load_decoder(tmp_path, config)


def test_other_families_do_not_have_its_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ModelError, match="layer type 'bottleneck'; known: full_attention, sliding_attention"):
        read_model_config(tmp_path)
