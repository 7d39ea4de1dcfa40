"""Mixtures of experts on the kernels in Triton: the logits of `transformers`, in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import make_model, save_checkpoint
from paged_harness import PagedHarness, random_prompts
from quire.kernels.triton.device import is_interpreted
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder

pytestmark = pytest.mark.interpreter


@pytest.mark.first_case
@pytest.mark.skipif(not is_interpreted, reason="the harness has its cache in the host's memory")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe", "ernie4_5_moe", "gpt_oss"])
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(family, num_hidden_layers=2 if family in ("ernie4_5_moe", "gpt_oss") else 1)
    path = save_checkpoint(model, tmp_path)
    decoder = load_decoder(path, read_model_config(path), options=WeightOptions(kernels="triton"))
    prompts = random_prompts([13, 3], vocab_size=decoder.config.vocab_size)
    harness = PagedHarness(decoder, [13, 3])
    together = decoder.logits(harness.step([0, 1], [0, 0], prompts)).clone()
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([prompt])).logits[0].float() for prompt in prompts])
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=0)
    alone = decoder.logits(PagedHarness(decoder, [3]).step([0], [0], prompts[1:]))
    assert torch.equal(alone, together[13:])
