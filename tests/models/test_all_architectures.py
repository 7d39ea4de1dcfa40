"""Every architecture that generates in `transformers`: read, or refused by its name and never for a value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.errors import UnknownArchitectureError
from quire.models.families import ARCHITECTURES
from quire.models.reading import model_config
from quire.models.wrappers import WRAPPERS

WITHOUT_DEFAULTS = {"gemma4_assistant"}  # its class takes no config that says nothing
MISSING = {  # entries whose defaults make no model that runs
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
}


def _model_types() -> list[tuple[str, str]]:
    """Return model types and the architectures that they are loaded as."""
    from transformers.models.auto import modeling_auto

    generating = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    of_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    pairs = [
        (model_type, name)
        for model_type, names in (*generating.items(), *of_images.items())
        for name in ((names,) if isinstance(names, str) else names)
    ]
    return [pair for pair in dict.fromkeys(pairs) if pair[0] not in WITHOUT_DEFAULTS]


def _refusal(values: dict[str, Any]) -> str:
    """Return why a config is refused; empty: it is read."""
    try:
        model_config(values)
    except UnknownArchitectureError as error:
        return str(error)
    return ""


@pytest.mark.formats
def test_the_config_of_a_class_is_read_or_refused_by_the_name_of_its_architecture() -> None:
    from transformers import AutoConfig

    for model_type, architecture in _model_types():
        saved = AutoConfig.for_model(model_type).to_json_string(use_diff=False)
        values = json.loads(saved) | MISSING.get(model_type, {})
        if architecture in ARCHITECTURES and "text_config" in values:
            continue  # a decoder's checkpoints have the config of the decoder, which comes under its own type
        refusal = _refusal(values | {"architectures": [architecture]})
        if architecture in ARCHITECTURES or architecture in WRAPPERS:
            assert not refusal, model_type
        else:
            assert refusal.startswith(f"config.json names the architecture {architecture}"), model_type


@pytest.mark.parametrize(
    "entries",
    [
        {"num_local_experts": 0},
        {"sliding_window_pattern": "LLLG"},
        {"intermediate_size": [8, 16]},
        {"rope_parameters": {"a": {"b": {"c": 1.0}}}},
        {"text_config": {"vocab_size": -1}},
    ],
)
def test_a_value_that_another_architecture_has_is_no_reason(entries: dict[str, Any]) -> None:
    refusal = _refusal({"architectures": ["StrangeForCausalLM"], **entries})
    assert "architecture StrangeForCausalLM, which Quire does not know; nearest by name: " in refusal
