"""What an engine on a GPU computes before its first request, on the reference kernels and on no numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from step_driver import StepDriver, model_cache

from checkpoints import make_checkpoint
from quire.execution.model_runner import ModelRunner
from quire.execution.warm_up import LENGTHS, warm_up
from quire.kernels.token_choice import TokenChoice
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    path = make_checkpoint("qwen3", tmp_path)
    return load_decoder(path, read_model_config(path))


def driven(model: Decoder, warms_up: bool) -> list[int]:
    cache = model_cache(model)
    runner = ModelRunner(model, cache, max_num_seqs=4, max_model_len=128, block_size=cache.block_size)
    if warms_up:
        warm_up(model, cache, 128)
    driver = StepDriver(runner, cache, max_num_seqs=4)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0))
    driver.run(6)
    return driver.requests["a"].output


def test_requests_after_it_are_what_they_would_be(model: Decoder) -> None:
    assert driven(model, warms_up=True) == driven(model, warms_up=False)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "lengths"), [(200, 500, LENGTHS), (2, 500, (1, 8)), (200, 30, (1, 30))]
)
def test_prompts_fit_the_engine(
    model: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    num_blocks: int,
    max_model_len: int,
    lengths: tuple[int, ...],
) -> None:
    computed: list[int] = []
    chosen: list[torch.Size] = []
    forward = Decoder.forward

    class Choice(TokenChoice):
        def choose(self, logits, draws=None, changes=None):
            chosen.append(draws.top_k.shape)
            return torch.zeros(1, dtype=torch.int64), logits[:, 0]

        def logprobs(self, logits, chosen, num_likeliest, rows):
            raise NotImplementedError

    def watched(self: Decoder, token_ids: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        computed.append(len(token_ids))
        return forward(self, token_ids, *rest, **options)

    monkeypatch.setattr(Decoder, "forward", watched)
    monkeypatch.setattr(type(model.kernels), "token_choice", Choice())
    warm_up(model, model_cache(model, num_blocks), max_model_len)
    assert tuple(computed) == lengths
    assert chosen == [torch.Size([1])] * len(lengths)
