"""Models that score labels of each token, against `transformers` on random checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from encoders import DECODERS, make_encoder, random_prompts, save_encoder
from quire import LLM, PoolingParams
from quire.errors import InvalidRequestError

NAMES = ["bert", "roberta", "xlm-roberta", "camembert", "distilbert", "modernbert", *DECODERS]
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
