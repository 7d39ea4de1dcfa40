"""Weights that are damaged in one place end the requests that meet it, with an error that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from checkpoints import make_checkpoint
from engine_checks import TINY
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.request_output import RequestOutput

pytestmark = pytest.mark.usefixtures("preloaded_engines")

LETTERS = StructuredOutputsParams(regex="[a-h]{30}")
JSON = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
REQUESTS = [
    ("the cache", SamplingParams(seed=1, structured_outputs=LETTERS)),
    ("the Q cache", SamplingParams(seed=2, structured_outputs=LETTERS)),
    ("the keys and values", SamplingParams(temperature=0.0, max_tokens=30, logprobs=1)),
    ("Q", SamplingParams(temperature=0.0, structured_outputs=JSON)),
    ("of Q", SamplingParams(temperature=0.0, max_tokens=30)),
]


def _generate(model: Path) -> list[RequestOutput]:
    with LLM(str(model), **TINY) as llm:
        return llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])


def test_nan_logits_end_their_requests_structured_or_not(tmp_path: Path) -> None:
    sound = make_checkpoint("llama", tmp_path / "sound")
    damaged = make_checkpoint("llama", tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    assert "lm_head.weight" in weights  # else the damage would be in everyone's logits
    token_id = Tokenizer.from_file(str(damaged / "tokenizer.json")).token_to_id("Q")
    weights["model.embed_tokens.weight"][token_id] = float("nan")
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})

    outputs = zip(_generate(sound), _generate(damaged), strict=True)
    for (prompt, _), (expected, found) in zip(REQUESTS, outputs, strict=True):
        assert expected.outputs[0].token_ids
        if "Q" not in prompt:
            assert found.outputs == expected.outputs
            continue
        assert found.outputs[0].finish_reason == "error"
        assert "the model produced NaN logits for this request" in found.outputs[0].error
        assert not found.outputs[0].token_ids
