"""Encoders on the kernels in Triton: the rows of `transformers`, in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from encoders import hidden_states, make_encoder, random_prompts, save_encoder
from quire import LLM, PoolingParams
from quire.kernels.triton.device import is_interpreted

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not is_interpreted, reason="these have not been tried on a GPU"),
]

SMALL = {"kernels": "triton", "num_threads": 1, "max_num_batched_tokens": 300, "max_model_len": 140}
LENGTHS = [1, 2, 9, 10, 130]  # the windows below have 9 tokens on each side, and 10
FAMILIES: dict[str, dict[str, Any]] = {
    "mpnet": {"num_hidden_layers": 2},
    "modernbert": {"num_hidden_layers": 2},
    "roberta": {"num_hidden_layers": 1},
    "nomic": {"num_hidden_layers": 1},
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_encoder(name, **FAMILIES[name])
    prompts = random_prompts(LENGTHS)
    with LLM(str(save_encoder(model, tmp_path)), **SMALL) as llm:
        together = [output.outputs.data for output in llm.encode(prompts)]
        [alone] = llm.encode([prompts[3]])
    assert together[3].tobytes() == alone.outputs.data.tobytes()
    for prompt, row in zip(prompts, together, strict=True):
        np.testing.assert_allclose(row, hidden_states(model, prompt).double().mean(0), atol=1e-5, rtol=0)


def test_dense_layers_come_behind_pooling(tmp_path: Path) -> None:
    """EmbeddingGemma, as it is published but for its second dense layer."""
    layers = ["sliding_attention", "full_attention"]
    model = make_encoder("embeddinggemma", num_hidden_layers=2, layer_types=layers)
    dense = {"in_features": 64, "out_features": 24, "bias": False, "activation_function": "Identity"}
    modules = {"Pooling": {"pooling_mode_mean_tokens": True}, "Dense": dense, "Normalize": {}}
    save_encoder(model, tmp_path, modules)
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    save_file({"linear.weight": weight}, tmp_path / "2_Dense" / "model.safetensors")
    prompts = random_prompts(LENGTHS)
    with LLM(str(tmp_path), **SMALL) as llm:
        rows = [output.outputs.data for output in llm.encode(prompts)]
    for prompt, row in zip(prompts, rows, strict=True):
        expected = weight @ hidden_states(model, prompt).mean(0)
        np.testing.assert_allclose(row, expected / expected.norm(), atol=1e-5, rtol=0)


def test_the_second_text_has_tokens_of_its_own_type(tmp_path: Path) -> None:
    model = make_encoder("bert", num_hidden_layers=1)
    [prompt] = random_prompts([30])
    with LLM(str(save_encoder(model, tmp_path)), **SMALL) as llm:
        [output] = llm.encode([prompt], PoolingParams(second_text_at=11))
    types = torch.tensor([[0] * 11 + [1] * 19])
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), token_type_ids=types).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(output.outputs.data, expected, atol=1e-5, rtol=0)
    assert np.abs(output.outputs.data - hidden_states(model, prompt).mean(0).numpy()).max() > 1e-2
