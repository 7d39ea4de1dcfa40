"""Rotary settings from every place where a config has them, against what `transformers` makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from quire.errors import ModelError
from quire.models.families import ARCHITECTURES
from quire.models.layers.attention import AttentionConfig
from quire.models.reading import model_config
from quire.models.rotary import inverse_frequencies

MAX_LEN, HEAD_DIM = 256, 16
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_LEN,
    "sliding_window": 9,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
WITH_ATTENTION = {  # of hybrids, whose configs may leave it out
    "BambaForCausalLM": {"attn_layer_indices": [0]},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["full_attention", *["linear_attention"] * 5],
        "position_embedding_type": "rope",
    },
}
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


def _maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


NUMBERS = st.floats(0.25, 40, allow_nan=False).map(lambda number: round(number, 2))
FACTORS = st.lists(st.floats(1, 30).map(lambda number: round(number, 2)), min_size=8, max_size=8)
ORIGINAL = st.sampled_from([16, 64, 100, MAX_LEN])
THETA = st.sampled_from([500.0, 1e4, 1e6])
ENTRIES: dict[str, st.SearchStrategy[Any]] = {
    "factor": st.sampled_from([1.0, 2.0, 4.0, 8.5]),
    "original_max_position_embeddings": ORIGINAL,
    "rope_theta": THETA,
    "attention_factor": st.sampled_from([0.5, 1.0, 1.3]),
    "beta_fast": NUMBERS,
    "beta_slow": NUMBERS,
    "truncate": st.booleans(),
    "mscale": NUMBERS,
    "mscale_all_dim": NUMBERS,
    "low_freq_factor": NUMBERS,
    "high_freq_factor": NUMBERS,
    "short_factor": FACTORS,
    "long_factor": FACTORS,
    "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
    "finetuned": st.booleans(),
}


@st.composite
def _sets(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(list(NEEDED)))
    needed = [name for name in NEEDED[kind] if draw(st.integers(0, 9))]
    others = draw(st.lists(st.sampled_from(list(ENTRIES)), unique=True, max_size=5))
    names = draw(st.sampled_from([["rope_type"], ["type", "rope_type"], ["type"]]))
    return dict.fromkeys(names, kind) | {name: draw(ENTRIES[name]) for name in {*needed, *others}}


@st.composite
def _configs(draw: st.DrawFn) -> dict[str, Any]:
    beside = {
        "rope_theta": THETA,
        "original_max_position_embeddings": ORIGINAL,
        "partial_rotary_factor": ENTRIES["partial_rotary_factor"],
        "rope_local_base_freq": THETA,
    }
    config = {name: draw(values) for name, values in beside.items() if draw(st.booleans())}
    places = draw(st.sampled_from(["", "old", "new", "nested", "old new", "old nested"]))
    if "old" in places:
        config["rope_scaling"] = draw(_maybe(_sets()))
    if "new" in places:
        config["rope_parameters"] = draw(_maybe(_sets()))
    if "nested" in places:
        config["rope_parameters"] = {
            name: draw(_maybe(_sets()))
            for name in ("full_attention", "sliding_attention")
            if draw(st.integers(0, 4))
        }
    return config


def _reference(architecture: str, config: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Return short and long frequencies and the factor on cosines and sines, by layer type."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model_class = getattr(transformers, architecture)
    values = model_class.config_class.from_dict(json.loads(json.dumps(config)))
    module = __import__(model_class.__module__, fromlist=["x"])
    (name,) = [name for name in vars(module) if name.endswith("RotaryEmbedding") and architecture[:3] in name]
    rotary = getattr(module, name)(values)
    found = []
    two = ["full_attention_", "sliding_attention_"]
    for prefix in two if hasattr(rotary, f"{two[0]}inv_freq") else [""]:
        short, scale = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")
        kind = rotary.rope_type[prefix[:-1]] if prefix else rotary.rope_type
        layer_type = {"layer_type": prefix[:-1]} if prefix else {}
        is_longrope = kind == "longrope"
        long = (
            ROPE_INIT_FUNCTIONS[kind](values, "cpu", seq_len=10**6, **layer_type)[0] if is_longrope else short
        )
        found.append((short, long, scale))
    return found


@pytest.fixture(scope="module", autouse=True)
def _quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()


@pytest.mark.formats
@pytest.mark.first_case
@given(config=_configs())
@example(
    config={
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0},
            "sliding_attention": {"rope_type": "default"},
        },
    }
)
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_frequencies_are_those_of_transformers_or_refused(architecture: str, config: dict[str, Any]) -> None:
    config = {"architectures": [architecture], **SHAPE, **WITH_ATTENTION.get(architecture, {}), **config}
    old = config.get("rope_scaling") or {}
    # In the two with several sets, transformers 5.24 reads the oldest form as if it were not there.
    assume(architecture not in ("Gemma3ForCausalLM", "Olmo3ForCausalLM") or "rope_type" in old or not old)
    try:
        wanted = _reference(architecture, config)
    except Exception:  # of many kinds; there is nothing to compare with
        event("transformers refuses")
        return
    try:
        layers = model_config(config).parts
    except ModelError:
        event("Quire refuses")
        return
    event("read")
    attention = {part.window > 0: part.rope for part in layers if isinstance(part, AttentionConfig)}
    ropes = (
        [attention[key] for key in sorted(attention)]
        if len(wanted) > 1
        else [*{*attention.values()} - {None}]
    )
    for rope, (short, long, scale) in zip(ropes, wanted, strict=True):
        assert rope.attention_factor == pytest.approx(scale)
        for length, frequencies in ((0, short), (10**6 if rope.kind == "longrope" else MAX_LEN, long)):
            torch.testing.assert_close(inverse_frequencies(rope, length), frequencies, rtol=2e-6, atol=0)
