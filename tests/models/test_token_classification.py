"""Models that score labels of each token, against `transformers` on random checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from encoders import DECODERS, make_encoder, random_prompts, save_encoder
from quire import LLM, PoolingParams
from quire.errors import InvalidRequestError
from quire.kernels.dispatch import kernel_set
from quire.models.row_layers import DenseRows, through

NAMES = ["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert", "modernbert", *DECODERS]
SMALL = {"num_threads": 2, "num_kv_blocks": 128}


@pytest.mark.formats
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_encoder(name, kind="ForTokenClassification", num_labels=3)
    save_encoder(model, tmp_path)
    prompts = random_prompts([1, 2, 70, 33])
    with LLM(str(tmp_path), max_num_batched_tokens=100 if name not in DECODERS else 32, **SMALL) as llm:
        assert llm.info.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        raw = llm.encode(prompts, PoolingParams(activation=False))
        for prompt, output, scores in zip(prompts, llm.encode(prompts), raw, strict=True):
            with torch.inference_mode():
                expected = model(torch.tensor([prompt])).logits[0]
            assert output.outputs.error is None
            np.testing.assert_allclose(output.outputs.data, expected.softmax(-1), atol=1e-5, rtol=0)
            np.testing.assert_allclose(scores.outputs.data, expected, atol=1e-5, rtol=1e-5)
            [unit] = llm.encode([prompt], PoolingParams(normalize=True))
            probabilities = expected.softmax(-1)
            lengths = probabilities.norm(dim=-1, keepdim=True)
            np.testing.assert_allclose(unit.outputs.data, probabilities / lengths, atol=2e-5, rtol=0)
            [alone] = llm.encode([prompt])
            assert alone.outputs.data.tobytes() == output.outputs.data.tobytes()


def test_no_bit_depends_on_chunks(tmp_path: Path) -> None:
    save_encoder(make_encoder("qwen3", kind="ForTokenClassification", num_labels=5), tmp_path)
    prompts = random_prompts([300, 1, 70, 33])
    found = []
    for step_tokens in (404, 64, 7):
        with LLM(str(tmp_path), max_num_batched_tokens=step_tokens, **SMALL) as llm:
            found.append([output.outputs.data.tobytes() for output in llm.encode(prompts)])
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("num_labels", [1, 3, 9])
def test_no_bit_of_a_row_depends_on_others(name: str, num_labels: int) -> None:
    generator = torch.Generator().manual_seed(num_labels)
    matrices = [torch.randn(sizes, generator=generator) / 8 for sizes in ((64, 64), (num_labels, 64))]
    first, last = (kernel_set(name).linear([matrix], dtype=torch.float32) for matrix in matrices)
    layers = [DenseRows(first, "gelu", torch.ones(64), torch.zeros(64), 1e-5), DenseRows(last, "tanh")]
    rows = torch.randn((300, 64), generator=generator)
    hidden = torch.nn.functional.layer_norm(torch.nn.functional.gelu(rows @ matrices[0].T), (64,))
    together = through(layers, rows)
    torch.testing.assert_close(together, torch.tanh(hidden @ matrices[1].T), atol=1e-5, rtol=1e-5)
    assert torch.equal(together, torch.cat([through(layers, row[None]) for row in rows]))
    for start in (1, 7, 130):
        assert torch.equal(together[start:], through(layers, rows[start:]))


def test_other_rows_are_refused(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert", kind="ForTokenClassification"), tmp_path / "tokens")
    with LLM(str(tmp_path / "tokens"), **SMALL) as llm:
        for call in (llm.embed, llm.classify, llm.reward, lambda text: llm.score(text, text)):
            with pytest.raises(InvalidRequestError, match=r"scores 2 labels of each token; use LLM\.encode"):
                call("a")
        with pytest.raises(InvalidRequestError, match=r"pooling_type is mean, but .* was trained for all"):
            llm.encode("a", PoolingParams(pooling_type="mean"))
    save_encoder(make_encoder("bert"), tmp_path / "bert")
    with (
        LLM(str(tmp_path / "bert"), **SMALL) as llm,
        pytest.raises(InvalidRequestError, match=r"pooling_type is all, but .* was trained for mean"),
    ):
        llm.encode("a", PoolingParams(pooling_type="all"))
